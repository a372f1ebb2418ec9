"""Drafts on another engine's slots against volley's own, and what a policy hears of them. Nothing here needs vLLM."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import Pair, random_drafter, random_prompts
from volley import Engine, SamplingParams
from volley.config import DraftingConfig
from volley.decode.work import NO_DRAFT, DraftSpec, Proposal, Rule, Shape, Verdict, Work
from volley.models.checkpoints.checkpoint import HeadConfig
from volley.policies.base import Cycle, Policy, View
from volley.policies.fixed import Feedback
from volley.policies.goodput import Goodput
from volley.procedures.request import Request
from volley.vllm.drafting import SlotDrafter, SlotRequest, SlotTable
from volley.vllm.pacing import PassPacing

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "head": ({"head": HeadConfig(type="residual", rank=4, candidates=6)}, {}),
    "two steps": ({}, {"denoising_steps": 2, "denoising_schedule": "sqrt"}),
    "by confidence": ({}, {"denoising_steps": 3, "denoising_threshold": 0.05}),
    "draft window": ({}, {"draft_window": 7}),
    "sliding layer": ({"sliding_window": 5, "layer_types": ("full_attention", "sliding_attention")}, {}),
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_drafts_are_volleys_own(pair: Pair, name: str) -> None:
    changes, options = CASES[name]
    drafter = random_drafter(4, **changes)
    engine = Engine(pair.target, drafter, policy="fixed", **options)
    cycles: list[tuple[list[int], list[int]]] = []

    def note(request: Request, proposal: Proposal, verdict: Verdict) -> None:
        if proposal.token_ids:
            before = request.token_ids[: len(request.token_ids) - len(verdict.token_ids)]
            cycles.append((before, proposal.token_ids))

    engine.on_verified.append(note)
    list(engine.generate(random_prompts(3, longest=25, seed=3), SamplingParams(max_tokens=8)))
    assert len(cycles) > 10

    target = pair.target
    slots = SlotDrafter(drafter, DraftingConfig(**options), target.embed, target.head, len(cycles))
    slots.reserve(1000)
    free = np.random.default_rng(0).permutation(1000)
    works = []
    for index, (token_ids, drafted) in enumerate(cycles):
        *context, anchor = token_ids
        output = pair.hf(input_ids=torch.tensor([context]), output_hidden_states=True, use_cache=False)
        features = torch.cat([output.hidden_states[i + 1][0] for i in drafter.config.target_layer_ids], dim=-1)
        where, free = np.split(free, [len(context)])
        slots.inject(features, np.arange(len(context)), where, np.array(context, dtype=np.int32))
        size = len(drafted)
        works.append(Work(slots.request(index, index, where, anchor), DraftSpec(Shape.CHAIN, Rule.GREEDY, size, size)))
    slots.proposer.propose(works, with_confidence=True)
    assert [work.proposal.token_ids for work in works] == [drafted for _, drafted in cycles]
    for work in works:
        assert len(work.proposal.confidence) == work.spec.size
        assert all(0 < sure <= 1 for sure in work.proposal.confidence)


def test_only_what_was_injected_is_seen(pair: Pair) -> None:
    def make(**options: Any) -> SlotDrafter:
        drafter = SlotDrafter(pair.drafter, DraftingConfig(**options), pair.target.embed, pair.target.head, 2)
        drafter.reserve(64)
        features = torch.zeros(4, 2 * pair.target.hidden_size)
        drafter.inject(features, np.arange(4, 8), np.array([9, 3, 20, 4]), np.array([7, 8, 7, 6], dtype=np.int32))
        return drafter

    where, tokens = np.array([1, 2, 5, 6, 9, 3, 20, 4]), np.array([1, 1, 1, 1, 7, 8, 7, 6], dtype=np.int32)
    whole, windowed = make(), make(draft_window=4)
    assert not whole.has_seen(where, tokens), "the first four positions were loaded from elsewhere"
    assert windowed.has_seen(where, tokens), "its window holds all it needs"
    assert not make(draft_window=5).has_seen(where, tokens)
    other = np.where(tokens == 8, 9, tokens)
    assert not windowed.has_seen(where, other), "another text's features lie there"
    windowed.reserve(64)
    assert windowed.has_seen(where, tokens), "reserving as much again keeps everything"


# -- pacing ------------------------------------------------------------------------------------------------------------


class Listener(Policy):
    def __init__(self) -> None:
        self.cycles: list[Sequence[Cycle]] = []
        self.ended: list[int] = []

    def decide(self, views: Sequence[View], under_way: int) -> list[DraftSpec]:
        return [view.draft(view.limit) for view in views]

    def trim(self, cycles: Sequence[Cycle]) -> list[int]:
        return [min(cycle.spec.size, 3) for cycle in cycles]

    def observe(self, cycles: Sequence[Cycle]) -> None:
        self.cycles.append(cycles)

    def end(self, request_id: int) -> None:
        self.ended.append(request_id)


def seconds(tokens: int, requests: int) -> float:
    return 0.01 + 1e-3 * tokens


def draft(pacing: PassPacing, limits: dict[int, int]) -> tuple[list[int], list[int]]:
    """How much is drafted and how much of it is to be verified, of requests with these limits."""
    table = SlotTable(np.arange(9))
    works = pacing.decide([SlotRequest(request_id, 7, 3, table) for request_id in limits], list(limits.values()))
    for work in works:
        work.proposal = Proposal(list(range(work.spec.size)), confidence=[0.9] * work.spec.size)
    pacing.trim(works)
    return [work.spec.size for work in works], [len(work.proposal.token_ids) for work in works]


def test_what_is_drafted_in_one_pass_is_judged_in_the_next() -> None:
    policy = Listener()
    pacing = PassPacing(policy, 6, seconds, seconds)
    assert draft(pacing, {1: 9, 2: 2, 3: 9, 4: 0}) == ([5, 2, 5, 0], [3, 2, 3, 0])
    pacing.judge({1: (3, 1), 2: (2, 2), 4: (5, 1)})  # 3 has ended; vLLM verified tokens of its own for 4
    (cycles,) = policy.cycles
    assert [cycle.spec.size for cycle in cycles] == [5, 2, 5, 0]
    assert [(cycle.verified, cycle.accepted) for cycle in cycles] == [(3, 1), (2, 2), (0, 0), (0, 0)]
    assert [cycle.right for cycle in cycles] == [[True, False, False], [True, True], [], []]
    assert cycles[3].spec == NO_DRAFT
    assert policy.ended == [3]
    pacing.judge({})
    assert sorted(policy.ended) == [1, 2, 3, 4]
    assert len(policy.cycles) == 1, "nothing was drafted in between"


def test_a_policy_that_weighs_costs_learns_them_first() -> None:
    policy = Goodput()
    pacing = PassPacing(policy, 6, seconds, seconds)
    for _ in range(8):
        assert pacing.is_learning
        assert draft(pacing, {1: 9}) == ([5], [5])
        pacing.judge({1: (5, 2)})
        pacing.timed(6, 1, seconds(6, 1) + 0.5)
    assert not pacing.is_learning
    assert pacing.costs.target(6, 1) == pytest.approx(0.5 + seconds(6, 1)), "vLLM's own time is in every pass"
    draft(pacing, {1: 9, 2: 9})
    pacing.judge({1: (5, 4)})
    assert pacing.known == {1}
    pacing.judge({})
    assert not pacing.known


def test_nothing_is_kept_of_requests_that_ended() -> None:
    policy = Feedback()
    pacing = PassPacing(policy, 6, seconds, seconds)
    for request_id in range(20):
        draft(pacing, {request_id: 9})
        pacing.judge({request_id: (5, 0)})
    assert policy.positions == {19: 4}
    pacing.judge({})
    assert not policy.positions
