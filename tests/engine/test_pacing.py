"""Facts that the engine shows its policy, and those that it does not."""

import time
from collections.abc import Sequence, Set
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.made_up import decoding, with_batch
from tests.tiny import Pair, random_prompts
from volley import Engine, SamplingParams
from volley.decode.lookup import Lookup
from volley.decode.work import NO_DRAFT, DraftSpec, Verdict, Work
from volley.engine.pacing import Pacing
from volley.engine.step import Step
from volley.policies.base import Cycle, Policy, View
from volley.policies.cost import Costs, PassCost
from volley.procedures.request import Request
from volley.procedures.speculative import Speculative


class Spy(Policy):
    """Notes what it is shown, and drafts up to two tokens."""

    def __init__(self, **uses: bool) -> None:
        for name, value in uses.items():
            setattr(self, name, value)
        self.views: list[View] = []
        self.cycles: list[Cycle] = []
        self.prompts: list[int] = []

    def decide(self, views: Sequence[View], under_way: int) -> list[DraftSpec]:
        self.views += views
        return [view.draft(2) for view in views]

    def observe(self, cycles: Sequence[Cycle]) -> None:
        self.cycles += cycles

    def prefilled(self, request_id: int, temperature: float, logits: Tensor, hidden: Tensor) -> None:
        self.prompts.append(request_id)


class Unpaced(Speculative):
    """Shows the policy nothing."""

    def __init__(self) -> None:
        pass

    def view(self, request: Request, largest: int) -> Any:
        return None


def pacing(policy: Policy, *, can_grow_trees: bool = True) -> Pacing:
    costs = Costs(lambda tokens, requests: 0.1, lambda tokens, requests: 1 + 0.1 * tokens)
    policy.attach(6, costs)
    return Pacing(policy, costs, can_grow_trees=can_grow_trees)


def test_a_request_whose_procedure_shows_nothing_is_not_the_policys_to_decide() -> None:
    policy = Spy()
    shown, hidden = decoding([1, 2, 3], request_id=1), decoding([1, 2, 3], request_id=2, procedure=Unpaced())
    works = pacing(policy).decide([hidden, shown], 2)
    assert [view.request_id for view in policy.views] == [1]
    assert {work.request.request_id: work.spec.size for work in works} == {1: 2, 2: 0}
    pacing(own := Spy()).decide([hidden], 1)
    assert own.views == []


@pytest.mark.parametrize(("can_grow", "most"), [(True, None), (False, 0)])
def test_no_trees_are_offered_where_nothing_can_grow_them(can_grow: bool, most: int | None) -> None:
    policy = Spy()
    pacing(policy, can_grow_trees=can_grow).decide([decoding([1, 2, 3])], 1)
    assert policy.views[0].max_nodes == most


def test_a_text_is_searched_for_a_policy_that_copies() -> None:
    policy = Spy(uses_lookup=True)
    (work,) = pacing(policy).decide([decoding([1, 2, 3, 4, 1, 2, 3])], 1)
    assert work.lookup_tokens[:4] == [4, 1, 2, 3]
    assert policy.views[0].lookup_confidence[:2] == [3 / 4, 4 / 5]


def test_a_text_is_not_searched_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lookup, "find", lambda *_: pytest.fail("nobody asked"))
    policy = Spy()
    (work,) = pacing(policy).decide([decoding([1, 2, 3, 4, 1, 2, 3])], 1)
    assert (work.lookup_tokens, policy.views[0].lookup_confidence) == ([], [])


@pytest.mark.parametrize("uses_costs", [False, True])
def test_costs_are_learnt_for_a_policy_that_weighs_them(monkeypatch: pytest.MonkeyPatch, uses_costs: bool) -> None:
    seen: list[tuple[int, int, int]] = []
    monkeypatch.setattr(
        PassCost, "observe", lambda self, tokens, requests, _, read=0: seen.append((tokens, requests, read))
    )
    policy = Spy(uses_costs=uses_costs)
    own = pacing(policy)
    works = own.decide([decoding([1, 2, 3]), decoding([4, 5])], 2)
    for work in works:
        work.proposal.token_ids = [7, 8]
        work.proposal.confidence = [0.5, 0.5]
        work.verdict = Verdict(1, [7, 9])
    step = with_batch(Step(works))
    own.trim(step)
    own.observe(step)
    own.time(step)
    assert seen == ([(6, 2, 0), (6, 2, 0)] if uses_costs else [])
    assert [cycle.right for cycle in policy.cycles] == [[True, False]] * 2


