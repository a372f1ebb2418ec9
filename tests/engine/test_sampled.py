"""Sampled output: the same seed gives the same tokens, and over seeds the law is exactly the target's."""

import functools
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.chi_square import chi_square_p, joint_counts, joint_law
from tests.tiny import Pair, answered, block_proposer, make_pair, random_prompts, tokens
from volley import Engine, SamplingParams, native
from volley.decode import propose
from volley.decode.propose import Transitions
from volley.decode.sampling import token_probs
from volley.decode.work import Proposal, Rule, Works
from volley.engine.engine import OnVerified
from volley.engine.step import Step
from volley.models.checkpoints.checkpoint import HeadConfig
from volley.models.drafters.heads import BoundHead
from volley.proposers import choose

PROMPTS = random_prompts(6, longest=30, seed=2)
PARAMS = [
    SamplingParams(temperature=1.0, max_tokens=16, seed=11),
    SamplingParams(temperature=0.6, top_k=20, max_tokens=16, seed=12),
    SamplingParams(temperature=1.4, top_p=0.8, max_tokens=16, seed=13, draft_temperature=0.5),
    SamplingParams(temperature=0.0, max_tokens=16),
    SamplingParams(temperature=1.0, min_p=0.1, max_tokens=16, seed=11),
    SamplingParams(temperature=2.0, max_tokens=16, seed=2**62),
]


def answers(engine: Engine) -> list[list[int]]:
    return tokens(answered(engine, PROMPTS, PARAMS))


def test_a_draft_temperature_of_the_engine_is_that_of_requests_without_one() -> None:
    engine = Engine(make_pair().target, make_pair().drafter, num_pages=50, policy="fixed", draft_temperature=0.3)
    requests = [engine.add_request(PROMPTS[0], params) for params in PARAMS[1:4]]
    temperatures = [request.params.draft_temperature for request in requests]
    assert temperatures == [0.3, 0.5, None], "its own wins, and a greedy request draws nothing"
    for request in requests:
        engine.abort(request)
    assert answers(engine) == plain(), "a seed gives the tokens of plain decoding at any draft temperature"


@functools.cache
def plain() -> list[list[int]]:
    return answers(Engine(make_pair().target, num_pages=50))


VARIANTS: list[dict[str, Any]] = [
    {"page_size": 4, "num_pages": 200},
    {"max_batch_tokens": 5},
    {"max_running": 1},
    {"page_size": 4, "num_pages": 14},
    {"page_size": 4, "num_pages": 14, "max_batch_tokens": 9, "prefix_caching": False},
    {"page_size": 4, "num_pages": 200, "draft_window": 64},
]


@functools.cache
def drafted(verification: str) -> list[list[int]]:
    pair = make_pair()
    return answers(Engine(pair.target, pair.drafter, policy="fixed", verification=verification))


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["rejection", "coupled"])
@pytest.mark.parametrize("options", VARIANTS)
def test_a_seed_gives_the_same_tokens_under_any_scheduling(
    pair: Pair, verification: str, options: dict[str, Any]
) -> None:
    engine = Engine(pair.target, pair.drafter, policy="fixed", verification=verification, **options)
    assert answers(engine) == drafted(verification)
    assert answers(engine) == drafted(verification), "the second time with cached prefixes"


@pytest.mark.slow
def test_forced_preemption_happened_above(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter, **VARIANTS[3])
    assert sum(result.stats.preemptions for result in engine.generate(PROMPTS, PARAMS)) > 0


def test_seeds_matter_and_no_seed_means_a_fresh_one(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter)
    hot = SamplingParams(temperature=1.0, max_tokens=16)
    drawn = [tuple(r.token_ids) for r in engine.generate([PROMPTS[0]] * 4, hot)]
    drawn += [tuple(r.token_ids) for r in engine.generate([PROMPTS[0]] * 2, [replace(hot, seed=s) for s in (1, 2)])]
    assert len(set(drawn)) == 6


