"""Find the request at fault after a step raised an error, and let the others go on."""

from volley.engine.engine import Engine
from volley.errors import ParallelError
from volley.procedures.request import Request


def recover(engine: Engine, error: Exception) -> list[tuple[Request, Exception]]:
    """Abort the requests at fault and return each with its error. Call this when ``engine.step`` raised ``error``.

    All requests give their pages back, because the broken step may have left K/V half written. Then each request of the step
    runs alone until it has gained a token. A request that raises again is at fault. The other requests have made progress, so
    an error that only their batch causes cannot stop them for good. Raises ``AssertionError`` if page counts are wrong
    afterwards. A ``ParallelError`` is raised again, because no request can run after it.
    """
    if isinstance(error, ParallelError):
        raise error
    scheduler = engine.core.scheduler
    running, waiting = list(scheduler.running), list(scheduler.waiting)
    suspects = [*running, *waiting[:1]]  # admitting the first waiting request may have raised
    for request in [*running, *waiting]:
        scheduler.finish(request)
        request.canvas = None  # its pass may be half done; the same noise makes it again
    engine.reset_prefix_cache()
    faults = list[tuple[Request, Exception]]()
    for request in suspects:
        request.error = own = error if request.is_torn else _step_alone(engine, request)
        if own is not None:
            engine.abort(request)
            faults.append((request, own))
    for request in [*running, *waiting]:
        if request.finish_reason is None:
            scheduler.add(request)
        else:
            engine.abort(request)  # it had ended before the error
    engine.check_integrity()
    return faults


def _step_alone(engine: Engine, request: Request) -> Exception | None:
    """Make the missing text of ``request``, then run it alone until it has one more token. Return the exception, if any."""
    request.stats.preemptions += 1
    before = request.num_output
    if request.finish_reason is None:
        engine.core.scheduler.add(request)
    try:
        request.write()
        while request.finish_reason is None and request.num_output == before:
            engine.step()
    except Exception as error:
        return error
    finally:
        engine.core.scheduler.finish(request)
    return None
