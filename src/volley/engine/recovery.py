"""After a step raised: find the request that is to blame, and let all others go on as if nothing had happened."""

from volley.engine.engine import Engine
from volley.errors import ParallelError
from volley.procedures.request import Request


def recover(engine: Engine, error: Exception) -> list[tuple[Request, Exception]]:
    """Abort the requests at fault and return them, each with what it raised; call it when ``engine.step`` raised ``error``.

    Everybody gives pages back, since a broken step may have left any K/V half written. Each request of the step then runs
    alone until it has gained a token: one that raises again is at fault, the others have made progress, so that even an
    error which only the batch shows cannot stop them for good. Raises ``AssertionError`` if the page books are wrong, and a
    ``ParallelError`` as it is: after that nothing can run.
    """
    if isinstance(error, ParallelError):
        raise error
    scheduler = engine.scheduler
    running, waiting = list(scheduler.running), list(scheduler.waiting)
    suspects = [*running, *waiting[:1]]  # the first in the queue may have raised while it was admitted
    for request in [*running, *waiting]:
        scheduler.finish(request)
    engine.reset_prefix_cache()
    faults = list[tuple[Request, Exception]]()
    for request in suspects:
        is_torn = request.stats.output_tokens != request.num_output  # the error struck while it was taking tokens
        own = error if is_torn else _step_alone(engine, request)
        if own is not None:
            engine.abort(request)
            faults.append((request, own))
    for request in [*running, *waiting]:
        if request.finish_reason is None:
            scheduler.add(request)
    engine.check_integrity()
    return faults


def _step_alone(engine: Engine, request: Request) -> Exception | None:
    """Make the text that it still lacks, and run until the request has one more token; what it raised, if it did."""
    request.stats.preemptions += 1
    before = request.num_output
    if request.finish_reason is None:
        engine.scheduler.add(request)
    try:
        request.write()
        while request.finish_reason is None and request.num_output == before:
            engine.step()
    except Exception as error:
        return error
    finally:
        engine.scheduler.finish(request)
    return None
