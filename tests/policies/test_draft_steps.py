"""The passes of a draft are chosen by what they gain and what passes cost, and what is not chosen is tried now and then."""

from collections import Counter

import pytest

from volley.policies.cost import PassCost
from volley.policies.draft_steps import DraftSteps, candidates

LENGTH = 8
TOKENS = {1: 2.0, 2: 4.0, 4: 5.0}


def flat(seconds: float = 1.0, token: float = 0.0) -> PassCost:
    return PassCost(lambda tokens, requests: seconds + token * tokens)


def play(chooser: DraftSteps, gains: dict[int, float], cycles: int, requests: int = 1) -> Counter[int]:
    """How often each number was chosen, where a draft of ``steps`` passes brings ``gains[steps]`` tokens and nothing rides."""
    chosen = Counter[int]()
    for _ in range(cycles):
        steps = chooser.choose(LENGTH, requests, is_greedy=True)
        chosen[steps] += 1
        if steps:
            chooser.observe(LENGTH, steps, is_greedy=True, tokens=int(gains[steps]), alone=steps, verified=LENGTH)
    return chosen


def test_numbers_are_powers_of_two_up_to_the_masks() -> None:
    assert [candidates(length) for length in (1, 2, 3, 8, 9)] == [[], [1], [1, 2], [1, 2, 4], [1, 2, 4, 8]]
    assert DraftSteps(flat()).choose(1, 1, is_greedy=True) == 0


@pytest.mark.parametrize(
    ("gains", "token", "best"),
    [
        ({1: 4, 2: 5, 4: 6}, 0.0, 1),  # 4/2, 5/3, 6/5
        ({1: 3, 2: 6, 4: 8}, 0.0, 2),  # 3/2, 6/3, 8/5
        ({1: 2, 2: 3, 4: 8}, 0.0, 4),  # 2/2, 3/3, 8/5
        ({1: 2, 2: 3, 4: 5}, 0.0, 0),  # no more than a token a pass
        ({1: 4, 2: 5, 4: 6}, 0.3, 0),  # a pass over 8 tokens takes 2.6 times as long
    ],
)
def test_the_number_with_the_most_tokens_per_second_is_chosen(gains: dict[int, float], token: float, best: int) -> None:
    chosen = play(DraftSteps(flat(token=token)), gains, 12_000)
    assert chosen[best] > 10_500
    assert all(chosen[steps] >= 3 for steps in gains), "the others are tried again"


def test_a_choice_follows_what_drafts_gain() -> None:
    chooser = DraftSteps(flat())
    assert play(chooser, {1: 4, 2: 4, 4: 4}, 300)[1] > 250
    assert play(chooser, {1: 1, 2: 6, 4: 7}, 1500)[2] > 900


def test_what_is_far_from_the_best_is_tried_less_often() -> None:
    chosen = play(DraftSteps(flat()), {1: 4, 2: 5, 4: 1}, 2000)
    assert chosen[2] > 2 * chosen[4] > 6


def test_many_requests_weigh_the_rows_of_all() -> None:
    """Rows are nearly free for one request, and not for sixteen."""
    costs = PassCost(lambda tokens, _: 1.0 if tokens <= 16 else tokens / 16)
    gains = {1: 4.0, 2: 4.0, 4: 4.0}
    assert play(DraftSteps(costs), gains, 400)[1] > 300
    assert play(DraftSteps(costs), gains, 400, requests=16)[0] > 300


def test_no_draft_costs_what_a_pass_without_one_goes_over() -> None:
    """Eight tokens are free: of five requests a token each, but not two."""
    costs = PassCost(lambda tokens, _: max(1.0, tokens / 8))
    gains = {1: 8.0, 2: 8.0, 4: 8.0}  # of two passes over 40 tokens, which take ten times as long as one over 5
    assert play(DraftSteps(costs), gains, 400, requests=5)[0] > 300
    assert play(DraftSteps(costs, plain=2), gains, 400, requests=5)[1] > 300


def test_lengths_and_temperatures_are_kept_apart() -> None:
    chooser = DraftSteps(flat())
    play(chooser, {1: 6, 2: 6, 4: 6}, 100)
    assert chooser.choose(LENGTH, 1, is_greedy=True) == 1
    for _ in range(4):
        assert chooser.choose(LENGTH, 1, is_greedy=False) == 1, "nothing is known of these"
        chooser.observe(LENGTH, 1, is_greedy=False, tokens=1, alone=1, verified=LENGTH)
    assert chooser.choose(LENGTH, 1, is_greedy=False) == 0
    chooser.observe(LENGTH, 3, is_greedy=False, tokens=8, alone=0, verified=1)  # a number that nobody chose
    assert chooser.choose(LENGTH, 1, is_greedy=True) == 1


@pytest.mark.parametrize(("tokens", "tried"), [(1, []), (4, [2] * 4)])
def test_more_passes_are_tried_at_once_only_where_they_are_likely_to_pay(tokens: int, tried: list[int]) -> None:
    """1.6 times the tokens for twice the passes is what is hoped for."""
    chooser = DraftSteps(flat())
    chosen = []
    for _ in range(12):
        steps = chooser.choose(LENGTH, 1, is_greedy=True)
        chosen.append(steps)
        chooser.observe(LENGTH, steps, is_greedy=True, tokens=tokens, alone=steps, verified=LENGTH)
    assert chosen[:4] == [1] * 4
    assert [steps for steps in chosen if steps > 1] == tried


@pytest.mark.parametrize("is_greedy", [True, False])
def test_a_canvas_rides_behind_drafts_that_are_likely_to_be_right(*, is_greedy: bool) -> None:
    """Sure drafts are right and others are not: it is learnt, apart for greedy and sampled ones. A row takes 0.05 of a pass."""
    chooser, sure, vague = DraftSteps(flat(token=0.05)), [0.99] * 7, [0.2] * 7

    def rides(confidence: list[float]) -> bool:
        return chooser.should_fuse(confidence, LENGTH, LENGTH, 1, is_greedy=is_greedy)

    for _ in range(60):
        chooser.note_right(sure, 7, is_greedy=is_greedy)
        chooser.note_right(vague, 1, is_greedy=is_greedy)
    assert rides(sure)
    assert not rides(vague)
    for _ in range(120):
        chooser.note_right(vague, 7, is_greedy=is_greedy)
    assert rides(vague)


def test_a_canvas_rides_where_its_rows_cost_less_than_it_may_save() -> None:
    """Behind drafts of which half are right, a canvas that takes a third of a pass pays, and one that takes 0.9 does not."""
    for token, expected in ((0.05, True), (1.0, False)):
        chooser = DraftSteps(flat(token=token))
        for cycle in range(200):
            chooser.note_right([0.7] * 7, 7 if cycle % 2 else 3, is_greedy=True)
        assert chooser.should_fuse([0.7] * 7, LENGTH, LENGTH, 1, is_greedy=True) == expected
    free = DraftSteps(PassCost(lambda tokens, _: max(1.0, tokens / 16)))
    for requests, expected in ((1, True), (16, False)):
        for cycle in range(200):
            free.note_right([0.7] * 7, 7 if cycle % 2 else 3, is_greedy=True)
        assert free.should_fuse([0.7] * 7, LENGTH, LENGTH, requests, is_greedy=True) == expected
