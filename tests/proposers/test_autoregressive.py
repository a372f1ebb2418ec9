"""A plain draft model: lossless whatever it drafts, and of one mind with the target where it is the target."""

import copy
from typing import Any

import pytest
import torch

from tests.proposers.answers import (
    COUNT,
    PROMPTS,
    check_law,
    check_penalties_and_seeds,
    check_that_drafts_give_way,
    expected,
    run,
    small_pair,
)
from tests.tiny import VOCAB, Pair, greedy, make_pair
from volley import Engine, SamplingParams
from volley.errors import MismatchError
from volley.models.targets.target import Target
from volley.proposers.autoregressive import AutoregressiveProposer


def noisy(pair: Pair, scale: float) -> Target:
    """A model that agrees with the target now and then."""
    model, generator = copy.deepcopy(pair.hf), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += scale * weight.std() * torch.randn(weight.shape, generator=generator)
    return Target(model)


def drafting(pair: Pair, scale: float, block_size: int = 6, num_tokens: int = 4096, **options: Any) -> Engine:
    proposer = AutoregressiveProposer(noisy(pair, scale), pair.target.vocab_size, block_size, num_tokens)
    return Engine(pair.target, proposer=proposer, **{"policy": "fixed", "page_size": 4, **options})


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch_tokens": 9, "max_running": 2},
        {"num_pages": 18},
        {"num_tokens": 96},
        {"policy": "goodput"},
        {"policy": None, "block_size": 3},
    ],
    ids=["usual", "chunks", "preemption", "few K/V of its own", "goodput", "shorter blocks"],
)
def test_greedy_answers_are_the_targets(pair: Pair, options: dict[str, Any]) -> None:
    engine = drafting(pair, 0.05, **{"num_pages": 200, **options})
    results = run(engine)
    assert [result.token_ids for result in results] == expected()
    again = run(engine)
    assert [result.token_ids for result in again] == expected(), "with prefixes of both models in their caches"


@pytest.mark.slow
def test_what_is_kept_of_a_text_drafts_as_a_fresh_reading_does(pair: Pair) -> None:
    """A draft model with the target's weights is always right, or its K/V are not those of the text."""
    for result in run(drafting(pair, 0.0, num_pages=200)):
        assert result.stats.accepted_lengths == [6] * (COUNT // 6 - 1) + [5] or set(
            result.stats.accepted_lengths[:-1]
        ) == {6}
    half_right = [n for result in run(drafting(pair, 0.05, num_pages=200)) for n in result.stats.accepted_lengths]
    assert 1.2 < sum(half_right) / len(half_right) < 5.5, "both outcomes are seen"


@pytest.mark.slow
def test_penalties_and_seeds(pair: Pair) -> None:
    check_penalties_and_seeds(pair, drafting(pair, 0.05, num_pages=200))


@pytest.mark.slow
@pytest.mark.parametrize("biased", [False, True])
def test_sampled_answers_follow_the_targets_law_and_a_wrong_distribution_is_seen(biased: bool) -> None:
    pair = small_pair()
    engine = drafting(pair, 1.0, 4, 2**16, max_running=256, num_pages=2000, verification="rejection")
    check_law(engine, pair, biased=biased)


def test_another_vocabulary_is_refused(pair: Pair) -> None:
    with pytest.raises(MismatchError, match=f"a vocabulary of {VOCAB} and the target one of 60; .* target's tokenizer"):
        AutoregressiveProposer(pair.target, 60)


@pytest.mark.slow
def test_a_context_longer_than_the_draft_models_is_decoded_plainly() -> None:
    pair = make_pair(max_position_embeddings=64)
    engine = drafting(pair, 0.05, num_pages=200)
    assert isinstance(engine.core.proposer, AutoregressiveProposer)
    engine.core.proposer.model.context_length = 40
    (result,) = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=45 - len(PROMPTS[0]) + 10))
    assert result.token_ids == greedy(pair.hf, PROMPTS[0], 45 - len(PROMPTS[0]) + 10)
    assert result.stats.accepted_lengths[-1] == 1
    assert result.stats.block_sizes[-1] == 1
    list(engine.generate([[1] * 45] * 3, SamplingParams(max_tokens=4)))
    assert len(engine.core.proposer._texts) <= 1, "texts that it cannot read are not kept"


@pytest.mark.slow
def test_drafts_that_gave_way_to_a_prompt_are_made_once_more(pair: Pair) -> None:
    check_that_drafts_give_way(lambda: drafting(pair, 0.3))
