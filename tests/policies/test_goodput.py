"""Decisions of goodput where costs and chances are known."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.policies.views import views
from volley.decode.work import Rule, Shape
from volley.policies.base import Cycle
from volley.policies.cost import Costs, FloatArray
from volley.policies.goodput import Goodput


def simulate(policy: Goodput, count: int, cycles: int, sure: float, seed: int = 0) -> tuple[list[int], list[int]]:
    """Run ``count`` greedy requests whose slots are right as often as they claim, about ``sure``; what was drafted and
    verified per cycle."""
    random = np.random.default_rng(seed)
    drafted, verified = played(
        policy, [False] * count, cycles, random, lambda _, size: np.clip(random.normal(sure, 0.15, size), 0.02, 0.98)
    )
    return drafted.sum(axis=1).tolist(), verified.sum(axis=1).tolist()


def played(
    policy: Goodput,
    sampled: list[bool],
    cycles: int,
    random: np.random.Generator,
    chances: Callable[[int, int], FloatArray],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Slots drafted and verified per cycle and request ``[cycles, R]``; ``chances(request, size)`` is how likely they are
    right, which they claim."""
    count = len(sampled)
    rules = [Rule.REJECTION if own else Rule.GREEDY for own in sampled]
    sizes: list[tuple[list[int], list[int]]] = []
    for _ in range(cycles):
        specs = policy.decide(views([7] * count, rules, max_nodes=0), count)
        cycle = [Cycle(i, spec, chances(i, spec.positions).tolist()) for i, spec in enumerate(specs)]
        verified = policy.trim(cycle)
        for own, size in zip(cycle, verified, strict=True):
            kept = int(np.cumprod(random.random(size) < np.array(own.confidence[:size])).sum())
            conclude(own, size, kept)
        policy.observe(cycle)
        sizes.append(([spec.positions for spec in specs], verified))
    drafted_all, verified_all = np.array(sizes).transpose(1, 0, 2)
    return drafted_all, verified_all


def conclude(cycle: Cycle, verified: int, accepted: int) -> None:
    cycle.verified, cycle.accepted = verified, accepted
    cycle.right = [position < accepted for position in range(verified)]


def goodput(token: float, draft: float = 0.1) -> Goodput:
    policy = Goodput()
    policy.attach(8, Costs(lambda tokens, requests: draft, lambda tokens, requests: 1 + token * tokens))
    return policy


def test_each_request_of_an_idle_engine_is_judged_by_its_own_blocks() -> None:
    """Texts for which drafting pays follow others for which it does not; a drafter that is never right costs little."""
    for right, most in (((0.1, 0.8), 0.8), ((0.8, 0.8), 0.65), ((0.02, 0.02), 1.04)):
        policy, random = goodput(0.13, 0.5), np.random.default_rng(0)
        made, spent = np.zeros(2), np.zeros(2)
        for number in range(16):
            for _ in range(80):
                (spec,) = policy.decide([replace(views([7], max_nodes=0)[0], request_id=number)], 1)
                sure = np.clip(random.normal(right[number % 2], 0.15, spec.positions), 0.02, 0.98)
                cycle = [Cycle(number, spec, sure.tolist())]
                (size,) = policy.trim(cycle)
                conclude(cycle[0], size, int(np.cumprod(random.random(size) < right[number % 2]).sum()))
                policy.observe(cycle)
                made[number % 2] += 1 + cycle[0].accepted
                spent[number % 2] += (1 + 0.13 * (1 + size)) / 1.13 + 0.5 / 1.13 * bool(spec.positions)
            policy.end(number)
        assert spent.sum() / made.sum() <= most, "in plain steps"


def test_free_slots_are_all_verified_and_dear_ones_are_not() -> None:
    for token, least, most in ((0.0, 6.9, 7.0), (0.05, 2.0, 5.0), (0.3, 0.0, 3.0)):
        _, verified = simulate(goodput(token), 4, 200, sure=0.8)
        mean = float(np.mean(verified[100:])) / 4
        assert least <= mean <= most, (token, mean)


