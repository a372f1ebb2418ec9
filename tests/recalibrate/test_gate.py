"""The gate lets through what is better, and nothing that chance, one client or its own training made look better."""

import numpy as np
import pytest

from volley.recalibrate.gate import LEAST_ROWS, RECENT_ROWS, choose_recent, judge, judge_former, judge_shift
from volley.recalibrate.replay import Replayed
from volley.recalibrate.reservoir import Entry, ServedRow


def entry(number: int, client: str = "a", *, held_out: bool = True, seconds: int = 1000) -> Entry:
    return Entry(number, seconds, client, 50, held_out)


def replayed(number: int, before: float, candidate: float, client: str = "a", tokens: int = 40) -> Replayed:
    row = ServedRow(entry(number, client), [1], [2] * (tokens + 1), 0.0)
    return Replayed(row, tokens, (before, candidate))


def noisy(count: int, gain: float, seed: int, client: str = "a", noise: float = 0.15) -> list[Replayed]:
    rng = np.random.default_rng(seed)
    before = rng.uniform(10, 20, count)
    after = before / (1 + gain) * np.exp(rng.normal(0, noise, count))
    return [replayed(index, *pair, client) for index, pair in enumerate(zip(before, after, strict=True))]


def test_a_clear_gain_is_let_through_and_measured() -> None:
    found = judge(noisy(40, 0.3, 0), 1, 0)
    assert found.is_better
    assert found.gain == pytest.approx(0.3, abs=0.08)
    assert found.tau / found.tau_before == pytest.approx(1 + found.gain, rel=1e-6)


def test_few_answers_decide_nothing() -> None:
    found = judge(noisy(LEAST_ROWS - 1, 0.5, 0), 1, 0)
    assert not found.is_better
    assert "answers to judge on" in found.reason
    assert not judge([], 1, 0).is_better


def test_a_gain_of_one_client_alone_does_not_decide() -> None:
    flood = noisy(40, 0.6, 0, "flood")
    honest = noisy(8, -0.02, 1, "honest")
    found = judge([*flood, *honest], 1, 0)
    assert found.gain > 0.1
    assert found.reason.startswith("without one client")
    assert judge([*flood, *noisy(8, 0.4, 1, "honest")], 1, 0).is_better
    assert judge(flood, 1, 0).is_better, "a server with one client is that client's"


@pytest.mark.parametrize("quiet", [1, 5])
def test_few_answers_of_others_must_not_lose(quiet: int) -> None:
    flood = noisy(40, 0.6, 0, "flood")
    found = judge([*flood, *noisy(quiet, -0.3, 1, "honest")], 1, 0)
    assert found.gain > 0.1
    assert found.reason.startswith("without one client the gain is -")
    assert judge([*flood, *noisy(quiet, 0.3, 1, "honest")], 1, 0).is_better


def test_what_suits_one_client_alone_gives_way_and_does_not_come_back() -> None:
    """However much of it there is: the former drafter is better for all others."""
    flood, honest = noisy(36, -0.4, 0, "flood"), noisy(12, 0.4, 1, "honest")
    rows = [*flood, *(replayed(100 + index, *row.cycles, "honest") for index, row in enumerate(honest))]
    newest = {row.row.entry.number for row in rows[-16:]}
    assert not judge_shift(rows, newest, 1, 0).is_better
    found = judge_former(rows, newest, 1, 0)
    assert (found.is_better, found.rows) == (True, 12)
    assert found.gain > 0.2
    assert not judge_shift(rows, newest, 0, 1).is_better, "the flood's does not suit the others"
    assert not judge_former(noisy(40, -0.1, 2), set(), 1, 0).is_better


@pytest.mark.slow
def test_chance_alone_seldom_brings_a_former_drafter_back() -> None:
    def rows(seed: int) -> list[Replayed]:
        return [*noisy(24, -0.2, seed, "a"), *noisy(12, 0.0, seed + 5000, "b"), *noisy(12, 0.0, seed + 9000, "c")]

    assert sum(judge_former(rows(seed), set(), 1, 0).is_better for seed in range(1000)) < 10


def test_answers_are_taken_in_turn_from_all_clients() -> None:
    found = [entry(number, "flood") for number in range(500)] + [entry(500 + number, "quiet") for number in range(9)]
    chosen = choose_recent(sorted(found, key=lambda e: e.number), [])
    assert len(chosen) == RECENT_ROWS
    assert sum(one.client == "quiet" for one in chosen) == 9
    assert min(one.number for one in chosen if one.client == "flood") == 500 - (RECENT_ROWS - 9)


def test_only_what_no_drafter_in_question_was_trained_on_is_chosen() -> None:
    found = [entry(number, held_out=number % 5 == 0) for number in range(40)]
    assert {one.number for one in choose_recent(found, [-1, 29])} == {0, 5, 10, 15, 20, 25, *range(30, 40)}


def test_what_is_a_day_older_than_the_newest_does_not_decide_where_enough_is_newer() -> None:
    for newer, first in ((LEAST_ROWS, 9), (LEAST_ROWS - 2, 7)):
        found = [entry(number, seconds=100_000 * (number >= 9)) for number in range(9 + newer)]
        assert [one.number for one in choose_recent(found, [])] == list(range(first, 9 + newer))


def test_a_shift_is_followed_on_the_newest_answers_and_nothing_goes_against_them() -> None:
    old, new = noisy(32, -0.1, 0), noisy(16, 0.3, 1)
    shifted = [*old, *(replayed(100 + index, *row.cycles) for index, row in enumerate(new))]
    newest = set(range(100, 116))
    found = judge_shift(shifted, newest, 1, 0)
    assert (found.is_better, found.rows) == (True, 16)
    back = judge_shift(noisy(32, 0.5, 0) + [replayed(100 + i, 14, 15) for i in range(16)], newest, 1, 0)
    assert not back.is_better
    assert back.reason.startswith("on the newest answers")
    steady = judge_shift(noisy(48, 0.1, 2), set(range(32, 48)), 1, 0)
    assert steady.rows == 48 or steady.is_better


@pytest.mark.slow
@pytest.mark.parametrize("count", [LEAST_ROWS, 16, 40])
def test_few_answers_let_chance_through_no_more_often(count: int) -> None:
    passed = sum(judge(noisy(count, 0.0, seed), 1, 0).is_better for seed in range(3000))
    assert passed < 3000 * 0.035, "23 in a thousand are meant"
    if count == 40:
        assert sum(judge(noisy(40, 0.12, seed), 1, 0).is_better for seed in range(100)) > 90, "a real gain is found"
