"""Drafts on another engine's slots against volley's own, and what a policy hears of them. Nothing here needs vLLM."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import Pair, random_drafter, random_prompts
from volley import Engine, SamplingParams
from volley.decode.block_size import BlockSizePolicy, Cycle, Decoding, Feedback
from volley.decode.goodput import Goodput
from volley.engine.request import Request
from volley.models.checkpoint import HeadConfig
from volley.types import Proposal, Verdict
from volley.vllm.drafting import SlotDrafter
from volley.vllm.options import PluginOptions
from volley.vllm.pacing import Pacing

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "head": ({"head": HeadConfig(type="residual", rank=4, candidates=6)}, {}),
    "two steps": ({}, {"denoising_steps": 2, "denoising_schedule": "sqrt"}),
    "draft window": ({}, {"draft_window": 7}),
    "sliding layer": ({"sliding_window": 5, "layer_types": ("full_attention", "sliding_attention")}, {}),
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_drafts_are_volleys_own(pair: Pair, name: str) -> None:
    changes, options = CASES[name]
    drafter = random_drafter(4, **changes)
    engine = Engine(pair.target, drafter, **options)
    cycles: list[tuple[list[int], list[int]]] = []

    def note(request: Request, proposal: Proposal, verdict: Verdict) -> None:
        if proposal.token_ids:
            before = request.token_ids[: len(request.token_ids) - len(verdict.token_ids)]
            cycles.append((before, proposal.token_ids))

    engine.on_verified.append(note)
    list(engine.generate(random_prompts(3, longest=25, seed=3), SamplingParams(max_tokens=8)))
    assert len(cycles) > 10

    target = pair.target
    slots = SlotDrafter(drafter, PluginOptions(drafter="", **options), target.embed, target.head, len(cycles))
    slots.reserve(1000)
    free = np.random.default_rng(0).permutation(1000)
    contexts, anchors = [], []
    for token_ids, _ in cycles:
        *context, anchor = token_ids
        output = pair.hf(input_ids=torch.tensor([context]), output_hidden_states=True, use_cache=False)
        features = torch.cat([output.hidden_states[i + 1][0] for i in drafter.config.target_layer_ids], dim=-1)
        where, free = np.split(free, [len(context)])
        slots.inject(features, np.arange(len(context)), where, np.array(context, dtype=np.int32))
        contexts.append(where)
        anchors.append(anchor)
    sizes = [len(drafted) for _, drafted in cycles]
    proposals = slots.draft(contexts, anchors, sizes, with_confidence=True)
    assert [proposal.token_ids for proposal in proposals] == [drafted for _, drafted in cycles]
    for proposal in proposals:
        assert len(proposal.confidence) == len(proposal.token_ids)
        assert all(0 < sure <= 1 for sure in proposal.confidence)


def test_only_what_was_injected_is_seen(pair: Pair) -> None:
    def make(**options: Any) -> SlotDrafter:
        drafter = SlotDrafter(
            pair.drafter, PluginOptions(drafter="", **options), pair.target.embed, pair.target.head, 2
        )
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


class Listener(BlockSizePolicy):
    def __init__(self) -> None:
        self.cycles: list[Cycle] = []
        self.ended: list[int] = []

    def draft(self, requests: Decoding) -> list[int]:
        return list(requests.limits)

    def verify(self, requests: Decoding, drafted: list[int], confidence: list[list[float]]) -> list[int]:
        return [min(size, 3) for size in drafted]

    def observe(self, cycle: Cycle) -> None:
        self.cycles.append(cycle)

    def end(self, request_id: int) -> None:
        self.ended.append(request_id)


def seconds(tokens: int, requests: int) -> float:
    return 0.01 + 1e-3 * tokens


def test_what_is_drafted_in_one_pass_is_judged_in_the_next() -> None:
    policy = Listener()
    pacing = Pacing(policy, 6, seconds, seconds)
    assert pacing.draft([1, 2, 3, 4], [9, 2, 9, 0]) == [5, 2, 5, 0]
    assert pacing.verify([[]] * 4) == [3, 2, 3, 0]
    pacing.after_pass({1: (3, 1), 2: (2, 2), 4: (5, 1)})  # 3 has ended; vLLM verified tokens of its own for 4
    (cycle,) = policy.cycles
    assert (cycle.drafted, cycle.verified, cycle.accepted) == ([5, 2, 5, 0], [3, 2, 0, 0], [1, 2, 0, 0])
    assert policy.ended == [3]
    pacing.after_pass({})
    assert sorted(policy.ended) == [1, 2, 3, 4]
    assert len(policy.cycles) == 1, "nothing was drafted in between"


def test_a_policy_that_weighs_costs_learns_them_first() -> None:
    policy = Goodput()
    pacing = Pacing(policy, 6, seconds, seconds)
    for _ in range(8):
        assert pacing.is_learning
        assert pacing.draft([1], [9]) == [5]
        pacing.after_pass({1: (5, 2)})
        pacing.timed(6, 1, seconds(6, 1) + 0.5)
    assert not pacing.is_learning
    assert policy.costs is not None
    assert policy.costs.target(6, 1) == pytest.approx(0.5 + seconds(6, 1)), "vLLM's own time is in every pass"
    pacing.draft([1, 2], [9, 9])
    pacing.verify([[0.9] * 5] * 2)
    pacing.after_pass({1: (5, 4)})
    pacing.after_pass({})
    assert not policy.acceptance._luck, "nothing is kept of requests that ended"


def test_nothing_is_kept_of_requests_that_ended() -> None:
    policy = Feedback()
    pacing = Pacing(policy, 6, seconds, seconds)
    for request_id in range(20):
        pacing.draft([request_id], [9])
        pacing.after_pass({request_id: (5, 0)})
    pacing.after_pass({})
    assert not policy.slots
