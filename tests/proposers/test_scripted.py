"""Drafts without a drafter: what a script says is proposed, and no answer changes."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.chi_square import chi_square_p, joint_counts
from tests.costs import settle
from tests.engine.test_sampled import MANY, PROMPT, V, drawn, exact_law, tiny
from tests.made_up import decoding
from tests.tiny import VOCAB, greedy, make_pair, random_prompts
from volley import Engine, SamplingParams
from volley.decode.sampling import Purpose
from volley.decode.work import DraftSpec, Rule, Shape, Work, Works
from volley.proposers.scripted import ScriptedProposer

Script = Callable[[Work[Any]], list[int]]


@pytest.fixture(autouse=True)
def _modelled_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies weigh these, and no clock is read; a script's drafts are free."""
    settle(monkeypatch, token=0.01)


@pytest.mark.parametrize("with_confidence", [False, True])
def test_a_script_is_cut_to_what_was_asked_for(with_confidence: bool) -> None:
    proposer = ScriptedProposer(lambda work: [work.request.anchor + 1, 8, 9], 4)
    works = [Work(decoding([1, 2]), DraftSpec(Shape.CHAIN, Rule.GREEDY, size, size)) for size in (1, 2, 5)]
    assert proposer.propose(works, with_confidence=with_confidence) == 0
    assert [work.proposal.token_ids for work in works] == [[3], [3, 8], [3, 8, 9]]
    for work in works:
        assert work.proposal.draft_probs is None
        assert len(work.proposal.confidence) == with_confidence * len(work.proposal.token_ids)


# -- greedy ------------------------------------------------------------------------------------------------------------

COUNT, BLOCK = 30, 5
PROMPTS = random_prompts(4, longest=20, seed=13)


@functools.cache
def answers() -> dict[tuple[int, ...], list[int]]:
    return {tuple(prompt): greedy(make_pair().hf, prompt, COUNT) for prompt in PROMPTS}


def right(work: Work[Any]) -> list[int]:
    """The rest of the answer, however much was asked for."""
    request = work.request
    return answers()[tuple(request.token_ids[: request.num_prompt])][request.num_output :]


def wrong(work: Work[Any]) -> list[int]:
    return [(token + 1) % VOCAB for token in right(work)]


def half_right(work: Work[Any]) -> list[int]:
    return right(work)[:2] + wrong(work)[2:]


def nothing(work: Work[Any]) -> list[int]:
    return []


def now_and_then(work: Work[Any]) -> list[int]:
    return right(work) if work.request.request_id % 2 else []


SCRIPTS: list[tuple[Script, float]] = [
    (right, BLOCK),
    (wrong, 1),
    (half_right, 3),
    (lambda work: right(work) + [0] * 500, BLOCK),
    (lambda work: right(work)[:1], 2),
    (nothing, 1),
    (now_and_then, BLOCK),
]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "longest"), SCRIPTS)
@pytest.mark.parametrize("policy", ["fixed", "goodput"])
@pytest.mark.parametrize("options", [{}, {"num_pages": 14, "max_batch_tokens": 9}], ids=["roomy", "tight"])
def test_whatever_is_drafted_greedy_answers_are_the_targets(
    script: Script, longest: int, policy: str, options: dict[str, Any]
) -> None:
    engine = Engine(
        make_pair().target,
        proposer=ScriptedProposer(script, BLOCK),
        policy=policy,
        **{"page_size": 4, "num_pages": 100, **options},
    )
    results = list(engine.generate(PROMPTS, SamplingParams(max_tokens=COUNT)))
    assert [result.token_ids for result in results] == list(answers().values())
    if policy == "fixed":
        assert max(length for result in results for length in result.stats.accepted_lengths) == longest
    engine.check_integrity()
    assert engine.core.pool.num_used == 0


def test_a_draft_is_never_longer_than_what_was_asked_for() -> None:
    sizes: list[tuple[int, int]] = []
    engine = Engine(make_pair().target, proposer=ScriptedProposer(right, BLOCK), block_size=3)
    engine.on_verified.append(lambda request, proposal, _: sizes.append((len(proposal.token_ids), request.num_output)))
    (result,) = engine.generate(PROMPTS[0], SamplingParams(max_tokens=COUNT))
    assert max(size for size, _ in sizes) == 2
    assert result.stats.acceptance_length > 2.5


def test_no_trees_are_asked_of_a_script() -> None:
    shapes: set[Shape] = set()

    def script(work: Work[Any]) -> list[int]:
        shapes.add(work.spec.shape)
        return right(work)

    engine = Engine(make_pair().target, proposer=ScriptedProposer(script, BLOCK), policy="goodput:drafts")
    list(engine.generate(PROMPTS, SamplingParams(max_tokens=COUNT)))
    assert shapes == {Shape.CHAIN}