def test_drafting_stops_where_it_cannot_pay_and_comes_back() -> None:
    policy = goodput(token=0.5, draft=3.0)
    drafted, _ = simulate(policy, 64, 300, sure=0.5)
    assert np.mean([size > 0 for size in drafted[50:]]) < 0.15, "a probe now and then, for 1 % of the time"
    cheap = goodput(token=0.02, draft=0.5)
    cheap_drafted, _ = simulate(cheap, 1, 100, sure=0.1)
    assert np.mean([size > 0 for size in cheap_drafted[50:]]) < 0.6, "hopeless text is decoded plainly"
    back, _ = simulate(cheap, 1, 600, sure=0.95, seed=1)
    assert np.mean([size > 0 for size in back[-50:]]) > 0.9, "and drafted again once it is easy"


def test_the_plan_that_was_not_chosen_is_tried_as_often_as_that_is_cheap() -> None:
    """Two slots of 0.5 make 1.75 tokens in 1.6 units of time and the draft's, plain decoding 1 in 1.2: a seventh more or less."""
    for draft, least, most in ((0.24, 0.85, 0.99), (1.1, 0.005, 0.1)):
        policy = goodput(token=0.05, draft=draft)
        drafted, _ = played(policy, [False] * 4, 1500, np.random.default_rng(0), lambda _, size: np.full(size, 0.5))
        assert least < drafted[100:].any(axis=1).mean() < most


def test_drafting_may_pay_for_all_kinds_together_though_for_none_alone() -> None:
    """Three slots of 0.8 make 2.95 tokens: for half of the requests in 1.2 + 0.3 + 0.7 units of time, for all in 2.5, against one
    in 1.2 without; the geometric means are 0.78, 1.18 and 0.83."""
    drafted, _ = played(
        goodput(token=0.05, draft=0.7),
        [False, False, True, True],
        200,
        np.random.default_rng(0),
        lambda _, size: np.full(size, 0.8),
    )
    assert (drafted[100:] > 0).mean() > 0.8


def tree_simulation(token: float, count: int, cycles: int = 60) -> tuple[list[int], list[int]]:
    """The nodes that are asked for, and how many of each tree are verified; the k-th likeliest is right with 0.9 / k."""
    random = np.random.default_rng(0)
    policy = goodput(token=token)
    probabilities = [0.9 / (1 + rank) for rank in range(15)]
    nodes, verified = 0, [0] * count
    for _ in range(cycles):
        specs = policy.decide(views([7] * count), count)
        nodes = max(spec.size if spec.shape is Shape.TREE else 0 for spec in specs)
        cycle = [
            Cycle(i, spec, probabilities if spec.shape is Shape.TREE else [0.5] * spec.positions)
            for i, spec in enumerate(specs)
        ]
        verified = policy.trim(cycle)
        for own, size in zip(cycle, verified, strict=True):
            own.right = (random.random(size) < np.array(own.confidence[:size])).tolist()
            own.verified, own.accepted = size, sum(own.right)
        policy.observe(cycle)
    return [nodes], verified


def test_trees_are_grown_where_they_are_nearly_free_and_pruned_where_they_are_not() -> None:
    assert tree_simulation(token=0.5, count=8)[0] == [0]
    assert tree_simulation(token=0.0, count=8) == ([15], [15] * 8)
    nodes, verified = tree_simulation(token=0.03, count=1)
    assert nodes == [15]
    assert 2 <= verified[0] <= 12
    (spec,) = goodput(token=0.0).decide(views([7], [Rule.REJECTION]), 1)
    assert spec.shape is Shape.CHAIN, "chains get as far there"