def test_a_step_that_only_reads_tells_the_policy_nothing() -> None:
    policy = Spy(uses_costs=True)
    own = decoding([1, 2, 3])
    own.computed = 0
    step = with_batch(Step([own.procedure.read(own, 1)]))
    paced = pacing(policy)
    paced.trim(step)
    paced.observe(step)
    paced.time(step)
    assert policy.cycles == []


@pytest.mark.parametrize(("drafts", "costs"), [(True, [1.5, 7.5]), (False, [7.5])])
def test_all_of_a_step_is_in_its_costs(monkeypatch: pytest.MonkeyPatch, drafts: bool, costs: list[float]) -> None:
    """Host work before and after the passes counts too, but not work deferred by earlier steps."""
    seen: list[float] = []
    monkeypatch.setattr(PassCost, "observe", lambda self, tokens, requests, seconds, read=0: seen.append(seconds))
    own = pacing(Spy(uses_costs=True))
    works = own.decide([decoding([1, 2, 3])], 1) if drafts else [Work(decoding([1, 2, 3]), NO_DRAFT)]
    works[0].proposal.token_ids = [7, 8] if drafts else []
    works[0].verdict = Verdict(0, [9])
    step = with_batch(Step(works, started=100.0, settling=2.0, drafting=1.5 if drafts else 0.0))
    own.trim(step)
    own.observe(step)
    monkeypatch.setattr(time, "perf_counter", lambda: 111.0 if drafts else 109.5)
    own.time(step)
    assert sorted(seen) == costs


def test_steps_in_which_passes_were_timed_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    monkeypatch.setattr(PassCost, "observe", lambda self, tokens, requests, seconds, read=0: seen.append(seconds))
    own = pacing(Spy(uses_costs=True))
    for timed, lessons in ((1, 0), (1, 1), (32, 1), (1, 2)):
        work = Work(decoding([1, 2, 3]), NO_DRAFT)
        work.verdict = Verdict(0, [9])
        step = with_batch(Step([work], started=time.perf_counter()))
        own.costs.target.time(timed)
        own.trim(step)
        own.observe(step)
        own.time(step)
        assert len(seen) == lessons


@pytest.mark.parametrize("uses_prefill", [False, True])
def test_prompts_are_shown_once_when_they_are_read_to_their_end(pair: Pair, uses_prefill: bool) -> None:
    policy = Spy(uses_prefill=uses_prefill)
    engine = Engine(pair.target, pair.drafter, policy=policy, page_size=4, num_pages=16, max_batch_tokens=9)
    results = list(engine.generate(random_prompts(5, seed=1), SamplingParams(max_tokens=15)))
    assert sum(result.stats.preemptions for result in results) > 0, "what is read again was shown before"
    assert sorted(policy.prompts) == (list(range(5)) if uses_prefill else [])


def test_prompts_need_the_drafters_taps_to_be_shown() -> None:
    policy = Spy(uses_prefill=True)
    own = decoding([1, 2, 3])
    step = Step([Work(own, NO_DRAFT)], logits=torch.zeros(1, 5))
    step.works[0].verdict = Verdict(0, [1])
    paced = pacing(policy)
    paced.trim(step)
    paced.observe(step)
    assert policy.prompts == []


class Every(Spy):
    """Keeps up with every so many requests."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every

    def draft_kv_every(self, sampled: Set[bool], under_way: int) -> int:
        assert (sampled, under_way) == ({False, True}, 7)
        return self.every


@pytest.mark.parametrize(("every", "drafting"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 3, 4]), (0, [3])])
def test_drafting_is_suspended_as_the_policy_says_unless_a_request_drafts(every: int, drafting: list[int]) -> None:
    requests = [decoding([1, 2], SamplingParams(temperature=own % 2), request_id=own) for own in range(5)]
    policy = Every(every)
    own = Pacing(policy, costs := Costs(lambda *_: 0.1, lambda *_: 1.0), can_grow_trees=False, can_suspend=True)
    policy.attach(6, costs)
    works = [Work(request, NO_DRAFT) for request in requests]
    works[3].spec = own.decide([requests[3]], 7)[0].spec
    own.suspend_drafting(works, requests, 7)
    assert [request.request_id for request in requests if not request.drafting_suspended] == drafting
    own.can_suspend = False
    for request in requests:
        request.drafting_suspended = False
    own.suspend_drafting(works, requests, 7)
    assert not any(request.drafting_suspended for request in requests)
