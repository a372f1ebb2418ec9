"""A step: its timings, who decodes, which proposer fills in which work, and every procedure judging its own works once."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.made_up import decoding, request
from volley.config import DecodingConfig
from volley.decode.on_device import Reading
from volley.decode.work import NO_DRAFT, DraftSpec, Phase, Proposal, Rule, Shape, Verdict, Work, Works
from volley.engine.step import Step, Timings, accept, choose, conclude, propose
from volley.procedures.request import Request
from volley.procedures.speculative import Speculative
from volley.proposers.base import Proposer

CHAIN, TREE = DraftSpec(Shape.CHAIN, Rule.GREEDY, 3, 3), DraftSpec(Shape.TREE, Rule.GREEDY, 7, 3)
LOOKUP = DraftSpec(Shape.LOOKUP, Rule.GREEDY, 2)


class Noting(Speculative):
    def __init__(self) -> None:
        super().__init__(DecodingConfig())
        self.seen: list[list[int]] = []

    def verify(self, works: Sequence[Work[Request]], logits: Tensor) -> Reading:
        self.seen.append([work.request.request_id for work in works])
        return Reading()


def test_every_procedure_judges_all_its_works_at_once() -> None:
    one, other = Noting(), Noting()
    owners = [one, other, one, one, other]
    requests = [decoding([1, 2], request_id=i, procedure=owner) for i, owner in enumerate(owners)]
    step = Step([Work(own, NO_DRAFT) for own in requests], logits=torch.zeros(5, 3))
    accept(step, choose(step))
    assert (one.seen, other.seen) == ([[0, 2, 3]], [[1, 4]])
    assert step.timings.verify > 0


def test_a_step_without_logits_is_judged_by_nobody() -> None:
    with pytest.raises(AssertionError):
        choose(Step([]))


def test_a_request_is_torn_until_all_of_a_verdict_is_taken() -> None:
    class Cut(list[Any]):
        def __getitem__(self, _: Any) -> Any:
            raise KeyboardInterrupt

    own = decoding([1, 2])
    work = Work(own, NO_DRAFT)
    work.verdict, work.scores = Verdict(0, [5]), Cut()
    with pytest.raises(KeyboardInterrupt):
        conclude(Step([work]), work, 0.0)
    assert own.is_torn
    work.scores = []
    own = work.request = decoding([1, 2])
    assert conclude(Step([work]), work, 0.0)
    assert not own.is_torn


def test_prompts_do_not_decode() -> None:
    reading, own = Work(request([1, 2]), NO_DRAFT, Phase.PREFILL, 2), Work(decoding([1, 2]), NO_DRAFT)
    assert Step([reading, own]).decoding == [own]


def test_seconds_of_a_part_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([1.0, 3.0, 10.0, 10.5, 20.0, 24.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    timings = Timings()
    for part in ("draft", "verify", "draft"):
        with timings.count(part):
            pass
    assert (timings.draft, timings.verify, timings.walk) == (6.0, 0.5, 0.0)


class Spy(Proposer):
    def __init__(self) -> None:
        self.calls: list[tuple[list[Shape], bool]] = []

    def propose(self, works: Works, *, with_confidence: bool) -> float:
        self.calls.append(([work.spec.shape for work in works], with_confidence))
        for work in works:
            work.proposal = Proposal([9] * work.spec.positions)
        return 0.25


@pytest.mark.parametrize("with_confidence", [False, True])
def test_the_drafter_is_asked_once_for_all_that_draft_and_copies_come_from_the_text(with_confidence: bool) -> None:
    works = [
        Work(decoding([1, 2]), CHAIN),
        Work(decoding([1, 2]), LOOKUP, lookup_tokens=[4, 5, 6]),
        Work(decoding([1, 2]), NO_DRAFT),
        Work(request([1, 2]), NO_DRAFT, Phase.PREFILL, 2),
        Work(decoding([1, 2]), TREE),
    ]
    spy, step = Spy(), Step(works, with_confidence)
    propose(step, spy)
    assert spy.calls == [([Shape.CHAIN, Shape.TREE], with_confidence)]
    assert [work.proposal.token_ids for work in works] == [[9] * 3, [4, 5], [], [], [9] * 3]
    assert step.timings.walk == 0.25


def test_a_drafter_with_nothing_to_do_is_left_alone() -> None:
    spy = Spy()
    propose(Step([Work(decoding([1, 2]), NO_DRAFT), Work(decoding([1, 2]), LOOKUP)]), spy)
    assert spy.calls == []
    propose(Step([Work(decoding([1, 2]), NO_DRAFT)]), None)


def test_positions_of_matched_drafts_are_foreseen_and_stay_so() -> None:
    own = decoding([1, 2, 3])
    for rule, positions, foreseen in (
        (Rule.GREEDY, 5, 0),
        (Rule.REJECTION, 5, 0),
        (Rule.COUPLED, 4, 7),
        (Rule.COUPLED, 2, 7),
        (Rule.REJECTION, 9, 7),
        (Rule.COUPLED, 6, 9),
    ):
        propose(Step([Work(own, DraftSpec(Shape.CHAIN, rule, positions, positions))]), Spy())
        assert own.noise_used_until == foreseen
    propose(Step([Work(own, DraftSpec(Shape.LOOKUP, Rule.COUPLED, 30), lookup_tokens=[1] * 30)]), Spy())
    assert own.noise_used_until == 9, "a copy knows no noise"


def test_as_much_is_copied_as_was_asked_for() -> None:
    specs = [DraftSpec(Shape.LOOKUP, Rule.COUPLED, size) for size in (0, 2, 9)]
    works = [Work(decoding([1, 2]), spec, lookup_tokens=[4, 5, 6]) for spec in specs]
    propose(Step(works), None)
    assert [work.proposal.token_ids for work in works] == [[], [4, 5], [4, 5, 6]]
    assert all(work.proposal.draft_probs is None and work.proposal.parents is None for work in works)
    assert works[0].lookup_tokens == [4, 5, 6], "what was found is judged even where it was not used"
