"""Reveal schedules of multi-step denoising."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from volley.decode.denoise import SCHEDULES, denoise, reveal, reveal_counts
from volley.errors import ConfigError


@given(positions=st.integers(0, 64), steps=st.integers(1, 20), schedule=st.sampled_from(sorted(SCHEDULES)))
def test_counts_are_non_negative_and_sum_to_the_slots(positions: int, steps: int, schedule: str) -> None:
    counts = reveal_counts(positions, steps, schedule)
    assert len(counts) == steps
    assert min(counts) >= 0
    assert sum(counts) == positions


@pytest.mark.parametrize(
    ("positions", "steps", "schedule", "counts"),
    [
        (16, 4, "cosine", [6, 5, 3, 2]),  # AitherOS DFlash
        (16, 4, "linear", [4, 4, 4, 4]),
        (15, 1, "cosine", [15]),
        (15, 1, "sqrt", [15]),
        (6, 4, "linear", [2, 2, 1, 1]),
        (2, 4, "sqrt", [0, 0, 0, 2]),
    ],
)
def test_known_counts(positions: int, steps: int, schedule: str, counts: list[int]) -> None:
    assert reveal_counts(positions, steps, schedule) == counts


@given(positions=st.integers(1, 64), steps=st.integers(1, 20))
def test_cosine_never_speeds_up_and_sqrt_never_slows_down(positions: int, steps: int) -> None:
    cosine, sqrt = reveal_counts(positions, steps, "cosine"), reveal_counts(positions, steps, "sqrt")
    assert all(b <= a + 1 for a, b in pairwise(cosine))
    assert all(b >= a - 1 for a, b in pairwise(sqrt))
    assert sum(cosine[: steps // 2]) >= sum(cosine[(steps + 1) // 2 :])
    assert sum(sqrt[: steps // 2]) <= sum(sqrt[(steps + 1) // 2 :])


def test_unknown_schedules_and_counts_are_named() -> None:
    with pytest.raises(ConfigError, match="unknown denoising schedule 'cosin'; did you mean 'cosine'"):
        reveal_counts(4, 2, "cosin")
    with pytest.raises(ConfigError, match="denoising_steps is 0; it must be at least 1"):
        reveal_counts(4, 0, "cosine")


def test_the_most_confident_masked_slots_are_revealed() -> None:
    masked = torch.tensor([True, False, True, True])
    confidence = torch.tensor([-3.0, -0.1, -2.0, -1.0])
    assert reveal(masked, confidence, 2).tolist() == [False, False, True, True]
    assert not reveal(masked, confidence, 0).any()


@given(
    data=st.data(), positions=st.integers(1, 15), steps=st.integers(1, 6), schedule=st.sampled_from(sorted(SCHEDULES))
)
def test_every_slot_is_revealed_exactly_once(data: st.DataObject, positions: int, steps: int, schedule: str) -> None:
    masked = torch.ones(positions, dtype=torch.bool)
    for count in reveal_counts(positions, steps, schedule):
        scores = torch.tensor(data.draw(st.permutations(range(positions))), dtype=torch.float32)
        chosen = reveal(masked, scores, count)
        assert int(chosen.sum()) == count
        assert not (chosen & ~masked).any()
        rest = masked & ~chosen
        if count and rest.any():
            assert scores[chosen].min() > scores[rest].max()
        masked = rest
    assert not masked.any()


def test_more_than_is_masked_cannot_be_revealed() -> None:
    assert reveal(torch.tensor([True, False]), torch.zeros(2), 5).tolist() == [True, False]


def test_everything_above_the_threshold_is_revealed_beside_the_count() -> None:
    masked = torch.tensor([True, True, True, False])
    confidence = torch.tensor([0.2, 0.9, 0.8, 0.95]).log()
    assert reveal(masked, confidence, 1).tolist() == [False, True, False, False]
    assert reveal(masked, confidence, 1, math.log(0.7)).tolist() == [False, True, True, False]
    assert reveal(masked, confidence, 0, math.log(0.99)).tolist() == [False] * 4


@pytest.mark.parametrize(("threshold", "looks"), [(None, [[0, 1]] * 3), (0.6, [[0, 1], [1]]), (1.0, [[0, 1]] * 3)])
def test_a_full_block_is_looked_at_no_more(threshold: float | None, looks: list[list[int]]) -> None:
    """The first block is sure of all its tokens, the second of three in the first look and of the others in the second."""
    blocks, seen = [torch.tensor([9, 8, 8, 8, 8]), torch.tensor([9, 8, 8, 8, 8, 8, 8])], []

    def look(indices: list[int]) -> Tensor:
        seen.append(indices)
        rows = [torch.full((4, 10), -9.0), torch.full((6, 10), -9.0)]
        rows[0][:, 3] = 0
        rows[1][:, 4] = 0
        rows[1][3:, 5] = 0 if len(seen) == 1 else -9  # two tokens alike
        return torch.cat([rows[index] for index in indices])

    first = denoise(blocks, 3, "linear", look, lambda index, rows: rows.argmax(-1), threshold)
    assert seen == looks
    assert [block.tolist() for block in blocks] == [[9, 3, 3, 3, 3], [9, 4, 4, 4, 4, 4, 4]]
    assert first.shape == (10, 10)
