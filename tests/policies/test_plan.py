"""The planner against every option, one after the other."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from volley.decode.lookup import MOST_LOOKUP_TOKENS
from volley.policies.acceptance import KINDS, TREE
from volley.policies.arrivals import LATER
from volley.policies.cost import Costs, FloatArray
from volley.policies.plan import _THRESHOLDS, UNEVEN, Plan, Planner, fitting

MOST, NODES = 5, 9  # slots of a chain, nodes of a tree
SLOTS = (5, 4, 3, 2, 1)  # in the order of the planner's options
OPTIONS = [(0, 0.0), *itertools.product(SLOTS, _THRESHOLDS.tolist())]


def made_costs(token: float) -> Costs:
    """Passes that are free up to 10 tokens; both tables are timed far enough for all that follows."""
    costs = Costs(
        lambda tokens, requests: 0.002 + 1e-4 * tokens, lambda tokens, requests: 0.01 + token * max(0, tokens - 12)
    )
    costs.draft.time(512)
    costs.target.time(512)
    return costs


def made_gains(counts: list[int], blocks: int, seed: int) -> dict[int, FloatArray]:
    random = np.random.default_rng(seed)
    chance = random.uniform(0.3, 0.95, KINDS)
    gains: dict[int, FloatArray] = {}
    for kind in range(KINDS):
        if counts[kind]:
            length = NODES if kind >= TREE else MOST
            alone = np.clip(random.normal(chance[kind], 0.2, (length, blocks)), 0.05, 0.99)
            gains[kind] = np.cumprod(alone, axis=0)
    return gains


def expected(
    costs: Costs, counts: list[int], gains: dict[int, FloatArray], trust: list[float], options: list[int]
) -> Plan:
    """Compute what an option for each kind promises, block by block and slot by slot."""
    plan = Plan(0.0, 0.0, 0.0, [0] * KINDS, [0.0] * KINDS, [1.0] * KINDS, [0.0] * KINDS)
    for kind, chances in gains.items():
        size, threshold = OPTIONS[options[kind]]
        plan.positions[kind], plan.thresholds[kind] = MOST if kind >= TREE and size else size, threshold
        for block in chances.T.tolist() if size else ():
            kept = [gain for gain in (block if kind >= TREE else block[:size]) if gain >= threshold]
            plan.tokens[kind] += trust[kind] * sum(kept) / chances.shape[1]
            plan.verified[kind] += len(kept) / chances.shape[1]
    total = sum(counts)
    verified = sum(count * each for count, each in zip(counts, plan.verified, strict=True))
    seconds = float(costs.target.expected(np.array(total + verified), total))
    drafting = sum(count for count, size in zip(counts, plan.positions, strict=True) if size)
    drafted = sum(count * size for count, size in zip(counts, plan.positions, strict=True))
    if drafting:
        seconds += float(costs.draft.expected(np.array(drafting + drafted), drafting))
    if total > 1 and any(plan.thresholds):
        seconds *= UNEVEN
    speed = math.prod(tokens ** (count / total) for tokens, count in zip(plan.tokens, counts, strict=True))
    return plan._replace(rate=total * speed / seconds, seconds=seconds)


COUNTS = st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(any)


@pytest.mark.slow
@given(
    COUNTS,
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from([0.0, 2e-4, 2e-3]),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.integers(0, 99),
)
def test_the_best_plan_is_the_best_of_all_options(
    numbers: tuple[int, int], trees: tuple[bool, bool], token: float, believed: float, seed: int
) -> None:
    counts, trust = [0] * KINDS, [believed, 1.0, 1.0, believed]
    for kind, (number, is_tree) in enumerate(zip(numbers, trees, strict=True)):
        counts[kind + TREE * is_tree] = number
    present = [kind for kind in range(KINDS) if counts[kind]]
    costs, gains = made_costs(token), made_gains(counts, 8, seed)
    planner = Planner(costs, counts, gains, trust, MOST)
    best = planner.best()
    together = [expected(costs, counts, gains, trust, [option] * KINDS) for option in range(len(OPTIONS))]
    for option, plan in enumerate(together):
        promise = planner.promise([option] * KINDS)
        assert promise.rate == pytest.approx(plan.rate)
        assert promise.seconds == pytest.approx(plan.seconds)
        for kind in present:
            assert promise.positions[kind] == plan.positions[kind]
            assert promise.thresholds[kind] == plan.thresholds[kind]
            assert promise.tokens[kind] == pytest.approx(plan.tokens[kind])
            assert promise.verified[kind] == pytest.approx(plan.verified[kind])
    if len(present) == 2:
        together += [
            expected(
                costs,
                counts,
                gains,
                trust,
                [dict(zip(present, pair, strict=True)).get(kind, 0) for kind in range(KINDS)],
            )
            for pair in itertools.product(range(len(OPTIONS)), repeat=2)
        ]
    assert best.rate == pytest.approx(max(plan.rate for plan in together if any(plan.positions)))


def test_plain_and_whole_are_the_ends() -> None:
    counts = [4, 2, 0, 0]
    planner = Planner(made_costs(1e-3), counts, made_gains(counts, 16, 7), [1.0] * KINDS, MOST)
    plain, whole = planner.whole(0), planner.whole(MOST)
    assert (plain.positions[:2], plain.verified[:2], plain.tokens[:2]) == ([0, 0], [0, 0], [1, 1])
    assert (whole.positions[:2], whole.thresholds[:2], whole.verified[:2]) == ([MOST] * 2, [0, 0], [MOST] * 2)


@pytest.mark.parametrize(("token", "largest"), [(1e-6, 512), (5e-3, 128)])
def test_large_passes_are_timed_only_if_they_look_best(token: float, largest: int) -> None:
    timed: list[int] = []

    def target(tokens: int, requests: int) -> float:
        timed.append(tokens)
        return 0.01 + token * tokens

    counts = [64, 0, 0, 0]
    costs = Costs(lambda tokens, requests: 0.001, target)
    Planner(costs, counts, made_gains(counts, 16, 7), [1.0] * KINDS, MOST).best()
    assert max(timed) == largest


@given(COUNTS, st.sampled_from([0.0, 2e-4, 2e-3, 5e-3]), st.floats(0.0, 0.2), st.integers(0, 99))
def test_while_prompts_come_no_plan_takes_much_of_the_time_of_a_first_token(
    numbers: tuple[int, int], token: float, first: float, seed: int
) -> None:
    counts = [*numbers, 0, 0]
    costs, gains = made_costs(token), made_gains(counts, 8, seed)
    unbound = Planner(costs, counts, gains, [1.0] * KINDS, MOST).best()
    come(costs, first)
    bound = Planner(costs, counts, gains, [1.0] * KINDS, MOST)
    plain, best = bound.whole(0), bound.best()
    assert best.seconds <= best.waiting <= bound.most_seconds
    assert bound.most_seconds == pytest.approx(plain.seconds + LATER * first)
    assert best.rate <= max(unbound.rate, plain.rate) * (1 + 1e-9) or len(gains) > 1


def come(costs: Costs, first: float) -> None:
    """A prompt just came while others decoded; one of before had its first token after so many seconds."""
    costs.arrivals.read(first)
    costs.arrivals.came()


def test_a_plan_that_would_keep_prompts_waiting_is_the_best_of_the_shorter_ones() -> None:
    """Whole blocks of eight requests would take three times as long as plain decoding and bring six tokens."""
    counts, gains = [8, 0, 0, 0], {0: np.full((5, 4), 0.99).cumprod(axis=0)}
    costs = Costs(lambda tokens, requests: 1e-6, lambda tokens, requests: 0.01 + 5e-4 * max(0, tokens - 8))
    assert Planner(costs, counts, gains, [1.0] * KINDS, 5).best().positions[0] == 5
    come(costs, 0.077)
    best = Planner(costs, counts, gains, [1.0] * KINDS, 5).best()
    assert 0 < best.positions[0] < 5
    assert best.seconds <= best.waiting <= 0.01 + LATER * 0.077


def test_where_all_drafts_take_too_long_the_plan_is_plain() -> None:
    counts, gains = [8, 0, 0, 0], {0: np.full((5, 4), 0.99).cumprod(axis=0)}
    costs = Costs(lambda tokens, requests: 0.03, lambda tokens, requests: 0.01 + 1e-6 * tokens)
    costs.target.time(8)
    come(costs, 0.01)
    assert Planner(costs, counts, gains, [1.0] * KINDS, 5).best().positions[0] == 0


def test_a_long_cycle_is_one_that_verifies_more_than_usual() -> None:
    """Half of the blocks are sure of all of their slots, the others of none."""
    gains = {0: np.array([[0.95] * 5, [0.05] * 5] * 8).T}
    costs = made_costs(1e-3)
    come(costs, 0.2)
    for count in (1, 16):
        planner = Planner(costs, [count, 0, 0, 0], gains, [1.0] * KINDS, MOST)
        cut = planner.promise([1 + _THRESHOLDS.tolist().index(0.45)] * KINDS)
        assert cut.verified[0] == 2.5
        most = 5 if count == 1 else 16 * 2.5 + 2 * math.sqrt(16 * 2.5**2)
        seconds = costs.draft.expected(np.array(6 * count), count) + costs.target.expected(
            np.array(count + most), count
        )
        assert cut.waiting == pytest.approx(float(seconds) * (UNEVEN if count > 1 else 1.0))


def test_copies_and_first_blocks_have_what_room_the_bound_leaves() -> None:
    costs = Costs(lambda tokens, requests: 1e-3, lambda tokens, requests: 0.01 + 1e-3 * tokens)
    costs.target.time(512)
    counts = [2, 0, 0, 0]
    assert fitting(costs, 2, 15) == 15
    assert (
        Planner(costs, counts, {}, [1.0] * KINDS, 0).lookup_budget(
            Plan(0.0, 0.0, 0.0, [0] * KINDS, [0.0] * KINDS, [1.0] * KINDS, [0.0] * KINDS)
        )
        == 2 * MOST_LOOKUP_TOKENS
    )
    come(costs, 0.05)
    most = 0.012 + LATER * 0.05
    assert fitting(costs, 2, 15) == int((most - 0.001 - 0.012) / 0.002)
    planner = Planner(costs, counts, {}, [1.0] * KINDS, 0)
    plain = planner.whole(0)
    assert planner.lookup_budget(plain) == int((most - 0.012) / 0.001)
    assert planner.lookup_budget(plain._replace(waiting=most + 1)) == 0


def test_where_drafts_are_dropped_for_prompts_only_the_longer_of_draft_and_pass_is_waited_for() -> None:
    costs = made_costs(1e-3)
    come(costs, 0.01)
    counts, gains = [1, 0, 0, 0], {0: np.full((5, 4), 0.9).cumprod(axis=0)}
    assert Planner(costs, counts, gains, [1.0] * KINDS, MOST).best().positions[0] == 0, "a draft alone takes 2 ms"
    costs.arrivals.newcomers = lambda: False
    plan = Planner(costs, counts, gains, [1.0] * KINDS, MOST).best()
    assert plan.positions[0] == MOST
    assert plan.waiting == pytest.approx(0.01)
    costs.drafts_on_device = True
    assert Planner(costs, counts, gains, [1.0] * KINDS, MOST).best().positions[0] == 0, "nobody waits between the two"
