"""Copies of what was found in the text."""

from tests.made_up import decoding
from volley.decode.work import Ask, Rule, Shape, Work
from volley.engine.step import Step, propose


def test_as_much_is_copied_as_was_asked_for() -> None:
    asks = [Ask(Shape.COPY, Rule.MATCH, size) for size in (0, 2, 9)]
    works = [Work(decoding([1, 2]), ask, found=[4, 5, 6]) for ask in asks]
    propose(Step(works), None)
    assert [work.proposal.token_ids for work in works] == [[], [4, 5], [4, 5, 6]]
    assert all(work.proposal.draft_probs is None and work.proposal.parents is None for work in works)
    assert works[0].found == [4, 5, 6], "what was found is judged even where it was not used"
