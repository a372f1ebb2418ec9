"""Drafts that the host reads with the target's choices; in engines they are in ``engine/test_late.py``."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.made_up import decoding
from volley.decode.late import late_proposals, read_choices
from volley.decode.work import Ask, Rule, Shape, Work

CHAIN = Ask(Shape.CHAIN, Rule.GREEDY, 3, 3)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=5), st.integers(0, 3), st.booleans())
def test_one_copy_brings_choices_and_drafts(sizes: list[tuple[int, bool]], own: int, with_confidence: bool) -> None:
    """Of works some drafts are late and some were read before."""
    works = [Work(decoding([1, 2]), replace(CHAIN, size=size, positions=size)) for size, _ in sizes]
    late = [work for work, (_, is_late) in zip(works, sizes, strict=True) if is_late]
    total = sum(work.ask.positions for work in late)
    tokens, sure = torch.arange(100, 100 + total), torch.linspace(0.1, 0.9, total, dtype=torch.float64)
    late_proposals(late, tokens, sure if with_confidence else None)
    logits = torch.eye(5)[:own]
    assert read_choices(logits, works) == list(range(own))
    assert [token for work in late for token in work.proposal.token_ids] == tokens.tolist()
    found = [value for work in late for value in work.proposal.confidence]
    assert found == (sure.tolist() if with_confidence else [])
    assert all(work.proposal.late is None for work in works)
    assert all(not work.proposal.token_ids for work in works if work not in late)
