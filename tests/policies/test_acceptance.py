"""How likely a target agrees, against made-up blocks of which that is known."""

import numpy as np
import pytest
from numpy.typing import NDArray

from volley.policies.acceptance import SAMPLED, Acceptance


def blocks(count: int, seed: int) -> list[tuple[int, int, list[float], int]]:
    """Request, kind, confidences, accepted: greedy slots are right with the probability they claim, sampled ones half as often,
    and request 3 is always right."""
    random = np.random.default_rng(seed)
    made = []
    for index in range(count):
        kind, request = index % 2, index % 4
        sure = random.uniform(0.05, 0.98, 5)
        right = random.random(5) < (sure / 2 if kind == SAMPLED else sure)
        made.append((request, kind, sure.tolist(), 5 if request == 3 or right.all() else int(right.argmin())))
    return made


def test_acceptance_is_calibrated_by_kind_and_by_request() -> None:
    acceptance = Acceptance()
    gaps: list[list[NDArray[np.float64]]] = [[] for _ in range(4)]
    for number, (request, kind, sure, accepted) in enumerate(blocks(4000, 0)):
        if number > 1000:
            gaps[request].append(np.array(acceptance.gains(request, kind, sure)) - (np.arange(5) < accepted))
        acceptance.observe(request, kind, sure, [slot < accepted for slot in range(5)])
    for request in (0, 1, 2):
        assert np.abs(np.mean(gaps[request], axis=0)).max() < 0.12
    assert acceptance.gains(3, 1, [0.5])[0] > acceptance.gains(1, 1, [0.5])[0] + 0.2, "a lucky request"
    acceptance.end(3)
    assert acceptance.gains(3, 1, [0.5]) == acceptance.gains(99, 1, [0.5]), "forgotten"


def test_another_text_is_soon_known() -> None:
    """Slots are right nine times in ten, and then once in ten, in a request each."""
    acceptance, random = Acceptance(), np.random.default_rng(0)
    for request, chance in enumerate((0.9, 0.1)):
        for _ in range(50):
            right = random.random(3) < chance
            acceptance.observe(request, 0, [0.8] * 3, right.tolist())
        assert acceptance.gains(request, 0, [0.8])[0] == pytest.approx(chance, abs=0.3)


def test_gains_are_products_and_end_at_the_price() -> None:
    acceptance, sure = Acceptance(), np.array([0.9, 0.8, 0.3, 0.9])
    for kind, odds in enumerate([np.log(sure / (1 - sure)), -np.log(1 - sure)]):
        whole = acceptance.gains(0, kind, sure.tolist())
        features = np.stack([np.ones(4), odds, np.arange(4) / 8, np.zeros(4)])
        assert whole == pytest.approx(np.cumprod(1 / (1 + np.exp(-np.array(acceptance.weights[kind]) @ features))))
        for threshold in (0.01, 0.2, 0.5, 0.99):
            assert acceptance.gains(0, kind, sure.tolist(), threshold) == [gain for gain in whole if gain >= threshold]
    assert acceptance.gains(0, 0, [0.0, 1.0])[0] < 0.02
    assert acceptance.gains(0, 1, [0.0, 1.0])[0] > 0.2, "a flat law has much in common with another one"


def test_only_judged_slots_teach() -> None:
    """Slots behind the first error were never judged, and must not be learnt from."""
    one, two = Acceptance(), Acceptance()
    for _ in range(16):
        one.observe(0, 0, [0.9, 0.5, 0.5], [False] * 3)
        two.observe(0, 0, [0.9, 0.01, 0.99], [False] * 3)
    assert np.allclose(one.weights, two.weights)
