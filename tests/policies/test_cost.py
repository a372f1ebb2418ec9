"""Cost tables: what is measured, what is learnt from real steps."""

import numpy as np
import pytest

from volley.policies.cost import Costs, PassCost


def truth(tokens: int, requests: int, speed: float = 1.0, each: float = 2e-4) -> float:
    return speed * (0.01 + 1e-4 * max(tokens, 12)) + each * requests


def test_costs_are_measured_when_needed_and_interpolated() -> None:
    calls: list[tuple[int, int]] = []

    def measure(tokens: int, requests: int) -> float:
        calls.append((tokens, requests))
        return truth(tokens, requests)

    cost = PassCost(measure)
    assert cost(20, 1) == pytest.approx(truth(20, 1), rel=0.05)
    assert all(calls.count((tokens, 1)) == 2 for tokens in (1, 8)), "at two times, or a slow moment would count"
    assert max(tokens for tokens, _ in calls) == 32, "no more than was asked for"
    before = len(calls)
    assert np.diff(cost.expected(np.arange(1, 32), 1)).min() >= 0
    assert 0.7 * truth(400, 50) < cost.expected(np.array(400.0), 1) < truth(400, 50), "without timing it"
    assert len(calls) == before
    assert cost(30, 8) == pytest.approx(truth(30, 8), rel=0.1)
    assert cost(2000, 1) == pytest.approx(truth(2000, 250), rel=0.1), "beyond the table"


def test_only_new_sizes_are_timed() -> None:
    calls: list[int] = []
    cost = PassCost(lambda tokens, requests: calls.append(tokens) or truth(tokens, requests))  # type: ignore[func-returns-value]
    assert cost.time(30)
    assert not cost.time(64)
    assert cost.time(65)
    assert sorted(calls) == [1, 1, 8, 8, 32, 32, 128], "once, if smaller ones suggest as much"
    assert cost.time(1000)
    assert not cost.time(2000), "larger ones than 512 are taken to go on as before"


@pytest.mark.parametrize(
    ("each", "most", "longest"), [(1e-4, 512, 512), (1e-4, 130, 128), (4e-3, 512, 32), (1.0, 512, 8)]
)
def test_passes_are_timed_ahead_unless_they_take_long(each: float, most: int, longest: int) -> None:
    calls: list[int] = []

    def measure(tokens: int, requests: int) -> float:
        calls.append(tokens)
        return each * tokens

    cost = PassCost(measure)
    cost.rehearse(most)
    assert max(calls) == longest, "the largest of a quarter of a second, or two sizes"
    assert not cost.time(longest)


def test_what_was_learnt_holds_where_another_measures() -> None:
    cost, calls = PassCost(truth), list[int]()
    cost(8, 1)
    cost.measured_by(lambda tokens, requests: calls.append(tokens) or truth(tokens, requests))  # type: ignore[func-returns-value]
    assert cost(8, 1) == pytest.approx(truth(8, 1), rel=0.1)
    assert not calls
    cost(32, 1)
    assert set(calls) == {32}


def test_a_size_that_was_interrupted_counts_little() -> None:
    """Whenever it was timed. It may be as dear as a larger one, and a little above the line between two others."""
    cost, quiet = PassCost(lambda *size: truth(*size) * (3 if size[0] == 32 else 1)), PassCost(truth)
    cost(128, 1)
    quiet(128, 1)
    for tokens in (1, 2, 4, 16, 20, 24, 40, 64):
        assert quiet(tokens, 1) * 0.999 <= cost(tokens, 1) <= 1.2 * quiet(tokens, 1)


def bent(tokens: int, requests: int) -> float:
    """Small passes have another layout: the first tokens add more than later ones. Milliseconds of a real machine."""
    seconds = np.interp(tokens, [1, 2, 4, 8, 16, 32, 64, 512], [1.83, 1.97, 2.28, 3.05, 5.37, 9.04, 15.75, 110])
    return 1e-3 * float(seconds)


