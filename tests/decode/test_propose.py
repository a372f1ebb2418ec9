"""Proposals: the tokens, and the law they were really drawn from; in walks each token's given the one before, and no other."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.chi_square import chi_square_p
from tests.made_up import decoding
from volley.decode.on_device import read_drafts
from volley.decode.propose import (
    Transitions,
    propose_coupled,
    propose_sampled,
    walk_best,
    walk_coupled,
    walk_sampled,
)
from volley.decode.sampling import PositionNoise, Purpose, race, token_probs
from volley.decode.work import DraftSpec, Proposal, Rule, Shape, Work
from volley.params import SamplingParams
from volley.procedures.request import Request

VOCAB = 5
LOGITS = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
PARAMS = SamplingParams(temperature=0.8, top_p=0.95, draft_temperature=1.2)


def block(positions: int, anchor: int, seed: int, first: int, params: SamplingParams = PARAMS) -> Work[Request]:
    """So many positions from ``first`` on, to be walked from ``anchor``."""
    request = decoding([0] * (first - 1) + [anchor], params, noise=PositionNoise(seed))
    return Work(request, DraftSpec(Shape.CHAIN, Rule.REJECTION, positions, positions))


def read_walk(
    walk: Callable[[Transitions, Sequence[Work[Any]]], list[Proposal]], after: Transitions, works: list[Work[Request]]
) -> list[Proposal]:
    """The host's read of a walk."""
    proposals = walk(after, works)
    for work, proposal in zip(works, proposals, strict=True):
        work.proposal = proposal
    read_drafts(works)
    return proposals


def random_transitions(positions: int, seed: int) -> tuple[Tensor, Transitions]:
    """Logits ``[positions, V before, V]``."""
    table = torch.randn(positions, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
    return table, lambda rows, tokens: table[rows, tokens]


@given(positions=st.integers(1, 7), anchor=st.integers(0, VOCAB - 1), seed=st.integers(0, 99))
def test_walks_equal_choosing_slot_by_slot(positions: int, anchor: int, seed: int) -> None:
    table, after = random_transitions(positions, seed)
    noise, first = PositionNoise(seed), 5
    token, expected, greedy = anchor, [], [anchor]
    for position in range(positions):
        law = token_probs(table[position, token][None], PARAMS, PARAMS.draft_temperature)
        token = int(race(law, noise.exponentials([first + position], VOCAB)))
        expected.append(token)
        greedy.append(int(table[position, greedy[-1]].argmax()))
    (found,) = read_walk(walk_coupled, after, [block(positions, anchor, seed, first)])
    assert found.token_ids == expected
    assert found.draft_probs is None
    (walked,) = read_walk(walk_best, after, [block(positions, anchor, seed, first, SamplingParams())])
    assert walked.token_ids == greedy[1:]


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_blocks_walked_side_by_side_do_not_mix(sizes: list[int], seed: int) -> None:
    table, after = random_transitions(sum(sizes), seed)
    blocks = [block(size, i % VOCAB, seed + i, 3 * i + 1) for i, size in enumerate(sizes)]
    for walk in (walk_sampled, walk_coupled):
        start = 0
        for work, found in zip(blocks, read_walk(walk, after, blocks), strict=True):
            own = table[start : start + work.spec.positions]
            (alone,) = read_walk(walk, lambda rows, tokens, own=own: own[rows, tokens], [work])
            assert found.token_ids == alone.token_ids
            if alone.draft_probs is not None:
                assert torch.equal(found.draft_probs, alone.draft_probs)
            start += work.spec.positions


@pytest.mark.slow
def test_the_law_of_a_sampled_walk_is_the_one_it_carries() -> None:
    table, after = random_transitions(3, 1)
    laws = token_probs(table.flatten(0, 1), PARAMS, PARAMS.draft_temperature).view_as(table)
    joint = laws[0, 2][:, None, None] * laws[1][:, :, None] * laws[2][None]
    counts = torch.zeros(VOCAB, VOCAB, VOCAB)
    for seed in range(2000):
        (proposal,) = read_walk(walk_sampled, after, [block(3, 2, seed, 10)])
        path = tuple(proposal.token_ids)
        counts[path] += 1
        assert proposal.draft_probs is not None
        assert torch.equal(proposal.draft_probs, torch.stack([laws[0, 2], laws[1, path[0]], laws[2, path[1]]]))
    assert chi_square_p(counts, joint) > 1e-3


def test_sampled_walks_do_not_use_the_targets_noise() -> None:
    hot = SamplingParams(temperature=1.0)
    flat = torch.zeros(1, 1000)
    same = [
        read_walk(walk, lambda rows, tokens: flat, [block(1, 0, seed, 4, hot)])[0].token_ids
        for seed in range(10)
        for walk in (walk_sampled, walk_coupled)
    ]
    assert sum(a == b for a, b in zip(same[::2], same[1::2], strict=True)) < 2


@pytest.mark.slow
def test_the_law_of_a_sampled_proposal_is_the_one_it_was_drawn_from() -> None:
    params = SamplingParams(temperature=0.7, top_k=4, draft_temperature=1.3)
    expected = token_probs(LOGITS, params, 1.3)
    drawn = []
    for seed in range(4000):
        found, probs = propose_sampled(LOGITS, params, PositionNoise(seed).uniforms(Purpose.DRAFT, 10, 3))
        assert torch.equal(probs, expected)
        drawn.append(found)
    tokens = torch.stack(drawn)
    for position in range(3):
        assert chi_square_p(torch.bincount(tokens[:, position], minlength=5), expected[position]) > 1e-3
    pairs = torch.bincount(tokens[:, 0] * 5 + tokens[:, 1], minlength=25)
    assert chi_square_p(pairs, torch.outer(expected[0], expected[1])) > 1e-3  # the positions are independent


def test_coupled_proposals_use_the_targets_own_noise() -> None:
    params, noise = SamplingParams(temperature=0.9), PositionNoise(3)
    target_choice = race(token_probs(LOGITS, params), noise.exponentials(range(7, 10), 5))
    assert torch.equal(propose_coupled(LOGITS, params, [(noise, at) for at in range(7, 10)]), target_choice)


def test_sampled_proposals_do_not_use_the_targets_noise() -> None:
    """Speculative sampling would be biased by a draft that knows the bonus' noise."""
    params = SamplingParams(temperature=1.0)
    flat = torch.zeros(1, 1000)
    same = [
        int(propose_sampled(flat, params, noise.uniforms(Purpose.DRAFT, 4, 1))[0])
        == int(propose_coupled(flat, params, [(noise, 4)]))
        for noise in map(PositionNoise, range(50))
    ]
    assert sum(same) < 3


def test_draft_temperature_zero_proposes_the_best_with_certainty() -> None:
    greedy = SamplingParams(temperature=1.0, draft_temperature=0.0)
    tokens, probs = propose_sampled(LOGITS, greedy, PositionNoise(0).uniforms(Purpose.DRAFT, 0, 3))
    assert tokens.tolist() == LOGITS.argmax(dim=-1).tolist()
    assert probs.max(dim=-1).values.tolist() == [1, 1, 1]
