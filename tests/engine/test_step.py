"""A step: its timings, who decodes, and every procedure judging its own works once."""

import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.made_up import decoding, request
from volley.config import DecodingConfig
from volley.decode.work import NO_DRAFT, Kind, Work
from volley.engine.step import Step, Timings, accept
from volley.procedures.request import Request
from volley.procedures.speculative import Speculative


class Noting(Speculative):
    def __init__(self) -> None:
        super().__init__(DecodingConfig())
        self.seen: list[list[int]] = []

    def absorb(self, works: Sequence[Work[Request]], logits: Tensor) -> None:
        self.seen.append([work.request.request_id for work in works])


def test_every_procedure_judges_all_its_works_at_once() -> None:
    one, other = Noting(), Noting()
    owners = [one, other, one, one, other]
    requests = [decoding([1, 2], request_id=i, procedure=owner) for i, owner in enumerate(owners)]
    step = Step([Work(own, NO_DRAFT) for own in requests], logits=torch.zeros(5, 3))
    accept(step)
    assert (one.seen, other.seen) == ([[0, 2, 3]], [[1, 4]])
    assert step.timings.verify > 0


def test_a_step_without_logits_is_judged_by_nobody() -> None:
    with pytest.raises(AssertionError):
        accept(Step([]))


def test_prompts_do_not_decode() -> None:
    reading, own = Work(request([1, 2]), NO_DRAFT, Kind.PREFILL, 2), Work(decoding([1, 2]), NO_DRAFT)
    assert Step([reading, own]).decoding == [own]


def test_seconds_of_a_part_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([1.0, 3.0, 10.0, 10.5, 20.0, 24.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    timings = Timings()
    for part in ("draft", "verify", "draft"):
        with timings.count(part):
            pass
    assert (timings.draft, timings.verify, timings.walk) == (6.0, 0.5, 0.0)
