"""Replace the drafter while requests run."""

from volley.engine.core import EngineCore
from volley.engine.engine import Engine
from volley.models.drafters.drafter import Drafter


def replace_drafter(engine: Engine, drafter: Drafter) -> None:
    """Draft with ``drafter`` from the next step on. If it is refused, nothing changes.

    Call this between two steps. Output does not change. Requests are prefilled again, as after a preemption, to make the new
    drafter's K/V. These reuse the old drafter's memory if the shapes are equal.
    """
    old = engine.core
    new = EngineCore(engine.target, drafter, engine.config, engine.capacity, engine.arrivals, before=old)
    costs = old.pacing.costs.target
    costs.measured_by(new.runner.seconds)  # target passes take as long as before
    new.pacing.costs.target = costs
    engine.procedures.use_costs(costs)
    old.runner.close()
    engine.core = new
    for request in [*old.scheduler.running, *old.scheduler.waiting]:
        request.stats.preemptions += request in old.scheduler.running
        old.scheduler.finish(request)
        request.draft_table = request.table  # a ring belonged to the old drafter
        request.drafts_from = 0
        engine.set_up(request)
        new.scheduler.add(request)
