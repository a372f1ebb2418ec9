"""Cost tables: what is measured, what is learnt from real steps."""

import numpy as np
import pytest

from volley.decode.cost import PassCost


def truth(tokens: int, requests: int, speed: float = 1.0) -> float:
    return speed * (0.01 + 1e-4 * max(tokens, 12)) + 3e-4 * requests


def test_costs_are_measured_when_needed_and_interpolated() -> None:
    calls: list[tuple[int, int]] = []

    def measure(tokens: int, requests: int) -> float:
        calls.append((tokens, requests))
        return truth(tokens, requests)

    cost = PassCost(measure)
    assert cost(20, 1) == pytest.approx(truth(20, 0) + 3e-4, rel=1e-6)
    assert max(calls.count(call) for call in calls) == 2, "at two times, or a slow moment would count"
    assert max(tokens for tokens, _ in calls) == 24, "no more than was asked for"
    before = len(calls)
    assert np.diff(cost.upto(1, 22, 1)).min() >= 0
    assert len(calls) == before
    assert cost(30, 8) == pytest.approx(truth(30, 8), rel=0.05)
    assert cost(2000, 1) == pytest.approx(truth(2000, 1), rel=0.05), "beyond the table"


def test_a_size_that_was_interrupted_does_not_count() -> None:
    cost = PassCost(lambda tokens, requests: truth(tokens, requests) * (3 if tokens in {2, 16, 24} else 1))
    cost(64, 1)
    for tokens in (1, 2, 4, 16, 20, 24, 40, 64):
        assert cost(tokens, 1) == pytest.approx(truth(tokens, 0) + 3e-4, rel=0.05)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_what_requests_take_is_asked_at_several_times(bad: int) -> None:
    """Measured once, in a bad moment, and taken off all large passes, it made them look as cheap as small ones for ever."""
    asked = 0

    def measure(tokens: int, requests: int) -> float:
        nonlocal asked
        asked += (tokens, requests) == (8, 8)
        return truth(tokens, requests) * (3 if (tokens, requests) == (8, 8) and asked == 1 + bad else 1)

    cost = PassCost(measure)
    for tokens, requests in [(48, 8), (64, 16), (256, 16), (8, 8)]:
        assert cost(tokens, requests) == pytest.approx(truth(tokens, requests), rel=0.05)
    assert asked > 2, "the bad moment was among them"


def test_large_passes_are_those_of_many_requests() -> None:
    """One request that had all their tokens would see far more keys."""

    def measure(tokens: int, requests: int) -> float:
        return truth(tokens, requests) + 2e-6 * tokens * (tokens / requests)

    cost = PassCost(measure)
    for tokens in (64, 128, 256, 512):
        assert cost(tokens, tokens // 8) == pytest.approx(measure(tokens, tokens // 8), rel=0.05)
    assert cost(24, 1) == pytest.approx(measure(24, 1), rel=0.05)


def test_costs_follow_what_steps_really_take() -> None:
    cost = PassCost(truth)
    cost(64, 32)
    for tokens in [32, 64, 48, 60] * 20:
        cost.observe(tokens, 32, truth(tokens, 32, speed=1.7))
    assert cost(40, 32) == pytest.approx(truth(40, 32, speed=1.7), rel=0.05)
    assert cost(4, 4) == pytest.approx(truth(4, 4, speed=1.7), rel=0.3), "never seen with so few"
    cost.observe(64, 32, 50.0)
    assert cost(40, 32) < 2 * truth(40, 32, speed=1.7), "one interrupted step does not upset it"
    for tokens in [64] + [32, 64, 48, 60] * 8:
        cost.observe(tokens, 32, 50.0 if tokens == 48 else truth(tokens, 32, speed=1.7))
    assert cost(40, 32) < 2 * truth(40, 32, speed=1.7), "interrupted steps do not upset it"


def test_what_the_first_short_passes_take_is_learnt_at_once() -> None:
    cost = PassCost(truth)
    cost(64, 32)
    spent = 0.0
    while spent < 0.1:
        spent += truth(64, 32, speed=1.7)
        cost.observe(64, 32, truth(64, 32, speed=1.7))
    assert cost(64, 32) == pytest.approx(truth(64, 32, speed=1.7), rel=0.1)


def test_prompts_and_padding_are_told_apart_from_tokens() -> None:
    """Though they take three and four times what was measured when the engine was made."""
    cost = PassCost(truth, lambda: (5e-5, 2e-5))
    cost(96, 32)
    for tokens, read, padding in [(64, 0, 0), (32, 200, 0), (96, 100, 50), (64, 300, 100), (96, 0, 200)] * 40:
        seconds = truth(tokens, 32, speed=1.7) + 15e-5 * read + 8e-5 * padding
        cost.observe(tokens, 32, seconds, read, padding)
    for tokens in (32, 64, 96):
        assert cost(tokens, 32) == pytest.approx(truth(tokens, 32, speed=1.7), rel=0.05)
    assert cost.padding(np.array(10.0)) == pytest.approx(10 * 8e-5, rel=0.1)


def test_what_many_requests_take_is_never_more_than_the_pass() -> None:
    """Measured in a bad moment, and taken off a large pass, it left less than nothing, and a machine that is free of charge."""
    cost = PassCost(lambda tokens, requests: 0.05 if requests == 8 and tokens == 8 else 0.01 + 1e-5 * tokens)
    assert cost(500, 60) > cost(32, 1) > 0.01
    assert cost(1, 1) > 0.005
