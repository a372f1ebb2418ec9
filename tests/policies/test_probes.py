"""How much time probes lose."""

import pytest

from volley.policies.probes import cycles_between


@pytest.mark.parametrize(("rate", "seconds"), [(50.0, 0.02), (99.0, 0.01), (1.0, 0.5)])
def test_probes_lose_at_most_a_quarter_of_a_per_cent(rate: float, seconds: float) -> None:
    best_rate, best_seconds = 100.0, 0.03
    lost = seconds * (1 - rate / best_rate)  # the tokens that a probe makes are not lost
    assert lost / (cycles_between(rate, seconds, best_rate, best_seconds) * best_seconds) <= 0.0025


def test_a_worse_plan_is_tried_more_seldom() -> None:
    assert cycles_between(100.0, 0.01, 100.0, 0.03) == cycles_between(120.0, 0.01, 100.0, 0.03) == 32
    assert cycles_between(50.0, 0.03, 100.0, 0.03) == 32 + 200
