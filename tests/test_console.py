"""A difference from plain decoding is a bug unless the target's own logits tie at the very place."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from volley.cli.console import Comparison, explain_difference, median_turn
from volley.results import GenerationResult, GenerationStats


def answer(token_ids: list[int]) -> GenerationResult:
    return GenerationResult("", token_ids, "length", GenerationStats())


CASES = [
    (torch.bfloat16, 0.0, True),
    (torch.bfloat16, 0.125, True),
    (torch.bfloat16, 1.0, False),
    (torch.float32, 0.125, False),
    (torch.float32, 1e-6, True),
]


@pytest.mark.parametrize(("dtype", "gap", "tied"), CASES)
def test_only_a_tie_explains_a_difference(dtype: torch.dtype, gap: float, tied: bool) -> None:
    asked: list[list[int]] = []

    def next_logits(token_ids: list[int]) -> torch.Tensor:
        asked.append(token_ids)
        return torch.tensor([3.0, 16.0, 16.0 - gap, -2.0])

    engine: Any = SimpleNamespace(
        encode=lambda prompt: prompt, next_logits=next_logits, target=SimpleNamespace(dtype=dtype)
    )
    explanation = explain_difference(engine, Comparison(answer([5, 6, 1, 9]), answer([5, 6, 2, 8])), [1, 2])
    other = explain_difference(engine, Comparison(answer([5, 6, 0, 9]), answer([5, 6, 1, 8])), [1, 2])
    assert asked == [[1, 2, 5, 6]] * 2
    assert other is None, "a third token, whatever ties there"
    assert (explanation is not None) == tied
    assert explanation is None or "token 2" in explanation


def test_the_median_turn_is_shown_unless_tokens_differ_in_another() -> None:
    turns = [Comparison(timed([1, 2], speed), timed([1, 2], 10)) for speed in (5, 40, 12)]
    assert median_turn(turns).speedup == pytest.approx(1.2)
    odd = Comparison(timed([1, 3], 90), timed([1, 2], 10))
    assert median_turn([*turns, odd]) is odd


def timed(token_ids: list[int], per_second: float) -> GenerationResult:
    stats = GenerationStats(output_tokens=len(token_ids), total_seconds=(len(token_ids) - 1) / per_second)
    return GenerationResult("", token_ids, "length", stats)
