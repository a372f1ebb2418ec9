"""The proposals of a step: from the drafter, or from the text."""

import time
from typing import Any

from volley.decode.work import Rule, Shape, Work
from volley.engine.step import Step
from volley.proposers.base import Proposer
from volley.proposers.lookup import TextLookup


def propose(step: Step, drafter: Proposer | None) -> None:
    """Fill in the proposal of every work that asks for one."""
    with step.timings.count("draft"):
        copying: list[Work[Any]] = [work for work in step.works if work.ask.shape is Shape.COPY]
        drafting: list[Work[Any]] = [work for work in step.works if work.ask.positions]
        TextLookup().propose(copying, with_confidence=step.with_confidence)
        if drafting:
            assert drafter is not None, "a policy drafts nothing without a drafter"
            step.timings.walk = drafter.propose(drafting, with_confidence=step.with_confidence)
        for work in drafting:
            if work.ask.rule is Rule.MATCH:
                work.request.foreseen = max(work.request.foreseen, work.request.length + work.ask.positions)
    step.drafting = time.perf_counter() - step.started
