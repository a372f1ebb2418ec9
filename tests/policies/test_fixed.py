"""The simple policies alone, without an engine."""

import pytest

from tests.policies.views import views
from volley.errors import ConfigError
from volley.policies.base import Cycle, Policy
from volley.policies.cost import Costs
from volley.policies.fixed import Feedback, Fixed


def costs() -> Costs:
    return Costs(lambda tokens, requests: 0.1, lambda tokens, requests: 1 + 0.1 * tokens)


def positions(policy: Policy, *limits: int) -> list[int]:
    return [spec.positions for spec in policy.decide(views(limits), len(limits))]


def test_fixed_keeps_to_the_limits() -> None:
    policy = Fixed(4)
    policy.attach(8, costs())
    assert positions(policy, 7, 2, 0) == [3, 2, 0]
    own = Fixed()
    own.attach(8, costs())
    assert positions(own, 7) == [7]
    plain = Fixed(1)
    plain.attach(8, costs())
    assert positions(plain, 7) == [0]


def judged(policy: Feedback, accepted: int) -> int:
    (spec,) = policy.decide(views([7]), 1)
    policy.observe([Cycle(0, spec, [], verified=spec.size, accepted=min(accepted, spec.size))])
    return positions(policy, 7)[0]


def test_feedback_shrinks_below_60_percent_and_grows_above_90() -> None:
    policy = Feedback()
    policy.attach(8, costs())
    assert positions(policy, 7) == [7]
    assert [judged(policy, 0) for _ in range(8)] == [6, 5, 4, 3, 2, 1, 1, 1], "down to the smallest block, 2"
    assert [judged(policy, 7) for _ in range(8)] == [2, 3, 4, 5, 6, 7, 7, 7]
    assert judged(policy, 5) == 7, "71 % is left alone"
    policy.end(0)
    assert not policy.positions


def test_feedback_within_bounds() -> None:
    policy = Feedback(3, 5)
    policy.attach(8, costs())
    assert positions(policy, 7) == [4]
    assert [judged(policy, 0) for _ in range(3)] == [3, 2, 2]
    assert positions(policy, 1) == [1]


@pytest.mark.parametrize("options", [{"smallest": 1}, {"smallest": 5, "largest": 4}])
def test_feedback_refuses_impossible_bounds(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="give"):
        Feedback(**options)


@pytest.mark.parametrize(("policy", "largest"), [(Fixed(9), 8), (Feedback(2, 9), 8), (Fixed(2), 1), (Fixed(-1), 8)])
def test_a_block_beyond_the_drafters_is_refused(policy: Policy, largest: int) -> None:
    with pytest.raises(ConfigError, match=r"drafts at most|cannot be used"):
        policy.attach(largest, costs())


def test_a_drafter_keeps_up_with_nothing_where_nothing_is_ever_drafted() -> None:
    assert [Fixed(size).draft_kv_every({False, True}, 3) for size in (1, 2)] == [0, 1]
    assert Feedback().draft_kv_every({False}, 3) == 1
