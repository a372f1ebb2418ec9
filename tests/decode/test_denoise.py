"""Reveal schedules of multi-step denoising."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from volley.decode.denoise import SCHEDULES, reveal, reveal_counts
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
    masked = torch.tensor([[True, False, True, True], [True, True, True, False]])
    confidence = torch.tensor([[-3.0, -0.1, -2.0, -1.0], [-1.0, -5.0, -0.5, -0.1]])
    assert reveal(masked, confidence, 2).tolist() == [[False, False, True, True], [True, False, True, False]]
    assert not reveal(masked, confidence, 0).any()


@given(
    data=st.data(), positions=st.integers(1, 15), steps=st.integers(1, 6), schedule=st.sampled_from(sorted(SCHEDULES))
)
def test_every_slot_is_revealed_exactly_once(data: st.DataObject, positions: int, steps: int, schedule: str) -> None:
    masked = torch.ones(1, positions, dtype=torch.bool)
    for count in reveal_counts(positions, steps, schedule):
        scores = torch.tensor([data.draw(st.permutations(range(positions)))], dtype=torch.float32)
        chosen = reveal(masked, scores, count)
        assert int(chosen.sum()) == count
        assert not (chosen & ~masked).any()
        rest = masked & ~chosen
        if count and rest.any():
            assert scores[chosen].min() > scores[rest].max()
        masked = rest
    assert not masked.any()


def test_more_than_is_masked_cannot_be_revealed() -> None:
    assert reveal(torch.tensor([[True, False]]), torch.zeros(1, 2), 5).tolist() == [[True, False]]
