"""What goodput decides where costs and chances are known."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from volley.decode.block_size import Cycle, Decoding
from volley.decode.cost import Costs, FloatArray
from volley.decode.goodput import Goodput


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
    requests = Decoding(list(range(count)), [7] * count, sampled, [False] * count)
    sizes: list[tuple[list[int], list[int]]] = []
    for _ in range(cycles):
        drafted = policy.draft(requests)
        confidence = [chances(request, size).tolist() for request, size in enumerate(drafted)]
        verified = policy.verify(requests, drafted, confidence) if any(drafted) else drafted
        accepted = [
            int(np.cumprod(random.random(size) < np.array(row[:size])).sum())
            for row, size in zip(confidence, verified, strict=True)
        ]
        right = [[slot < kept for slot in range(size)] for size, kept in zip(verified, accepted, strict=True)]
        policy.observe(Cycle(requests, drafted, verified, accepted, right))
        sizes.append((drafted, verified))
    drafted_all, verified_all = np.array(sizes).transpose(1, 0, 2)
    return drafted_all, verified_all


def goodput(token: float, draft: float = 0.1, padding: float = 0.0) -> Goodput:
    policy = Goodput()
    costs = Costs(lambda tokens, requests: draft, lambda tokens, requests: 1 + token * tokens, lambda: (0.0, padding))
    policy.attach(8, costs)
    return policy


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
    for draft, least, most in ((0.24, 0.85, 0.98), (1.1, 0.01, 0.05)):
        policy = goodput(token=0.05, draft=draft)
        drafted, _ = played(policy, [False] * 4, 500, np.random.default_rng(0), lambda _, size: np.full(size, 0.5))
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
    nodes = policy.tree_nodes(count, speculative=False)
    requests = Decoding(list(range(count)), [7] * count, [False] * count, [True] * count, nodes)
    verified: list[int] = []
    for _ in range(cycles if nodes else 0):
        drafted = policy.draft(requests)
        confidence = [probabilities if size else [] for size in drafted]
        verified = policy.verify(requests, drafted, confidence)
        right = [(random.random(size) < np.array(probabilities[:size])).tolist() for size in verified]
        policy.observe(Cycle(requests, drafted, verified, [sum(marks) for marks in right], right))
    return [nodes], verified


def test_trees_are_grown_where_they_are_nearly_free_and_pruned_where_they_are_not() -> None:
    assert tree_simulation(token=0.5, count=8) == ([0], [])
    assert tree_simulation(token=0.0, count=8) == ([15], [15] * 8)
    nodes, verified = tree_simulation(token=0.03, count=1)
    assert nodes == [15]
    assert 2 <= verified[0] <= 12
    assert goodput(token=0.0).tree_nodes(1, speculative=True) == 0, "chains get as far there"


def test_a_probe_is_for_a_few_requests_in_turn() -> None:
    policy = goodput(token=0.5, draft=3.0)
    requests = Decoding(list(range(16)), [7] * 16, [False] * 16, [False] * 16)
    chosen = [{i for i, size in enumerate(policy.draft(requests)) if size} for _ in range(4)]
    assert all(len(some) == 4 for some in chosen)
    assert set().union(*chosen) == set(range(16))


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


def test_blocks_are_not_cut_where_padding_costs_as_much_as_tokens() -> None:
    policy = goodput(token=0.05, padding=0.05)
    drafted, verified = simulate(policy, 4, 200, sure=0.8)
    assert drafted[100:] == verified[100:]
    cut = goodput(token=0.05)
    drafted, verified = simulate(cut, 4, 200, sure=0.8)
    assert sum(verified[100:]) < sum(drafted[100:])


def copies(policy: Goodput, cycles: int, agreed: int, right: float, *, drafts: float = 0.6) -> list[int]:
    """Two greedy requests: how many tokens of the first one's text were to be verified in each cycle, where 15 are always found
    after ``agreed`` that agree, each ``right`` as often; the second finds nothing."""
    random = np.random.default_rng(0)
    most = policy.block_size - 1
    requests = Decoding([0, 1], [most] * 2, [False] * 2, [False] * 2)
    sure = [n / (n + 1) for n in range(agreed, agreed + 15)]
    counts = []
    for _ in range(cycles):
        drafted = policy.draft(requests)
        taken, none = policy.look_up(requests, drafted, [sure, []])
        assert none == 0
        drafted = [0 if taken else drafted[0], drafted[1]]
        confidence = [[drafts] * size for size in drafted]
        verified = policy.verify(requests, drafted, confidence) if any(drafted) else drafted
        accepted = [int(np.cumprod(random.random(size) < drafts).sum()) for size in verified]
        true = int(np.cumprod(random.random(15) < right).sum())
        found = [[True] * true + [False] * (true < 15), []]
        marks = [[slot < kept for slot in range(size)] for size, kept in zip(verified, accepted, strict=True)]
        policy.observe(Cycle(requests, drafted, [taken or verified[0], verified[1]], accepted, marks, found))
        counts.append(taken)
    return counts


def test_what_is_found_takes_the_place_of_a_draft_where_it_promises_more() -> None:
    assert np.mean(copies(goodput(0.01), 100, agreed=16, right=0.97)[20:]) > 12
    assert np.mean(copies(goodput(0.01), 100, agreed=3, right=0.5, drafts=0.9)[20:]) < 0.5, "drafts are better"
    dear = copies(goodput(0.3), 100, agreed=16, right=0.97)[20:]
    assert 1 < np.mean(dear) < 6, "few where each token costs a third of a pass"


def test_texts_that_turn_out_otherwise_are_no_longer_copied() -> None:
    policy = goodput(0.01)
    counts = copies(policy, 400, agreed=12, right=0.2)
    assert np.mean(counts[10:30]) > 2
    assert np.mean(counts[-50:]) < 0.5
    assert np.mean(copies(policy, 400, agreed=12, right=0.95)[-50:]) > 8, "learnt though none of it was verified"


def test_copies_are_weighed_without_a_drafter() -> None:
    policy = Goodput()
    costs = Costs(lambda *_: pytest.fail("there is none"), lambda tokens, requests: 1 + 0.02 * tokens)
    policy.attach(1, costs)
    policy.rehearse()
    assert np.mean(copies(policy, 100, agreed=8, right=0.9)[20:]) > 5


@pytest.mark.parametrize("count", [3, 8, 16, 31, 32, 64])
def test_everyone_is_learnt_from_sooner_or_later(count: int) -> None:
    policy = goodput(token=1e-6)
    simulate(policy, count, cycles=80, sure=0.9)
    taught: set[int] = set()
    observe = policy.acceptance.observe

    def spy(request_id: int, kind: int, confidence: list[float], right: list[bool]) -> None:
        taught.add(request_id)
        observe(request_id, kind, confidence, right)

    policy.acceptance.observe = spy  # type: ignore[method-assign]
    simulate(policy, count, cycles=60, sure=0.9)
    assert taught == set(range(count))
