"""Share what proposers of one token at a time are tested with: prompts, transformers' answers, runs, and the law of samples."""

import functools
from collections.abc import Callable
from dataclasses import replace

from tests.chi_square import chi_square_p, joint_counts
from tests.engine.test_gives_way import now_and_then
from tests.engine.test_sampled import drawn, exact_law
from tests.tiny import Pair, answered, greedy, make_pair, random_prompts, tokens
from volley import Engine, GenerationResult, SamplingParams
from volley.decode.work import Works
from volley.proposers.base import Proposer

PROMPTS = random_prompts(5, longest=30, seed=4)
COUNT = 24
PARAMS = SamplingParams(max_tokens=COUNT)
PENALISED = SamplingParams(temperature=1.0, max_tokens=COUNT, seed=3, repetition_penalty=1.3, presence_penalty=0.2)
V, TOKENS, SEEDS = 4, 4, 1500


@functools.cache
def expected() -> list[list[int]]:
    hf = make_pair().hf
    return [greedy(hf, prompt, COUNT) for prompt in PROMPTS]


def run(engine: Engine, params: SamplingParams = PARAMS) -> list[GenerationResult]:
    return answered(engine, PROMPTS, params)


def check_penalties_and_seeds(pair: Pair, drafting: Engine) -> None:
    """Assert that penalised and seeded answers are those of plain decoding."""
    plain = run(Engine(pair.target, page_size=4, num_pages=200, block_size=1), PENALISED)
    assert tokens(run(drafting, PENALISED)) == tokens(plain)


def small_pair() -> Pair:
    return make_pair(2, vocab_size=V, initializer_range=0.2, drafter={"vocab_size": V, "mask_token_id": 3})


class Overrated(Proposer):
    """Planted: another proposer's tokens are said to be drawn from other distributions."""

    def __init__(self, inner: Proposer) -> None:
        self.inner, self.block_size = inner, inner.block_size

    def propose(self, works: Works, *, with_confidence: bool) -> float:
        seconds = self.inner.propose(works, with_confidence=with_confidence)
        for work in works:
            if work.proposal.draft_probs is not None:
                work.proposal.draft_probs = work.proposal.draft_probs.roll(1, dims=-1)
        return seconds


def check_law(engine: Engine, pair: Pair, *, biased: bool) -> None:
    """Assert that answers without seeds have the target's own law, and that those of a planted fault are seen to have another."""
    params = SamplingParams(temperature=1.2, max_tokens=TOKENS, draft_temperature=0.7)
    if biased:
        assert engine.core.proposer is not None
        engine.core.proposer = Overrated(engine.core.proposer)
    found, accepted = drawn(engine, params, SEEDS, seeded=False)
    probability = chi_square_p(joint_counts(found[:, :3], V), exact_law(replace(params, max_tokens=3), pair))
    assert probability < 1e-6 if biased else probability > 1e-3
    assert biased or accepted > 0.4, "drafts must have been accepted for this to mean anything"


def check_that_drafts_give_way(make: Callable[[], Engine]) -> None:
    """Assert that drafts that gave way to a prompt are made once more, as they were to be."""
    calls, undisturbed, engine = list[int](), run(make()), make()
    engine.arrivals.newcomers = now_and_then(calls)
    found = run(engine)
    assert len(calls) > 5
    assert tokens(found) == tokens(undisturbed) == expected()
    assert [own.stats.accepted_lengths for own in found] == [own.stats.accepted_lengths for own in undisturbed]
