"""Replace the drafter while requests run."""

from volley.engine.engine import Engine
from volley.models.drafters.drafter import Drafter


def replace_drafter(engine: Engine, drafter: Drafter) -> None:
    """Draft with ``drafter`` from the next step on. If it is refused, nothing changes.

    Call this between two steps. Output does not change. Requests are prefilled again, as after a preemption, to make the new
    drafter's K/V. These reuse the old drafter's memory if the shapes are equal.
    """
    parts = (engine, *engine.procedures.by_mode.values())
    before = [dict(vars(part)) for part in parts]
    scheduler, runner, known = engine.scheduler, engine.runner, engine.pacing.costs.target
    requests = [*scheduler.running, *scheduler.waiting]
    try:
        engine.use_drafter(drafter)
    except BaseException:
        if engine.runner is not runner:
            engine.runner.close()
        for part, own in zip(parts, before, strict=True):
            vars(part).update(own)
        raise
    runner.close()
    costs = engine.pacing.costs
    known.measured_by(engine.runner.seconds)  # target passes take as long as before
    costs.target = known
    engine.procedures.use_costs(known)
    for request in requests:
        request.stats.preemptions += request in scheduler.running
        scheduler.finish(request)
        request.draft_table = request.table  # a ring belonged to the old drafter
        request.drafts_from = 0
        engine.set_up(request)
        engine.scheduler.add(request)
