"""The ledger bounds losses, and stands in the way of no gain."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from volley.policies.ledger import Ledger


def play(ledger: Ledger, steps: int, tokens: float, seconds: float, plain: float = 1.0) -> tuple[int, float]:
    """A policy that drafts whenever it may: how many of ``steps`` did, and what all took for what plain steps take."""
    drafted, spent, made = 0, 0.0, 0.0
    for _ in range(steps):
        if ledger.is_spent:
            ledger.note_plain(plain, 1.0)
            spent, made = spent + plain, made + 1
        else:
            ledger.note(tokens, seconds, seconds / plain, 1.0)
            drafted, spent, made = drafted + 1, spent + seconds, made + tokens
    return drafted, spent / (plain * made)


@given(tokens=st.floats(1.0, 8.0), seconds=st.floats(1.0, 12.0), plain=st.sampled_from([0.5, 1.0, 2.0]))
def test_drafts_lose_one_percent_and_no_more(tokens: float, seconds: float, plain: float) -> None:
    """Also where plain steps take half or twice of what was expected, once some were seen."""
    ledger, steps = Ledger(), 3000
    for _ in range(200):
        ledger.note_plain(plain, 1.0)
    drafted, ratio = play(ledger, steps, tokens, seconds * plain, plain)
    lost = max(0.0, seconds - tokens)
    assert (ratio - 1) * steps <= 0.011 * steps + 12 + lost
    if seconds <= tokens:
        assert drafted == steps


def test_a_drafter_that_loses_is_tried_again_and_again() -> None:
    drafted, _ = play(Ledger(), 5000, tokens=1.0, seconds=2.0)
    assert drafted == pytest.approx(12 + 50, abs=3)


def test_gains_of_the_past_pay_for_sixty_steps() -> None:
    ledger = Ledger()
    ledger.note_plain(1.0, 1.0)
    play(ledger, 1000, tokens=4.0, seconds=2.0)
    drafted, _ = play(ledger, 1000, tokens=1.0, seconds=2.0)
    assert drafted == pytest.approx(60 + 10, abs=3)


def test_what_few_requests_gained_pays_for_little_of_many() -> None:
    """Their plain steps take sixteen times as long: twelve of those may be lost, and four more in place of sixty short ones."""
    ledger = Ledger()
    ledger.note_plain(1.0, 1.0)
    for _ in range(1000):
        ledger.note(4.0, 2.0, 2.0, 1.0)
    drafted = 0
    for _ in range(100):
        if ledger.is_spent:
            ledger.note_plain(16.0, 16.0)
        else:
            ledger.note(1.0, 32.0, 32.0, 16.0)
            drafted += 1
    assert drafted == pytest.approx(12 + 4, abs=2)


def test_before_a_plain_step_was_seen_nothing_is_gained() -> None:
    ledger = Ledger()
    play(ledger, 1000, tokens=4.0, seconds=2.0)
    drafted, _ = play(ledger, 100, tokens=1.0, seconds=2.0)
    assert drafted == pytest.approx(12 + 11, abs=3)


def test_what_is_expected_of_plain_steps_changes_and_their_time_does_not() -> None:
    """Costs that were thrice too low are corrected by the steps, as those of a draft are that gains nothing."""
    ledger = Ledger()
    ledger.note_plain(1.0, 0.3)
    ledger.note_change(1 / 0.3)
    drafted, _ = play(ledger, 100, tokens=1.0, seconds=2.0)
    assert drafted == pytest.approx(12 + 1, abs=3)


def test_a_first_plain_step_takes_back_what_a_guess_allowed() -> None:
    """Plain steps were believed to take four times as long."""
    ledger = Ledger()
    ledger.note(1.0, 8.0, 8.0, 4.0)
    ledger.note_plain(1.0, 4.0)
    ledger.note_change(1 / 4)
    drafted, _ = play(ledger, 100, tokens=1.0, seconds=2.0)
    assert drafted == pytest.approx(12 - 4 + 1, abs=3)


def test_an_estimate_that_drifts_is_followed_though_plain_steps_are_rare() -> None:
    """One step in fifty is plain; what is expected of one rises to twice its time, so a draft seems to gain."""
    ledger, drafted = Ledger(), 0
    for number in range(5000):
        believed = 1.0 + min(number / 1000, 1.0)
        if number % 50 == 0 or ledger.is_spent:
            ledger.note_plain(1.0, believed)
        else:
            ledger.note(2.0, 2.5, 2.5 * believed, believed)
            drafted += 1
    assert drafted < 250


def test_noise_does_not_stop_what_gains_a_little() -> None:
    ledger, chance = Ledger(), random.Random(0)
    ledger.note_plain(1.0, 1.0)
    stopped = 0
    for _ in range(20_000):
        stopped += ledger.is_spent
        ledger.note(2.0, chance.lognormvariate(0.0, 0.2) * 1.85, 1.85, 1.0)
    assert stopped == 0


def test_interrupted_steps_count_little() -> None:
    ledger = Ledger()
    for _ in range(3):
        ledger.note(2.0, 500.0, 1.5, 1.0)
    assert not ledger.is_spent
    ledger.note_plain(500.0, 1.0)
    ledger.note(2.0, 1.9, 1.9, 1.0)
    assert not ledger.is_spent


def test_what_no_time_was_expected_of_says_nothing() -> None:
    ledger = Ledger()
    ledger.note_plain(1.0, 0.0)
    ledger.note(1.0, 1.0, 1.0, 1.0)
    assert not ledger.is_spent
