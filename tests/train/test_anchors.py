"""Anchors lie in the response, blocks predict what follows them, nothing predicts padding."""

import torch

from volley.train.anchors import build_blocks, draw_anchors


def test_random_anchors_are_distinct_positions_of_the_response_and_change_with_the_seed() -> None:
    first = draw_anchors(10, 60, 12, 8, "random", "0/0/3")
    assert len(set(first)) == 12
    assert first == sorted(first)
    assert all(10 <= anchor < 59 for anchor in first)
    assert first == draw_anchors(10, 60, 12, 8, "random", "0/0/3")
    assert first != draw_anchors(10, 60, 12, 8, "random", "0/1/3")


def test_a_short_response_gives_every_anchor_it_has() -> None:
    assert draw_anchors(4, 8, 99, 8, "random", "") == [4, 5, 6]


def test_fixed_anchors_divide_the_response() -> None:
    assert draw_anchors(3, 30, 99, 8, "fixed", "") == [3, 11, 19, 27]
    assert set(draw_anchors(3, 30, 2, 8, "fixed", "x")) < {3, 11, 19, 27}


def test_blocks_hold_anchor_and_masks_and_predict_the_tokens_after() -> None:
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 0, 0]])
    blocks = build_blocks(tokens, [6, 4], [[1, 3], [2]], 4, 99)
    assert blocks.token_ids[0].tolist() == [[11, 99, 99, 99], [13, 99, 99, 99]]
    assert blocks.positions[0].tolist() == [[1, 2, 3, 4], [3, 4, 5, 6]]
    assert blocks.labels[0, 0].tolist() == [12, 13, 14]
    assert blocks.valid[0].tolist() == [[True, True, True], [True, True, False]]
    assert blocks.token_ids[1, 0].tolist() == [22, 99, 99, 99]
    assert blocks.valid[1].tolist() == [[True, False, False], [False, False, False]]
    assert blocks.labels[1, 0, 0] == 23