def test_auto_verifies_speculatively_where_the_law_is_known_and_no_seed_asks_for_repetition(pair: Pair) -> None:
    seen: list[bool] = []
    for steps, seed in ((1, None), (2, None), (1, 0)):
        engine = Engine(pair.target, pair.drafter, policy="fixed", denoising_steps=steps)
        engine.on_verified.append(
            lambda request, proposal, verdict: (
                seen.append(proposal.draft_probs is not None) if proposal.token_ids else None
            )
        )
        list(engine.generate(PROMPTS[0], SamplingParams(temperature=1.0, max_tokens=4, seed=seed)))
        assert seen
        assert all(known is (steps == 1 and seed is None) for known in seen)
        seen.clear()


@pytest.mark.parametrize("options", [{"denoising_steps": 2}, {"tree_nodes": 8}])
def test_noise_that_a_draft_knew_is_what_its_positions_are_sampled_with(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, options: dict[str, int]
) -> None:
    """Whatever is asked for in between; a draft with a law of its own comes only behind them."""
    engine = Engine(pair.target, pair.drafter, policy="fixed", page_size=4)
    request = engine.add_request(PROMPTS[0], SamplingParams(temperature=1.0, max_tokens=80))
    foreseen, matched = 0, [False]

    def see(step: Step) -> None:
        nonlocal foreseen
        forward(step)
        (work,) = step.works
        matched.append(work.spec.rule is Rule.COUPLED)
        assert matched[-1] or request.length >= foreseen
        assert work.proposal.draft_probs is None or not matched[-1]
        if matched[-1] and work.proposal.token_ids:
            foreseen = max(foreseen, request.length + work.spec.positions)

    forward = engine.core.runner.forward
    monkeypatch.setattr(engine.core.runner, "forward", see)
    (name, value), usual = *options.items(), {"denoising_steps": 1, "tree_nodes": None}
    while request.finish_reason is None:
        now = value if len(matched) // 6 % 2 else usual[name]
        engine.reconfigure(replace(engine.config, **{name: now}))
        engine.step()
    assert sum(before and not after for before, after in pairwise(matched)) >= 2


# -- the law, end to end -----------------------------------------------------------------------------------------------

V, TOKENS, SEEDS = 6, 3, 4000
PROMPT = [1, 3, 2, 2]
MANY: dict[str, Any] = {"policy": "fixed", "max_running": 256, "num_pages": 600, "page_size": 8}


@functools.cache
def tiny() -> Pair:
    return make_pair(2, {"vocab_size": V, "block_size": 4, "mask_token_id": 5}, vocab_size=V, initializer_range=0.2)


def exact_law(params: SamplingParams, pair: Pair | None = None) -> Tensor:
    """Probability of each of the Vⁿ answers, from transformers' logits for every prefix."""
    hf = (pair or tiny()).hf
    return joint_law(lambda texts: hf(input_ids=texts, use_cache=False).logits[:, -1], PROMPT, params)


def drawn(engine: Engine, params: SamplingParams, seeds: int, *, seeded: bool = True) -> tuple[Tensor, float]:
    """Return an answer for each seed, and how many draft tokens were accepted in each."""
    own = [replace(params, seed=seed if seeded else None) for seed in range(seeds)]
    results = list(engine.generate([PROMPT] * seeds, own))
    accepted = sum(length - 1 for result in results for length in result.stats.accepted_lengths)
    return torch.tensor(tokens(results)), accepted / seeds