def test_small_passes_may_be_dearer_than_the_line_between_others() -> None:
    cost = PassCost(bent)
    cost(64, 1)
    for tokens in (1, 8, 16, 32, 64):
        assert cost(tokens, 1) == pytest.approx(bent(tokens, 1), rel=0.08)


@pytest.mark.parametrize("timed", [8, 16, 32])
def test_passes_that_were_not_timed_are_not_made_out_to_be_dear(timed: int) -> None:
    """Or none would ever be timed."""
    cost = PassCost(bent)
    cost(timed, 1)
    for tokens in (64, 128):
        assert cost.expected(np.array(tokens), 1) < 1.1 * bent(tokens, 1)


@pytest.mark.parametrize("requests", [1, 8])
def test_what_plain_steps_take_beside_their_passes_does_not_make_large_ones_dear(requests: int) -> None:
    """Plain steps alone do not tell whether all passes are slower, or each step takes longer whatever it verifies."""
    beside = 0.9e-3 + 0.4e-3 * (requests - 1)
    cost = PassCost(bent)
    cost(64, requests)
    for _ in range(200):
        cost.observe(requests, requests, bent(requests, 1) + beside)
    assert cost(requests, requests) == pytest.approx(bent(requests, 1) + beside, rel=0.03)
    for tokens in (2 * requests, 4 * requests, 8 * requests):
        assert cost(tokens, requests) == pytest.approx(bent(tokens, 1) + beside, rel=0.15)


def test_steps_that_are_faster_than_the_table_are_believed() -> None:
    """The machine had other work when the table was made: nothing is left for a step beside its pass."""
    cost = PassCost(bent)
    cost(64, 8)
    for tokens in [8, 64, 32] * 30:
        cost.observe(tokens, 8, 0.5 * bent(tokens, 1))
    for tokens in (8, 16, 32, 64):
        assert cost(tokens, 8) == pytest.approx(0.5 * bent(tokens, 1), rel=0.15)


@pytest.mark.parametrize("bad", range(7))
def test_one_bad_moment_does_not_make_large_passes_free(bad: int) -> None:
    """Whichever of the measurements it falls on."""
    asked = 0

    def measure(tokens: int, requests: int) -> float:
        nonlocal asked
        asked += 1
        return truth(tokens, requests) * (5 if asked == 1 + bad else 1)

    cost, quiet = PassCost(measure), PassCost(truth)
    for tokens, requests in [(48, 8), (64, 16), (256, 16), (8, 8)]:
        assert cost(tokens, requests) == pytest.approx(quiet(tokens, requests), rel=0.05)
    # 1, 8 and 32 tokens twice, then 128 once. After a slow 8 the 32 looks likely, and a slow 128 is timed again.
    assert asked == {1: 6, 6: 8}.get(bad, 7)


def test_more_tokens_never_take_less() -> None:
    """Whatever the steps seem to say: here those of many requests took long, however many tokens they had."""
    cost = PassCost(truth)
    cost(512, 64)
    for requests in range(8, 64):
        cost.observe(3 * requests, requests, 1e-3 * requests)
    assert np.diff(cost.expected(np.arange(64, 512), 64)).min() > 0.1 * 1e-4


