"""The planner against every place at which a pass might be cut, one after the other."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from volley.decode.acceptance import KINDS, TREE
from volley.decode.cost import Costs, FloatArray
from volley.decode.plan import PLAIN, Planner

MOST, NODES = 5, 9  # slots of a chain, nodes of a tree


def made_costs(token: float, padding: float) -> Costs:
    return Costs(
        lambda tokens, requests: 0.002 + 1e-4 * tokens + 1e-4 * requests,
        lambda tokens, requests: 0.01 + token * max(0, tokens - 10) + 1e-4 * requests,
        lambda: (0.0, padding),
    )


def made_worth(counts: list[int], blocks: int, seed: int) -> dict[int, FloatArray]:
    random = np.random.default_rng(seed)
    chance = random.uniform(0.3, 0.95, KINDS)
    worth: dict[int, FloatArray] = {}
    for kind in range(KINDS):
        if counts[kind]:
            length = NODES if kind >= TREE else MOST
            alone = np.clip(random.normal(chance[kind], 0.2, (length, blocks)), 0.05, 0.99)
            worth[kind] = np.cumprod(alone, axis=0)
    return worth


def every_cut(
    costs: Costs, counts: list[int], worth: dict[int, FloatArray], pace: list[float], slots: list[int]
) -> list[float]:
    """Rates if the most promising slot is verified, the two most promising, and so on to all."""
    every = [
        (float(gain) / pace[kind], kind, float(gain), blocks.shape[1])
        for kind, blocks in worth.items()
        for place, row in enumerate(blocks)
        for gain in row
        if (slots[kind] if kind >= TREE else place < slots[kind])
    ]
    total, drafting = sum(counts), sum(counts[kind] for kind in worth if slots[kind])
    drafted = drafting + sum(counts[kind] * slots[kind] for kind in worth)
    longest = {kind: NODES if kind >= TREE else slots[kind] for kind in worth if slots[kind]}
    tokens, verified, rates = dict.fromkeys(worth, 1.0), 0.0, []
    for _, kind, gain, blocks in sorted(every, reverse=True):
        tokens[kind] += gain / blocks
        verified += counts[kind] / blocks
        whole = min(int(verified), sum(counts[kind] * length for kind, length in longest.items()))
        padding = (1 - 1 / total) * (total * max(longest.values()) - whole)
        seconds = costs.target(total + whole, total) + costs.draft(drafted, drafting)
        seconds += float(costs.target.padding(np.array([padding]))[0])
        rates.append(total / seconds * math.prod(tokens[kind] ** (counts[kind] / total) for kind in worth))
    return rates


COUNTS = st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(any)


@settings(max_examples=60, deadline=None)
@given(COUNTS, st.tuples(st.booleans(), st.booleans()), st.sampled_from([0.0, 2e-4, 2e-3]), st.integers(0, 99))
def test_a_promise_is_the_best_of_all_cuts(
    numbers: tuple[int, int], trees: tuple[bool, bool], token: float, seed: int
) -> None:
    counts = [0] * KINDS
    for kind, (number, is_tree) in enumerate(zip(numbers, trees, strict=True)):
        counts[kind + TREE * is_tree] = number
    costs, worth = made_costs(token, token / 4), made_worth(counts, 8, seed)
    pace = np.random.default_rng(seed + 1).uniform(1, 4, KINDS).tolist()
    planner = Planner(costs, counts, worth, pace)
    for size in range(1, MOST + 1):
        slots = [(MOST if kind >= TREE else size) * (counts[kind] > 0) for kind in range(KINDS)]
        plan, rates = planner.promise(slots), every_cut(costs, counts, worth, pace, slots)
        is_cut = rates[-1] < 0.97 * max(rates)
        assert plan.rate == pytest.approx(max(rates) if is_cut else rates[-1])
        assert any(plan.prices) == is_cut
        assert plan.rate <= planner.best(MOST).rate / 0.9, (
            "worse ones may end the search, better ones by a tenth do not"
        )


def test_the_best_of_one_kind_is_the_best_size() -> None:
    counts = [4, 0, 0, 0]
    for token in (0.0, 3e-4, 2e-3):
        planner = Planner(made_costs(token, 0.0), counts, made_worth(counts, 16, 7), PLAIN.pace)
        sizes = [planner.promise([size, 0, 0, 0]).rate for size in range(MOST + 1)]
        assert planner.best(MOST).rate == max(sizes)
