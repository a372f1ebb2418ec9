"""A policy is offered views and may ask for drafts; its defaults decide the rest."""

from collections.abc import Sequence

import pytest

from tests.made_up import costs
from volley.decode.work import DraftSpec, Rule, Shape
from volley.errors import ConfigError
from volley.policies.base import Cycle, Policy, View


class Plain(Policy):
    def decide(self, views: Sequence[View], under_way: int) -> list[DraftSpec]:
        return [view.draft(0) for view in views]


def test_a_chain_stays_within_its_limit() -> None:
    view = View(0, Rule.REJECTION, 7, 3)
    assert view.draft(9) == DraftSpec(Shape.CHAIN, Rule.REJECTION, 3, 3)
    assert view.draft(2, threshold=0.3) == DraftSpec(Shape.CHAIN, Rule.REJECTION, 2, 2, 0.3)
    assert view.draft(0) == DraftSpec(Shape.CHAIN, Rule.REJECTION)


def test_a_tree_is_matched_and_may_be_deeper_than_a_chain() -> None:
    view = View(0, Rule.REJECTION, 7, 3)
    assert view.draft(9, 12) == DraftSpec(Shape.TREE, Rule.COUPLED, 12, 7)
    assert View(0, Rule.GREEDY, 7, 7).draft(9, 12) == DraftSpec(Shape.TREE, Rule.GREEDY, 12, 7)
    assert View(0, Rule.GREEDY, 0, 0).draft(9, 12) == DraftSpec(Shape.CHAIN, Rule.GREEDY), (
        "there is nothing left to draft"
    )
    assert View(0, Rule.GREEDY, 7, 7).draft(0, 12) == DraftSpec(Shape.CHAIN, Rule.GREEDY)


@pytest.mark.parametrize("wish", [0, 4, 12])
def test_a_setting_decides_about_trees_before_the_policy_does(wish: int) -> None:
    assert View(0, Rule.GREEDY, 7, 7, max_nodes=5).draft(3, wish) == DraftSpec(Shape.TREE, Rule.GREEDY, 5, 3)
    assert View(0, Rule.GREEDY, 7, 7, max_nodes=0).draft(3, wish).shape is Shape.CHAIN


def test_a_copy_is_no_longer_than_what_was_found() -> None:
    view = View(0, Rule.COUPLED, 7, 7, lookup_confidence=[0.75, 0.8])
    assert view.lookup(9) == DraftSpec(Shape.LOOKUP, Rule.COUPLED, 2)
    assert view.lookup(1) == DraftSpec(Shape.LOOKUP, Rule.COUPLED, 1)


def test_a_policy_verifies_whole_drafts_unless_it_says_otherwise() -> None:
    policy = Plain()
    specs = [DraftSpec(Shape.CHAIN, Rule.GREEDY, 3, 3), DraftSpec(Shape.TREE, Rule.GREEDY, 9, 3)]
    assert policy.trim([Cycle(i, spec, []) for i, spec in enumerate(specs)]) == [3, 9]


def test_a_policy_serves_one_engine_only() -> None:
    policy, own = Plain(), costs()
    policy.attach(6, own)
    assert policy.block_size == 6
    policy.attach(6, own)
    with pytest.raises(ConfigError, match="give each engine its own"):
        policy.attach(6, costs())


@pytest.mark.parametrize(("wish", "largest", "message"), [(4, 1, "with a drafter"), (7, 6, "beyond the 6")])
def test_a_block_that_cannot_be_drafted_is_refused(wish: int, largest: int, message: str) -> None:
    policy = Plain()
    policy.block_size = wish
    with pytest.raises(ConfigError, match=message):
        policy.attach(largest, costs())
