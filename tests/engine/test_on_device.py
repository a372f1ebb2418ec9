"""Drafts that the host reads with the target's choices: the same answers, and what a policy learns of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.costs import settle
from tests.tiny import Pair, block_proposer, greedy, make_pair, random_drafter, random_prompts, teach
from volley import Engine, SamplingParams
from volley.decode.work import DraftSpec
from volley.engine.step import Step
from volley.models.checkpoints.checkpoint import HeadConfig
from volley.policies.base import Cycle, Policy, View
from volley.policies.cost import Costs

PROMPTS = random_prompts(5, longest=30, seed=2)
PARAMS = SamplingParams(max_tokens=18)


def taught(pair: Pair, *, on_device: bool, **options: Any) -> Engine:
    """An engine whose drafts are often right, and stay on the device as on a GPU if ``on_device``."""
    engine = Engine(pair.target, pair.drafter, **{"policy": "fixed", "num_pages": 160, "page_size": 4, **options})
    teach(engine, {tuple(prompt): greedy(pair.hf, prompt, PARAMS.max_tokens) for prompt in PROMPTS})
    block_proposer(engine).drafts_on_device = engine.core.pacing.costs.drafts_on_device = on_device
    return engine


def run(engine: Engine, params: Any = PARAMS) -> Any:
    results = list(engine.generate(PROMPTS, params))
    engine.check_integrity()
    return [(result.token_ids, result.stats.accepted_lengths, result.prompt_logprobs) for result in results]


def watched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Its steps, once they have run."""
    seen: list[Step] = []
    observe = engine.core.pacing.observe
    monkeypatch.setattr(engine.core.pacing, "observe", lambda step: (seen.append(step), observe(step)))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": "fixed:3"},
        {"max_running": 1},
        {"num_pages": 20},
        {"max_batch_tokens": 16},
        {"draft_window": 8},
        {"policy": "feedback"},
        {"policy": "goodput:drafts"},
        {"verification": "coupled"},
        {"verification": "rejection"},
        {"verification": "rejection", "policy": "feedback"},
        {"verification": "rejection", "num_pages": 20},
    ],
)
def test_answers_and_acceptance_are_those_of_drafts_read_at_once(
    pair: Pair, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch)
    params = replace(PARAMS, temperature=0.4, seed=3) if "verification" in options else PARAMS
    engine = taught(pair, on_device=True, **options)
    seen = watched(engine, monkeypatch)
    found, expected = run(engine, params), run(taught(pair, on_device=False, **options), params)
    assert [own[0] for own in found] == [own[0] for own in expected]
    assert any(step.is_on_device for step in seen)
    if options.get("policy") != "goodput:drafts":  # which cuts drafts that were read
        assert found == expected
    assert max(length for _, lengths, _ in found for length in lengths) >= 3


def test_drafts_on_the_device_beside_sampled_ruled_and_scored_requests(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass in which one draft must be read early reads all; prompts that are scored are read beside drafts on the device."""
    each = [
        PARAMS,
        replace(PARAMS, temperature=1.0, seed=4),
        replace(PARAMS, repetition_penalty=1.3, max_tokens=6),
        replace(PARAMS, prompt_logprobs=2),
        replace(PARAMS, logprobs=True, top_logprobs=2, max_tokens=40),
    ]
    engine = taught(pair, on_device=True)
    seen = watched(engine, monkeypatch)
    assert run(engine, each) == run(taught(pair, on_device=False), each)
    drafted = [step for step in seen if any(work.proposal.token_ids for work in step.works)]
    assert {step.is_on_device for step in drafted} == {True, False}


class Watching(Policy):
    """Drafts whole blocks and cuts each to two tokens, whatever it is told of them."""

    uses_confidence = True

    def __init__(self, *, cuts: bool) -> None:
        self._cuts, self.seen = cuts, list[tuple[bool, list[float], list[bool]]]()

    def decide(self, views: Sequence[View], under_way: int) -> list[DraftSpec]:
        return [view.draft(self.block_size - 1) for view in views]

    def cuts(self, spec: DraftSpec) -> bool:
        return self._cuts

    def trim(self, cycles: Sequence[Cycle]) -> list[int]:
        self.known = [bool(cycle.confidence) for cycle in cycles]
        return [2 for _ in cycles]

    def observe(self, cycles: Sequence[Cycle]) -> None:
        self.seen += [(known, own.confidence[:2], own.right) for known, own in zip(self.known, cycles, strict=True)]


def test_a_policy_learns_the_confidences_of_drafts_on_the_device_with_their_verdicts(pair: Pair) -> None:
    early, on_device = Watching(cuts=True), Watching(cuts=False)
    for policy in (early, on_device):
        run(taught(pair, on_device=True, policy=policy))
    drafted = [own for own in early.seen if own[1]]
    assert {known for known, *_ in drafted} == {True}
    assert {known for known, *_ in on_device.seen} == {False}
    assert [right for _, _, right in on_device.seen] == [right for _, _, right in early.seen]
    assert [own for _, sure, _ in on_device.seen for own in sure] == pytest.approx(
        [own for _, sure, _ in early.seen for own in sure], rel=1e-6
    )


def test_drafters_whose_tokens_depend_on_each_other_are_read_at_once(pair: Pair) -> None:
    drafter = random_drafter(head=HeadConfig(type="residual", rank=4, candidates=8))
    assert not block_proposer(Engine(pair.target, drafter)).drafts_on_device
    assert not block_proposer(Engine(pair.target, pair.drafter)).drafts_on_device, "on a CPU nothing waits"


def test_goodput_cuts_nothing_where_it_would_have_to_wait(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch, token=0.3)
    thresholds = []
    for on_device in (False, True):
        engine = taught(pair, on_device=on_device, policy="goodput:drafts")
        seen = watched(engine, monkeypatch)
        run(engine)
        thresholds.append({cycle.spec.threshold for step in seen for cycle in step.cycles})
    assert max(thresholds[0]) > 0
    assert thresholds[1] == {0.0}


def test_the_seconds_of_a_cycle_with_drafts_on_the_device_are_shared_as_was_expected() -> None:
    costs = Costs(lambda tokens, requests: 0.25, lambda tokens, requests: 0.75)
    costs.draft.time(8)
    costs.target.time(8)
    assert costs.shares((8, 1), (8, 1), 2.0) == pytest.approx((0.5, 1.5))
    assert costs.shares((0, 0), (8, 1), 2.0)[1] <= 2.0


def test_the_target_reads_tokens_on_the_device(pair: Pair) -> None:
    """Or the zeros that stand for them: planted, and seen in what is accepted."""
    engine = taught(pair, on_device=True)
    forward = engine.core.runner.forward

    def blind(step: Any) -> None:
        on_device = [work.proposal.on_device for work in step.works]
        for work in step.works:
            work.proposal.on_device = None
        forward(step)
        for work, own in zip(step.works, on_device, strict=True):
            work.proposal.on_device = own

    engine.core.runner.forward = blind  # type: ignore[method-assign]
    wrong, right = run(engine), run(taught(make_pair(), on_device=True))
    assert [own[0] for own in wrong] != [own[0] for own in right]