def sampled(
    params: SamplingParams,
    pair: Pair | None = None,
    seeds: int = SEEDS,
    *,
    seeded: bool = True,
    on_device: bool = False,
    listener: OnVerified | None = None,
    **options: Any,
) -> tuple[Tensor, float]:
    pair = pair or tiny()
    engine = Engine(pair.target, pair.drafter, **{**MANY, **options})
    block_proposer(engine).drafts_on_device = on_device  # as on a GPU
    engine.on_verified += [listener] if listener else []
    return drawn(engine, params, seeds, seeded=seeded)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "options"),
    [
        ({}, {"verification": "rejection"}),
        ({"top_p": 0.9, "temperature": 1.3, "draft_temperature": 0.7}, {"verification": "rejection"}),
        ({"temperature": 1.2, "draft_temperature": 0.8}, {"verification": "rejection", "on_device": True}),
        ({}, {"verification": "coupled"}),
        ({"top_k": 4}, {"denoising_steps": 3, "denoising_threshold": 0.3}),
        ({"top_p": 0.9, "draft_temperature": 0.6}, {"tree_nodes": 12}),
    ],
)
def test_the_law_of_whole_answers_is_the_targets(params: dict[str, Any], options: dict[str, Any]) -> None:
    own = SamplingParams(temperature=params.pop("temperature", 1.0), max_tokens=TOKENS, **params)
    sequences, accepted = sampled(own, **options)
    assert chi_square_p(joint_counts(sequences, V), exact_law(own)) > 1e-3
    assert accepted > 0.2, "drafts must have been accepted for this to mean anything"


def soft_scored(logits: Tensor, params: SamplingParams, *_: Any) -> tuple[Tensor, Tensor]:
    return logits.argmax(dim=-1), token_probs(logits, params)


@pytest.mark.slow
@pytest.mark.parametrize("on_device", [False, True])
def test_a_biased_proposal_is_seen_end_to_end(monkeypatch: pytest.MonkeyPatch, on_device: bool) -> None:
    """Greedy drafts scored softly."""
    monkeypatch.setattr(choose, "propose_sampled", soft_scored)
    params = SamplingParams(temperature=1.0, max_tokens=TOKENS)
    sequences, _ = sampled(params, verification="rejection", on_device=on_device)
    assert chi_square_p(joint_counts(sequences, V), exact_law(params)) < 1e-6


# -- with a sequential head --------------------------------------------------------------------------------------------


@functools.cache
def tiny_with_head(kind: str) -> Pair:
    """Four tokens of four: the first comes with the prompt, so two are drafted at once and the second has a transition."""
    head = HeadConfig(type=kind, rank=4, candidates=3, state=5 if kind == "domino" else None)
    drafter = {
        "vocab_size": 4,
        "block_size": 4,
        "mask_token_id": 3,
        "head": head,
        "sample_from_anchor": kind == "dspark",
    }
    pair = make_pair(2, drafter, vocab_size=4, initializer_range=0.2)
    assert pair.drafter.head is not None
    for weight in pair.drafter.head.parameters():
        weight.mul_(1 if kind == "domino" else 4)  # transitions that matter
    return pair


WITH_HEAD = SamplingParams(temperature=1.2, max_tokens=4)


def law_with_head(params: SamplingParams, kind: str = "residual", **options: Any) -> tuple[float, float]:
    """How probable the answers of 1000 seeds are under the target's law, and the draft tokens accepted in each.

    The last token, which is never drafted, is left out: fewer cells with more draws each see more.
    """
    pair = tiny_with_head(kind)
    sequences, accepted = sampled(params, pair, seeds=1000, **options)
    law = exact_law(params, pair).view(4**3, 4).sum(dim=1)
    return chi_square_p(joint_counts(sequences[:, :3], 4), law), accepted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "more"),
    [
        ("residual", {"verification": "rejection"}, {"draft_temperature": 0.6}),
        ("residual", {"verification": "rejection"}, {"top_p": 0.9, "draft_temperature": 2.0}),
        ("residual", {"tree_nodes": 6}, {"draft_temperature": 0.8}),
        ("markov", {"verification": "rejection"}, {"draft_temperature": 0.6}),
        ("dspark", {"verification": "rejection"}, {"draft_temperature": 0.6}),
        ("selector", {"verification": "rejection"}, {"draft_temperature": 0.6}),
        ("domino", {"verification": "rejection"}, {"draft_temperature": 0.6}),
    ],
)
def test_the_law_with_a_sequential_head_is_the_targets(
    kind: str, options: dict[str, Any], more: dict[str, Any]
) -> None:
    probability, accepted = law_with_head(replace(WITH_HEAD, **more), kind, **options)
    assert probability > 1e-3
    assert accepted > 0.4


