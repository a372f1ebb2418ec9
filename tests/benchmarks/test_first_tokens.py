"""How times to first tokens are compared."""

import random

import pytest

from benchmarks.first_tokens import compared
from volley.bench.load import Sample


def samples(seconds: list[float]) -> list[list[Sample]]:
    made = [
        Sample(started=float(number), first=own, total=1.0, gaps=[], tokens=1) for number, own in enumerate(seconds)
    ]
    return [made[: len(made) // 2], made[len(made) // 2 :]]


def test_requests_are_compared_in_pairs() -> None:
    chance = random.Random(0)
    plain = [chance.lognormvariate(0, 1) for _ in range(120)]
    for factor in (1.0, 1.2):
        for ratios in compared(samples([factor * own for own in plain]), samples(plain)):
            assert ratios == pytest.approx((factor, factor, factor)), "the spread of prompts is in both"


def test_an_interval_holds_what_chance_may_do() -> None:
    chance = random.Random(0)
    plain, other = ([chance.lognormvariate(0, 0.3) for _ in range(120)] for _ in range(2))
    (p99, low, high), (slow, slow_low, slow_high) = compared(samples(other), samples(plain))
    assert low < p99 < high
    assert slow_low < slow < slow_high
    assert slow_high - slow_low < high - low, "a mean of six requests says more than one of them"
