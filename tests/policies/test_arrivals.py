"""How long a cycle may be while prompts come."""

from math import inf

import pytest

from volley.policies.arrivals import LATER, SELDOM, Arrivals


def test_a_first_token_comes_at_most_15_percent_later() -> None:
    """A cycle may take 0.15 of a plain first token beyond a plain cycle, though its time is seen with drafts."""
    arrivals = Arrivals()
    arrivals.came()
    for number in range(1000):
        arrivals.read(0.04 if number % 10 == 0 else 0.02)
    arrivals.read(0.5)
    later = arrivals.most_seconds(0.005) - 0.005
    assert later == pytest.approx(LATER * 0.04), "of late ones, but not of one alone"
    assert later <= 0.15 * (0.04 - later)


def test_cycles_are_bound_for_some_seconds_of_decoding_after_a_prompt_came() -> None:
    arrivals = Arrivals()
    assert arrivals.most_seconds(0.005) == inf, "none came yet"
    for _ in range(2):
        arrivals.came()
        for _ in range(9):
            arrivals.decoded(SELDOM / 10)
            assert arrivals.most_seconds(0.005) < inf
    arrivals.decoded(SELDOM / 10)
    assert arrivals.most_seconds(0.005) == inf
