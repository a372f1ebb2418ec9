"""The description of a batch for a kernel of pages; ``kernels/test_attention.py`` tests attention by it."""

import torch

from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_cache import BlockTable
from volley.memory.tiles import CAUSAL, PART, TREE, Tiling, most_parts, segment_arrays, tile_array, tiled_batch


def test_pages_and_masks_lie_end_to_end() -> None:
    chain, tree = Segment(BlockTable(4, [5, 2]), 3, 4), Segment(BlockTable(4, [7]), 1, 3, parents=(0, 0))
    segments, cells = segment_arrays(RaggedBatch([chain, tree], torch.zeros(7, dtype=torch.long)))
    assert segments.tolist() == [[0, 3, 4, CAUSAL, 0, 2, 2], [4, 1, 3, TREE, 2, 1, 3]]
    assert cells.tolist() == [5, 2, 7, 1, 0, 0, 1, 1, 0, 1, 0, 1]


def test_tiles_know_the_keys_that_are_seen() -> None:
    segments = [Segment(BlockTable(4, [0, 1, 2]), 5, 5), Segment(BlockTable(4, [3]), 0, 2, causal=False)]
    assert tile_array(segments, Tiling(None, False, 2, 1)).tolist() == [
        [0, 0, 0, 7],
        [0, 2, 0, 9],
        [0, 4, 0, 10],
        [1, 0, 0, 2],
    ]
    assert tile_array(segments, Tiling(3, False, 4, 1)).tolist() == [[0, 0, 3, 9], [0, 4, 7, 10], [1, 0, 0, 2]]


def test_a_batch_is_tiled_once() -> None:
    segment = Segment(BlockTable(PART, [0, 1]), PART - 1, 2)
    batch = RaggedBatch([segment], torch.zeros(2, dtype=torch.long))
    tiling = Tiling(None, False, 1, 1)
    assert tiled_batch(batch, tiling) is tiled_batch(batch, tiling)
    assert tiled_batch(batch, tiling).num_parts == most_parts(tile_array([segment], tiling)) == 2