def test_a_slot_is_worth_what_it_adds_to_the_speed_of_its_own_request() -> None:
    """Five slots for the greedy requests and none for the others make 5.8 tokens in a unit of time, two and one only 5.4. But
    then greedy requests end almost five times as fast as the others and are soon the fewer: if as many of each arrive, 3.4
    and 5.0 tokens come of it."""
    is_sampled = [False] * 4 + [True] * 4
    _, verified = played(
        goodput(token=0.1),
        is_sampled,
        600,
        np.random.default_rng(0),
        lambda request, size: np.full(size, 0.5 if is_sampled[request] else 0.9),
    )
    greedy, sampled = verified[300:, :4].mean(), verified[300:, 4:].mean()
    assert sampled > 0.3
    assert greedy > sampled


def copies(policy: Goodput, cycles: int, agreed: int, right: float, *, drafts: float = 0.6) -> list[int]:
    """Two greedy requests: how many tokens of the first one's text were to be verified in each cycle, where 15 are always found
    after ``agreed`` that agree, each ``right`` as often; the second finds nothing."""
    random = np.random.default_rng(0)
    most = policy.block_size - 1
    sure = [n / (n + 1) for n in range(agreed, agreed + 15)]
    counts = []
    for _ in range(cycles):
        specs = policy.decide(views([most] * 2, found=[sure, []], max_nodes=0), 2)
        cycle = [Cycle(i, spec, [drafts] * spec.positions) for i, spec in enumerate(specs)]
        for own, size in zip(cycle, policy.trim(cycle), strict=True):
            chance = drafts if own.spec.shape is Shape.CHAIN else right
            conclude(own, size, int(np.cumprod(random.random(size) < chance).sum()))
        true = int(np.cumprod(random.random(15) < right).sum())
        cycle[0].lookup_confidence, cycle[0].lookup_right = sure, [True] * true + [False] * (true < 15)
        policy.observe(cycle)
        assert specs[1].shape is Shape.CHAIN
        counts.append(specs[0].size if specs[0].shape is Shape.LOOKUP else 0)
    return counts


def test_what_is_found_takes_the_place_of_a_draft_where_it_promises_more() -> None:
    assert np.mean(copies(goodput(0.01), 100, agreed=16, right=0.97)[20:]) > 12
    assert np.mean(copies(goodput(0.01), 100, agreed=3, right=0.5, drafts=0.9)[20:]) < 0.5, "drafts are better"
    dear = copies(goodput(0.3), 100, agreed=16, right=0.97)[20:]
    assert 1 < np.mean(dear) < 6, "few where each token costs a third of a pass"


def test_texts_that_turn_out_otherwise_are_no_longer_copied() -> None:
    policy = goodput(0.01)
    assert np.mean(copies(policy, 200, agreed=12, right=0.95)[-50:]) > 8
    assert np.mean(copies(policy, 400, agreed=12, right=0.2)[-50:]) < 0.5
    assert np.mean(copies(policy, 400, agreed=12, right=0.95)[-50:]) > 8, "learnt though none of it was verified"


def test_copies_are_weighed_without_a_drafter() -> None:
    policy = Goodput()
    costs = Costs(lambda *_: pytest.fail("there is none"), lambda tokens, requests: 1 + 0.02 * tokens)
    policy.attach(1, costs)
    policy.rehearse()
    assert np.mean(copies(policy, 100, agreed=8, right=0.9)[20:]) > 5


@pytest.mark.parametrize("count", [3, 8, 16, 31, 32, 64])
def test_everyone_is_learnt_from_sooner_or_later_and_few_at_once(count: int) -> None:
    policy = goodput(token=1e-6)
    simulate(policy, count, cycles=80, sure=0.9)
    taught: set[int] = set()
    counts: list[int] = []
    observe, now = policy.acceptance.observe, [[0.9] * 7 for _ in range(count)]

    def spy(request_id: int, kind: int, confidence: list[float], right: list[bool]) -> None:
        taught.add(request_id)
        counts[-1] += 1
        observe(request_id, kind, confidence, right)

    policy.acceptance.observe = spy  # type: ignore[method-assign]
    for _ in range(60):
        counts.append(0)
        specs = policy.decide(views([7] * count, max_nodes=0), count)
        cycle = [Cycle(i, spec, now[i]) for i, spec in enumerate(specs)]
        for own, size in zip(cycle, policy.trim(cycle), strict=True):
            conclude(own, size, size)
        policy.observe(cycle)
    assert taught == set(range(count))
    assert np.median(counts) <= 1 + count // 16


