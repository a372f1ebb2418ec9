"""Slots of recurrent states: sizes, copies, and what a sequence that begins reads."""

import torch

from volley.memory.recurrent_store import RecurrentLayout, RecurrentStore, read_slots

LAYOUT = RecurrentLayout(convolutions=((3, 5), (2, 4)), rules=((2, 3, 4),))


def filled(dtype: torch.dtype = torch.float32) -> RecurrentStore:
    store = RecurrentStore(LAYOUT, 4, dtype, torch.device("cpu"))
    for tensor in (*store.histories, *store.states):
        tensor.normal_()
    return store


def test_bytes_are_those_of_the_tensors() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        store = filled(dtype)
        assert store.nbytes == sum(tensor.nbytes for tensor in (*store.histories, *store.states))
        assert store.nbytes == 4 * LAYOUT.bytes_per_state(dtype)


def test_a_layout_without_states_is_false() -> None:
    assert LAYOUT
    assert not RecurrentLayout()


def test_a_copy_is_of_every_layer() -> None:
    store = filled()
    others = [tensor[[0, 3]].clone() for tensor in (*store.histories, *store.states)]
    store.copy(1, 2)
    for tensor, before in zip((*store.histories, *store.states), others, strict=True):
        assert torch.equal(tensor[2], tensor[1])
        assert torch.equal(tensor[[0, 3]], before)


def test_a_sequence_that_begins_reads_zeros() -> None:
    stored = filled().states[0]
    before = stored.clone()
    assert torch.equal(read_slots(stored, [2]), before[2:3])
    assert not read_slots(stored, [None]).any()
    found = read_slots(stored, [3, None, 0])
    assert torch.equal(found[[0, 2]], before[[3, 0]])
    assert not found[1].any()
    assert torch.equal(stored, before)
