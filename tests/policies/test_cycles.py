"""A policy sees drafts, some are cut, and it is told what became of them."""

from collections.abc import Sequence

import pytest
import torch

from tests.made_up import decoding, lattice_of
from volley.decode.lookup import match_confidence
from volley.decode.tree import expand
from volley.decode.work import DraftSpec, Proposal, Rule, Shape, Verdict, Work
from volley.policies.base import Cycle, Policy, View
from volley.policies.cycles import conclude, trim
from volley.procedures.request import Request

TREE = expand(lattice_of(torch.randn(3, 9, generator=torch.Generator().manual_seed(0))), 8)


class To(Policy):
    """Verifies so many tokens of each draft."""

    def __init__(self, *sizes: int) -> None:
        self.sizes, self.calls = list(sizes), 0

    def decide(self, views: Sequence[View], under_way: int) -> list[DraftSpec]:
        raise AssertionError("nothing is decided here")

    def trim(self, cycles: Sequence[Cycle]) -> list[int]:
        self.calls += 1
        return self.sizes


def work(shape: Shape, proposal: Proposal, positions: int, found: Sequence[int] = (), agreed: int = 0) -> Work[Request]:
    spec = DraftSpec(shape, Rule.GREEDY, len(proposal.token_ids), positions)
    return Work(
        decoding([1, 2, 3]),
        spec,
        lookup_tokens=list(found),
        lookup_confidence=match_confidence(agreed, len(found)),
        proposal=proposal,
    )


def test_chains_are_cut_from_the_end_and_keep_their_distributions() -> None:
    probs = torch.rand(4, 9)
    one = work(Shape.CHAIN, Proposal([5, 6, 7, 8], probs, confidence=[0.9, 0.8, 0.7, 0.6]), 4)
    (cycle,) = trim(To(2), [one])
    assert one.proposal.token_ids == [5, 6]
    assert one.proposal.draft_probs is not None
    assert torch.equal(one.proposal.draft_probs, probs[:2])
    assert cycle.confidence == [0.9, 0.8, 0.7, 0.6]


def test_trees_keep_their_likeliest_nodes() -> None:
    one = work(Shape.TREE, TREE, 3)
    (cycle,) = trim(To(3), [one])
    assert cycle.confidence == sorted(TREE.confidence, reverse=True)
    assert sorted(one.proposal.confidence, reverse=True) == cycle.confidence[:3]


def test_copies_and_plain_decoding_are_not_the_policys_to_cut() -> None:
    copy, plain = work(Shape.LOOKUP, Proposal([4, 5]), 0, [4, 5, 6], agreed=3), work(Shape.CHAIN, Proposal([]), 0)
    policy = To(0, 0)
    cycles = trim(policy, [copy, plain])
    assert policy.calls == 0, "nothing was drafted"
    assert copy.proposal.token_ids == [4, 5]
    assert cycles[0].lookup_confidence == [3 / 4, 4 / 5, 5 / 6]
    assert cycles[1].lookup_confidence == []
    trim(To(0, 0, 0), [copy, plain, work(Shape.CHAIN, Proposal([1]), 1)])
    assert copy.proposal.token_ids == [4, 5]


def test_fewer_than_no_tokens_are_not_verified() -> None:
    with pytest.raises(AssertionError, match="no fewer than no tokens"):
        trim(To(-1), [work(Shape.CHAIN, Proposal([5]), 1)])


def test_of_a_chain_the_first_tokens_were_right() -> None:
    one = work(Shape.CHAIN, Proposal([5, 6, 7]), 3)
    (cycle,) = trim(To(3), [one])
    one.verdict = Verdict(2, [5, 6, 9])
    conclude(one, cycle)
    assert (cycle.verified, cycle.accepted, cycle.right) == (3, 2, [True, True, False])


def test_of_a_tree_the_nodes_on_the_path_were_right_in_the_order_of_their_confidences() -> None:
    one = work(Shape.TREE, TREE, 3)
    (cycle,) = trim(To(8), [one])
    assert TREE.parents is not None
    second = TREE.parents.index(1) + 1
    one.verdict = Verdict(2, [0, 0, 0], (1, second))
    conclude(one, cycle)
    on_path = {TREE.confidence[0], TREE.confidence[second - 1]}
    assert {sure for sure, right in zip(cycle.confidence, cycle.right, strict=True) if right} == on_path
    assert (cycle.verified, cycle.accepted) == (8, 2)


def test_what_was_found_is_judged_whether_it_was_used_or_not() -> None:
    one = work(Shape.CHAIN, Proposal([5, 6]), 2, found=[5, 8, 9, 9], agreed=4)
    (cycle,) = trim(To(2), [one])
    one.verdict = Verdict(1, [5, 7])
    conclude(one, cycle)
    assert cycle.lookup_right == [True, False]