# -- sampled -----------------------------------------------------------------------------------------------------------

SEEDS = 3000
HOT = SamplingParams(temperature=1.0, max_tokens=3)


def sampled(script: Script | ScriptedProposer, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Tensor, float]:
    """Answers of three tokens to one prompt, each by another noise, and how many draft tokens were accepted in each."""
    numbers = itertools.count()
    monkeypatch.setattr("volley.engine.requests.secrets.randbits", lambda bits: next(numbers))
    engine = Engine(
        tiny().target,
        proposer=script if isinstance(script, ScriptedProposer) else ScriptedProposer(script, 4),
        **{**MANY, **options},
    )
    return drawn(engine, HOT, SEEDS, seeded=False)


@functools.cache
def likely() -> list[int]:
    """The likeliest answer, which is the likeliest draft too."""
    place = int(exact_law(HOT).argmax())
    return [place // V**power % V for power in (2, 1, 0)]


SAMPLED: list[tuple[Script, float]] = [
    (lambda work: likely()[work.request.num_output :], 0.1),
    (lambda work: [token % V for token in work.request.token_ids[-2:]], 0.02),
    (lambda work: [(work.request.request_id + work.request.anchor) % V] * 3, 0.02),
]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "least"), SAMPLED)
@pytest.mark.parametrize("verification", ["rejection", "coupled"])
def test_whatever_is_drafted_sampled_answers_have_the_targets_distribution(
    monkeypatch: pytest.MonkeyPatch, script: Script, least: float, verification: str
) -> None:
    sequences, accepted = sampled(script, monkeypatch, verification=verification)
    assert chi_square_p(joint_counts(sequences, V), exact_law(HOT)) > 1e-3
    assert accepted >= least, "drafts must have been accepted for this to mean anything"


def test_a_seed_gives_the_very_tokens_of_plain_decoding() -> None:
    params = [replace(HOT, seed=seed, max_tokens=20) for seed in range(4)]
    plain = [result.token_ids for result in Engine(tiny().target).generate([PROMPT] * 4, params)]

    def script(work: Work[Any]) -> list[int]:
        return plain[work.request.params.seed][work.request.num_output :]

    engine = Engine(tiny().target, proposer=ScriptedProposer(script, 4), policy="fixed")
    results = list(engine.generate([PROMPT] * 4, params))
    assert [result.token_ids for result in results] == plain
    assert all(result.stats.acceptance_length > 3 for result in results)


@pytest.mark.slow
def test_a_script_may_know_the_noise_where_tokens_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proposer draws from no distribution, so the output is the target's choice at each position, drafted or not."""

    def peek(work: Work[Any]) -> list[int]:
        request = work.request
        uniforms = [request.noise.uniforms(Purpose.TARGET, request.length + i, 1)[0] for i in range(2)]
        return [int(uniform * V) for uniform in uniforms] if uniforms[0] < 0.5 else []

    sequences, accepted = sampled(peek, monkeypatch, verification="rejection")
    plain, _ = sampled(lambda work: [], monkeypatch, verification="rejection")
    assert torch.equal(sequences, plain)
    assert accepted > 0.1


class Scored(ScriptedProposer):
    """Draws tokens that are equally likely by uniforms of one purpose or another, and says so."""

    def __init__(self, purpose: Purpose) -> None:
        super().__init__(self.drawn, 4)
        self.purpose = purpose

    def drawn(self, work: Work[Any]) -> list[int]:
        assert work.spec.rule is Rule.REJECTION
        request = work.request
        return [int(u * V) for u in request.noise.uniforms(self.purpose, request.length, work.spec.positions)]

    def propose(self, works: Works, *, with_confidence: bool) -> float:
        super().propose(works, with_confidence=with_confidence)
        for work in works:
            work.proposal.draft_probs = torch.full((len(work.proposal.token_ids), V), 1 / V)
        return 0.0


@pytest.mark.slow
@pytest.mark.parametrize("purpose", [Purpose.DRAFT, Purpose.ACCEPT, Purpose.TARGET])
def test_a_script_with_a_distribution_that_looks_at_the_noise_of_verification_is_seen(
    monkeypatch: pytest.MonkeyPatch, purpose: Purpose
) -> None:
    """Drawn by noise of its own a draft is lossless; by the noise that accepts it, or draws what replaces it, it is not."""
    sequences, accepted = sampled(Scored(purpose), monkeypatch, verification="rejection")
    probability = chi_square_p(joint_counts(sequences, V), exact_law(HOT))
    assert probability > 1e-3 if purpose is Purpose.DRAFT else probability < 1e-6
    assert accepted > 0.1
