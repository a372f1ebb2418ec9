"""Anchors lie in the response, blocks predict what follows them, nothing predicts padding."""

import torch

from volley.train.anchors import build_blocks, draw_anchors, draw_reveals


def test_random_anchors_are_distinct_positions_of_the_response_and_change_with_the_seed() -> None:
    first = draw_anchors(10, 60, 12, "0/0/3")
    assert len(set(first)) == 12
    assert first == sorted(first)
    assert all(10 <= anchor < 59 for anchor in first)
    assert first == draw_anchors(10, 60, 12, "0/0/3")
    assert first != draw_anchors(10, 60, 12, "0/1/3")


def test_a_short_response_gives_every_anchor_it_has() -> None:
    assert draw_anchors(4, 8, 99, "") == [4, 5, 6]


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


def test_revealed_slots_hold_true_tokens_and_predict_nothing() -> None:
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 0, 0]])
    reveals = [torch.tensor([[False, True, False], [False] * 3]), torch.tensor([[False, True, True]])]
    blocks = build_blocks(tokens, [6, 4], [[1, 3], [2]], 4, 99, reveals)
    assert blocks.token_ids[0].tolist() == [[11, 99, 13, 99], [13, 99, 99, 99]]
    assert blocks.valid[0].tolist() == [[True, False, True], [True, True, False]]
    assert blocks.revealed[0].tolist() == [[False, True, False], [False] * 3]
    assert blocks.token_ids[1, 0].tolist() == [22, 99, 99, 99], "behind the response nothing is revealed"
    assert not blocks.revealed[1].any()


def test_every_number_of_slots_is_revealed_in_a_share_of_the_blocks() -> None:
    reveals = draw_reveals(4000, 6, 0.5, "0/0/3")
    assert torch.equal(reveals, draw_reveals(4000, 6, 0.5, "0/0/3"))
    assert not torch.equal(reveals, draw_reveals(4000, 6, 0.5, "0/1/3"))
    numbers = reveals.sum(-1).bincount(minlength=6).tolist()
    assert numbers[5] == 0, "a slot is always left to predict"
    assert 1900 < numbers[0] < 2100
    assert all(400 < number < 600 for number in numbers[1:5])
    places = reveals.sum(0)
    assert places.min() > 0.85 * places.max()
    assert draw_reveals(9, 2, 1.0, "").sum() <= 9


def test_blocks_are_on_the_device_of_their_documents() -> None:
    blocks = build_blocks(torch.zeros(2, 6, dtype=torch.long, device="meta"), [6, 4], [[1, 3], [2]], 4, 99)
    assert {tensor.device.type for tensor in vars(blocks).values()} == {"meta"}