def test_large_passes_are_those_of_many_requests() -> None:
    """One request that had all their tokens would see far more keys."""

    def measure(tokens: int, requests: int) -> float:
        return truth(tokens, requests, each=0.0) + 2e-6 * tokens * (tokens / requests)

    cost = PassCost(measure)
    for tokens in (32, 128, 512):
        assert cost(tokens, 1) == pytest.approx(measure(tokens, tokens // 8), rel=0.05)


@pytest.mark.parametrize("each", [0.0, 2e-4, 4e-4])
def test_costs_follow_what_steps_really_take(each: float) -> None:
    cost = PassCost(lambda tokens, requests: truth(tokens, requests, each=each))
    cost(64, 32)
    for tokens in [32, 64, 48, 60] * 20:
        cost.observe(tokens, 32, truth(tokens, 32, 1.7, each))
    assert cost(40, 32) == pytest.approx(truth(40, 32, 1.7, each), rel=0.05)
    assert cost(4, 4) == pytest.approx(truth(4, 4, 1.7, each), rel=0.3), "never seen with so few"
    cost.observe(64, 32, 50.0)
    assert cost(40, 32) < 1.2 * truth(40, 32, 1.7, each), "one interrupted step does not upset it"
    for tokens in [64] + [32, 64, 48, 60] * 8:
        cost.observe(tokens, 32, 50.0 if tokens == 48 else truth(tokens, 32, 1.7, each))
    assert cost(40, 32) < 2 * truth(40, 32, 1.7, each), "interrupted steps do not upset it"


def test_what_the_first_short_passes_take_is_learnt_at_once() -> None:
    cost = PassCost(truth)
    cost(64, 32)
    for _ in range(4):
        cost.observe(64, 32, truth(64, 32, speed=1.7))
    assert cost(64, 32) == pytest.approx(truth(64, 32, speed=1.7), rel=0.1)


def test_prompts_are_told_apart_from_tokens() -> None:
    """Though they take three times what was assumed at first."""
    cost = PassCost(truth)
    cost(96, 32)
    for tokens, read in [(64, 0), (32, 200), (96, 100), (64, 300), (96, 0)] * 20:
        cost.observe(tokens, 32, truth(tokens, 32, speed=1.7) + 15e-5 * read, read)
    for tokens in (32, 64, 96):
        assert cost(tokens, 32) == pytest.approx(truth(tokens, 32, speed=1.7), rel=0.05)


def test_steps_of_sizes_that_were_never_timed_teach_nothing() -> None:
    cost = PassCost(truth)
    cost(8, 1)
    for _ in range(20):
        cost.observe(500, 60, 9.0)
    assert cost(8, 1) == pytest.approx(truth(8, 1), rel=0.01)


def test_passes_that_take_no_time_at_all_cost_nothing() -> None:
    """Cost of a proposer that does not time itself."""
    cost = PassCost(lambda tokens, requests: 0.0)
    cost.time(8)
    cost.observe(4, 1, 1e-6)
    assert 0 <= cost(4, 1) < 1e-3


def test_one_estimate_is_as_good_as_many_and_heeds_no_new_steps() -> None:
    cost = PassCost(truth)
    cost(64, 8)
    for tokens in (1, 3, 8, 20, 64, 100):
        assert cost.rough(tokens, 8) == pytest.approx(float(cost.expected(np.array(tokens), 8)))
    for _ in range(100):
        cost.observe(64, 8, 2 * truth(64, 8))
    before = cost.rough(64, 8)
    assert cost(64, 8) > 1.5 * before
    assert cost.rough(64, 8) == pytest.approx(cost(64, 8))


def test_a_cycle_teaches_both_tables_and_the_ledger() -> None:
    costs = Costs(lambda tokens, requests: 0.5, lambda tokens, requests: 1.0)
    costs.draft.time(8)
    costs.target.time(8)
    for _ in range(40):
        costs.learn((4, 1), (4, 1), (0.5, 1.0), made=4)
    assert not costs.ledger.is_spent, "four tokens in one and a half plain steps"
    for _ in range(10):
        costs.learn((4, 1), (4, 1), (5.0, 1.0), made=1, read=100)
    assert not costs.ledger.is_spent, "a prompt was read beside them"
    for _ in range(10):
        costs.learn((4, 1), (4, 1), (1.5, 1.0), made=1)
    assert costs.ledger.is_spent
    assert not costs.lookup_ledger.is_spent, "a drafter's losses are not prompt lookup's"
    assert costs.draft(4, 1) > 0.52, "the last drafts took three times as long"
    for _ in range(1000):
        costs.learn((0, 0), (1, 1), (0.0, 1.0), made=1)
    assert not costs.ledger.is_spent
