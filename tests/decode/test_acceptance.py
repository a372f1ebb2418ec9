"""How likely a target agrees, against made-up blocks of which that is known."""

import numpy as np
import pytest

from volley.decode.acceptance import Acceptance


def blocks(count: int, seed: int) -> list[tuple[int, bool, list[float], int]]:
    """Request, sampled or not, confidences, accepted: greedy slots are right with the probability they claim, sampled ones
    half as often, and request 3 is always right."""
    random = np.random.default_rng(seed)
    made = []
    for index in range(count):
        sampled, request = index % 2 == 1, index % 4
        sure = random.uniform(0.05, 0.98, 5)
        right = random.random(5) < (sure / 2 if sampled else sure)
        accepted = 5 if request == 3 or right.all() else int(right.argmin())
        made.append((request, sampled, sure.tolist(), accepted))
    return made


def test_acceptance_is_calibrated_by_kind_and_by_request() -> None:
    acceptance = Acceptance()
    gaps = []
    for number, (request, sampled, sure, accepted) in enumerate(blocks(4000, 0)):
        if number > 1000:
            gains = acceptance.gains(request, int(sampled), sure)
            gaps.append((request, *(np.array(gains) - (np.arange(5) < accepted))))
        acceptance.observe(request, int(sampled), sure, [slot < accepted for slot in range(5)])
        acceptance.learn()
    by_request = {r: np.mean([gap[1:] for gap in gaps if gap[0] == r], axis=0) for r in range(4)}
    for request in (0, 1, 2):
        assert np.abs(by_request[request]).max() < 0.12
    assert acceptance.gains(3, 1, [0.5])[0] > acceptance.gains(1, 1, [0.5])[0] + 0.2, "a lucky request"
    acceptance.end(3)
    assert acceptance.gains(3, 1, [0.5]) == acceptance.gains(99, 1, [0.5]), "forgotten"


def test_gains_are_products_and_end_at_the_price() -> None:
    acceptance, sure = Acceptance(), np.array([0.9, 0.8, 0.3, 0.9])
    for kind, odds in enumerate([np.log(sure / (1 - sure)), -np.log(1 - sure)]):
        whole = acceptance.gains(0, kind, sure.tolist())
        features = np.stack([np.ones(4), odds, np.arange(4) / 8, np.zeros(4)])
        assert whole == pytest.approx(np.cumprod(1 / (1 + np.exp(-acceptance.weights[kind] @ features))))
        for price in (0.01, 0.2, 0.5, 0.99):
            assert acceptance.gains(0, kind, sure.tolist(), price) == [gain for gain in whole if gain >= price]
    assert acceptance.gains(0, 0, [0.0, 1.0])[0] < 0.02
    assert acceptance.gains(0, 1, [0.0, 1.0])[0] > 0.2, "a flat law has much in common with another one"


def test_only_judged_slots_teach() -> None:
    """What lies behind the first error was never judged, and must not be learnt from."""
    one, two = Acceptance(), Acceptance()
    for _ in range(16):
        one.observe(0, 0, [0.9, 0.5, 0.5], [False] * 3)
        two.observe(0, 0, [0.9, 0.01, 0.99], [False] * 3)
        one.learn()
        two.learn()
    assert np.allclose(one.weights, two.weights)
