"""An ask may be cut; a work knows how many tokens it takes and keeps."""

import pytest

from volley.decode.work import NO_DRAFT, DraftSpec, Rule, Shape, Verdict, Work


@pytest.mark.parametrize(("size", "left"), [(-3, 0), (0, 0), (2, 2), (5, 5), (9, 5)])
def test_a_chain_that_is_cut_drafts_no_more_than_it_verifies(size: int, left: int) -> None:
    assert DraftSpec(Shape.CHAIN, Rule.COUPLED, 5, 5, 0.2).cut(size) == DraftSpec(
        Shape.CHAIN, Rule.COUPLED, left, left, 0.2
    )


def test_a_tree_that_is_cut_keeps_its_levels_and_a_copy_has_none() -> None:
    assert DraftSpec(Shape.TREE, Rule.GREEDY, 12, 5).cut(7) == DraftSpec(Shape.TREE, Rule.GREEDY, 7, 5)
    assert DraftSpec(Shape.LOOKUP, Rule.GREEDY, 12).cut(7) == DraftSpec(Shape.LOOKUP, Rule.GREEDY, 7)


def test_a_work_counts_known_tokens_and_the_draft() -> None:
    work = Work(None, DraftSpec(Shape.TREE, Rule.GREEDY, 12, 5), num_known=3)  # type: ignore[type-var]
    assert work.num_tokens == 15
    work.verdict = Verdict(2, [7, 8, 9], (1, 4))
    assert work.num_kept == 5
    assert Work(None, NO_DRAFT).num_tokens == 1  # type: ignore[type-var]


def test_a_work_keeps_the_first_rows_of_a_chain_and_a_path_of_a_tree() -> None:
    work = Work(None, NO_DRAFT, num_known=3)  # type: ignore[type-var]
    work.verdict = Verdict(2, [7, 8, 9])
    assert list(work.kept_rows) == [0, 1, 2, 3, 4]
    work = Work(None, DraftSpec(Shape.TREE, Rule.GREEDY, 12, 5))  # type: ignore[type-var]
    work.verdict = Verdict(2, [7, 8, 9], (1, 4))
    assert list(work.kept_rows) == [0, 1, 4]
    work.verdict = Verdict(0, [7], ())
    assert list(work.kept_rows) == [0], "the anchor stays where no node was right"


def test_works_share_nothing() -> None:
    one, other = Work(None, NO_DRAFT), Work(None, NO_DRAFT)  # type: ignore[type-var]
    one.lookup_tokens.append(1)
    one.proposal.token_ids.append(1)
    one.verdict.token_ids.append(1)
    assert other == Work(None, NO_DRAFT)  # type: ignore[type-var]