def scored_as_after_the_anchor(after: Transitions, works: Works, **_: Any) -> list[Proposal]:
    """Drawn knowing the token before, scored as if every position followed the anchor."""
    proposals = propose.walk_sampled(after, works)
    row = 0
    for work, proposal in zip(works, proposals, strict=True):
        size, request = work.spec.positions, work.request
        rows = list(range(row, row + size))
        proposal.draft_probs = token_probs(after(rows, [request.anchor] * size), request.params)
        row += size
    return proposals


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["residual", "dspark", "selector", "domino"])
def test_scoring_a_walk_without_its_transitions_is_seen(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setitem(propose.WALKS, Rule.REJECTION, scored_as_after_the_anchor)
    probability, _ = law_with_head(replace(WITH_HEAD, draft_temperature=0.6), kind, verification="rejection")
    assert probability < 1e-6


def few_transitions(head: BoundHead, hidden: Tensor, logits: Tensor) -> tuple[Transitions, Tensor]:
    after, tokens = head.transitions(hidden, logits, ()), torch.tensor([2, 0, 3])
    return lambda rows, before: after(rows, before)[:, tokens], tokens


@pytest.mark.slow
def test_drafts_of_few_tokens_have_the_targets_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundHead, "drafted_transitions", few_transitions)
    probability, accepted = law_with_head(replace(WITH_HEAD, draft_temperature=0.6), verification="rejection")
    assert probability > 1e-3
    assert accepted > 0.4


def scored_as_other_tokens(after: Transitions, works: Works, drafted: Tensor, **_: Any) -> list[Proposal]:
    proposals = propose.walk_sampled(after, works, drafted)
    for proposal in proposals:
        proposal.drafted = drafted.roll(1)
    return proposals


@pytest.mark.slow
def test_distributions_over_other_tokens_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundHead, "drafted_transitions", few_transitions)
    monkeypatch.setattr(choose, "walk_sampled", scored_as_other_tokens)
    probability, _ = law_with_head(replace(WITH_HEAD, draft_temperature=0.6), verification="rejection")
    assert probability < 1e-6


def drawn_in_bf16(head: BoundHead, hidden: Tensor, logits: Tensor, *given: Any) -> Any:
    """As models in bf16 do it."""
    head.rows, head.outputs = head.rows.bfloat16(), head.outputs.bfloat16()
    return DRAWN(head, hidden, logits.bfloat16(), *given)


def scored_as_others(head: BoundHead, *given: Any) -> Any:
    tokens, probs, drafted = drawn_in_bf16(head, *given)
    return tokens, probs.roll(1, dims=1), drafted


DRAWN, ALONE = BoundHead.drawn, {"verification": "rejection", "max_running": 1, "seeded": False}
in_c = pytest.mark.skipif(not native.is_built, reason="the library was not built")


@pytest.mark.slow
@in_c
@pytest.mark.parametrize("kind", ["residual", "selector"])
def test_chains_drawn_in_c_have_the_targets_law(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(BoundHead, "drawn", drawn_in_bf16)
    probability, accepted = law_with_head(replace(WITH_HEAD, draft_temperature=0.6), kind, **ALONE)
    assert probability > 1e-4
    assert accepted > 0.4


@pytest.mark.slow
@in_c
def test_chains_scored_as_others_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundHead, "drawn", scored_as_others)
    params = replace(WITH_HEAD, draft_temperature=0.6)
    assert law_with_head(params, **ALONE)[0] < 1e-6


@pytest.mark.slow
@in_c
def test_a_request_with_a_seed_is_drawn_alone_as_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundHead, "drawn", scored_as_others)
    params = replace(WITH_HEAD, draft_temperature=0.6)
    alone, together = (
        sampled(params, tiny_with_head("residual"), 30, verification="rejection", max_running=number)[0]
        for number in (1, 30)
    )
    assert torch.equal(alone, together)
