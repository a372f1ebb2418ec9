"""Proposals: the tokens, and the law they were really drawn from."""

import torch

from tests.chi_square import chi_square_p
from volley.decode.propose import propose_coupled, propose_sampled
from volley.decode.sampling import PositionNoise, race, token_probs
from volley.types import SamplingParams

LOGITS = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))


def test_the_law_of_a_sampled_proposal_is_the_one_it_was_drawn_from() -> None:
    params = SamplingParams(temperature=0.7, top_k=4, draft_temperature=1.3)
    expected = token_probs(LOGITS, params, 1.3)
    drawn = []
    for seed in range(4000):
        proposal = propose_sampled(LOGITS, params, PositionNoise(seed), 10)
        assert proposal.draft_probs is not None
        assert torch.equal(proposal.draft_probs, expected)
        drawn.append(proposal.token_ids)
    tokens = torch.tensor(drawn)
    for position in range(3):
        assert chi_square_p(torch.bincount(tokens[:, position], minlength=5), expected[position]) > 1e-3
    pairs = torch.bincount(tokens[:, 0] * 5 + tokens[:, 1], minlength=25)
    assert chi_square_p(pairs, torch.outer(expected[0], expected[1])) > 1e-3  # the positions are independent


def test_coupled_proposals_use_the_targets_own_noise() -> None:
    params, noise = SamplingParams(temperature=0.9), PositionNoise(3)
    target_choice = race(token_probs(LOGITS, params), noise.exponentials(range(7, 10), 5))
    assert torch.equal(propose_coupled(LOGITS, params, noise, 7), target_choice)


def test_sampled_proposals_do_not_use_the_targets_noise() -> None:
    """Speculative sampling would be biased by a draft that knows the bonus' noise."""
    params = SamplingParams(temperature=1.0)
    flat = torch.zeros(1, 1000)
    same = [
        propose_sampled(flat, params, PositionNoise(seed), 4).token_ids
        == propose_coupled(flat, params, PositionNoise(seed), 4).tolist()
        for seed in range(50)
    ]
    assert sum(same) < 3


def test_draft_temperature_zero_proposes_the_best_with_certainty() -> None:
    proposal = propose_sampled(LOGITS, SamplingParams(temperature=1.0, draft_temperature=0.0), PositionNoise(0), 0)
    assert proposal.token_ids == LOGITS.argmax(dim=-1).tolist()
    assert proposal.draft_probs is not None
    assert proposal.draft_probs.max(dim=-1).values.tolist() == [1, 1, 1]