def test_few_texts_are_kept_up_with_where_drafting_is_far_from_paying() -> None:
    """And for more requests of the same kind. All are where it may pay: for fewer, or for requests of another kind."""
    policy = goodput(token=0.5, draft=3.0)
    assert policy.draft_kv_every({False}, 16) == 1, "nothing is known"
    simulate(policy, 16, 100, sure=0.5)
    for under_way in (16, 40):
        assert policy.draft_kv_every({False}, under_way) > 4
    assert policy.draft_kv_every({False}, 15) == 1
    assert policy.draft_kv_every({True}, 16) == policy.draft_kv_every({False, True}, 16) == 1
    near = goodput(token=0.05, draft=0.3)
    simulate(near, 16, 100, sure=0.8)
    assert near.draft_kv_every({False}, 16) == 1


@pytest.mark.slow
def test_hope_comes_back_with_texts_that_are_easy() -> None:
    policy = goodput(token=0.05, draft=1.0)
    simulate(policy, 4, 200, sure=0.05)
    assert policy.draft_kv_every({False}, 4) > 4
    simulate(policy, 4, 3000, sure=0.95, seed=1)
    assert policy.draft_kv_every({False}, 4) == 1


def test_nothing_is_tried_while_nobody_can_be_drafted_for() -> None:
    policy = goodput(token=0.05, draft=1.0)
    simulate(policy, 4, 200, sure=0.05)
    for _ in range(2000):
        assert all(spec.positions == 0 for spec in policy.decide(views([0] * 4, max_nodes=0), 4))
        policy.observe([])
    specs = policy.decide(views([7, 0, 0, 0], max_nodes=0), 4)
    assert specs[0].positions > 0, "at the first chance"


def test_those_who_end_with_their_next_token_keep_nobody_from_a_plan() -> None:
    """A stream of sampled requests that cannot be drafted for, so that nothing is learnt of their kind."""
    policy, random = goodput(token=1.0, draft=1.0), np.random.default_rng(0)
    rules, drafted = [Rule.GREEDY, Rule.REJECTION], []
    for _ in range(300):
        specs = policy.decide(views([7, 0], rules, max_nodes=0), 2)
        assert specs[1].positions == 0
        cycle = [Cycle(0, specs[0], [0.1] * specs[0].positions)]
        (size,) = policy.trim(cycle)
        conclude(cycle[0], size, int(np.cumprod(random.random(size) < 0.1).sum()))
        policy.observe(cycle)
        drafted.append(specs[0].positions)
    assert np.mean(np.array(drafted[100:]) > 0) < 0.2, "drafts that do not pay are dropped"


def test_while_drafts_have_lost_too_much_prompt_lookup_alone_drafts_until_it_loses_too() -> None:
    policy = goodput(token=0.0)
    simulate(policy, 2, 100, sure=0.9)
    assert policy.costs is not None
    ledger, sure = policy.costs.ledger, [n / (n + 1) for n in range(16, 31)]
    for own, uses_lookup in ((ledger, True), (policy.costs.lookup_ledger, False)):
        while not own.is_spent:
            own.note(1.0, 2.0, 2.0, 1.0)
        for _ in range(50):
            specs = policy.decide(views([7] * 2, found=[sure, []], max_nodes=0), 2)
            assert [spec.size > 0 for spec in specs] == [uses_lookup, False]
            assert not any(spec.positions for spec in specs)
    while ledger.is_spent or policy.costs.lookup_ledger.is_spent:
        ledger.note_plain(1.0, 1.0)
        policy.costs.lookup_ledger.note_plain(1.0, 1.0)
    assert all(spec.size > 0 for spec in policy.decide(views([7] * 2, found=[sure, []], max_nodes=0), 2))
