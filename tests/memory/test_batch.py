"""Segments laid end to end: rows, positions and the depths of trees."""

import pytest
import torch

from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_cache import BlockTable

TABLE = BlockTable(4, [0, 1, 2])


def test_each_segment_has_its_rows_and_positions() -> None:
    batch = RaggedBatch([Segment(TABLE, 3, 4), Segment(TABLE, 0, 2, causal=False)], torch.arange(6))
    assert len(batch) == 6
    assert batch.offsets == [0, 4, 6]
    assert batch.positions.tolist() == [3, 4, 5, 6, 0, 1]


def test_nodes_of_a_tree_stand_at_their_depths() -> None:
    segment = Segment(TABLE, 5, 6, parents=(0, 0, 1, 3, 2))
    assert segment.positions().tolist() == [5, 6, 6, 7, 8, 7]
    assert segment.end == 11, "though each has a place of its own"


def test_the_canvas_behind_a_tree_sees_all_of_itself() -> None:
    segment = Segment(TABLE, 5, 6, parents=(0, 0, 1, 3, 4), canvas=3)
    assert segment.positions().tolist() == [5, 6, 6, 7, 8, 9]
    assert segment.origins().tolist() == [5, 6, 6, 7, 7, 7]
    assert segment.ancestors()[:, 3:].tolist() == [[False] * 3] * 3 + [[True] * 3] * 3
    assert segment.ancestors()[3:, :3].tolist() == [[True, True, False]] * 3


def test_a_tree_has_a_parent_for_each_node() -> None:
    with pytest.raises(AssertionError, match="a parent for every token but the first"):
        Segment(TABLE, 0, 3, parents=(0,)).positions()


def test_the_tokens_are_exactly_the_segments() -> None:
    with pytest.raises(AssertionError, match="exactly the segments' tokens"):
        RaggedBatch([Segment(TABLE, 0, 3)], torch.arange(4))


def test_plans_pass_to_a_batch_that_lies_in_the_same_places() -> None:
    def batch(start: int = 3, pages: tuple[int, ...] = (0, 1, 2), groups: tuple[int, ...] = (1, 3)) -> RaggedBatch:
        return RaggedBatch([Segment(BlockTable(4, pages), start, 4, groups=groups)], torch.arange(4))

    first = batch()
    first.plans["what attention worked out"] = 1
    for other, is_alike in ((batch(), True), (batch(start=4), False), (batch(pages=(0, 2, 1)), False)):
        other.follow(first)
        assert (other.plans is first.plans) == is_alike
    table = BlockTable(4, [0, 1, 2])
    before, after = (RaggedBatch([Segment(table, 3, 4, groups=(1, 3))], torch.arange(4)) for _ in range(2))
    before.follow(None)
    table.pages[1] = 5
    after.follow(before)
    assert after.plans is not before.plans, "the table has changed since"
    canvases = [
        RaggedBatch([Segment(table, 3, 3, parents=(0, 1), canvas=canvas)], torch.arange(3)) for canvas in (0, 2)
    ]
    canvases[0].plans["what attention worked out"] = 1
    canvases[1].follow(canvases[0])
    assert canvases[1].plans == {}, "a canvas sees what a chain does not"
    regrouped = batch(groups=(4,))
    regrouped.follow(first)
    assert regrouped.plans == {}, "its tokens see others"
