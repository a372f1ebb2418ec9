"""A pass over ragged segments against one sequence at a time: convolutions, rules, and the states that are written."""

import pytest
import torch
from torch import Tensor

from volley import native
from volley.errors import UnsupportedModelError
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_cache import BlockTable
from volley.memory.recurrence import Run, scan
from volley.memory.recurrent_pass import RecurrentPass, Wanted
from volley.memory.recurrent_store import RecurrentLayout, RecurrentStore

CHANNELS, WIDTH, HEADS, KEYS, VALUES = 6, 4, 2, 3, 5
LAYOUT = RecurrentLayout(convolutions=((WIDTH - 1, CHANNELS),), rules=((HEADS, KEYS, VALUES),))
TREE = (0, 0, 1, 2, 2, 5)
PATH = [0, 2, 5, 6]


def table(slot: int | None) -> BlockTable:
    made = BlockTable(128, [0])
    made.state = slot
    return made


def make_store() -> RecurrentStore:
    torch.manual_seed(7)
    store = RecurrentStore(LAYOUT, 9, torch.float32, torch.device("cpu"))
    for tensor in (*store.histories, *store.states):
        tensor.normal_()
    return store


class Layer:
    """One layer's weights, and its inputs for the tokens of a batch."""

    def __init__(self, tokens: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.inputs, self.weight, self.bias = normal(tokens, CHANNELS), normal(CHANNELS, WIDTH), normal(CHANNELS)
        keys = torch.nn.functional.normalize(normal(tokens, HEADS, KEYS), dim=-1)
        decays, betas = -normal(tokens, HEADS, 1).exp(), normal(tokens, HEADS, 1).sigmoid()
        self.rule = (normal(tokens, HEADS, KEYS), keys, normal(tokens, HEADS, VALUES), decays, betas)

    def run(self, own: RecurrentPass) -> tuple[Tensor, Tensor]:
        return own.convolve(self.inputs, self.weight, self.bias), own.scan(*self.rule)

    def along(self, rows: list[int], history: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For tokens ``rows`` of one sequence: convolved, mixed, and history and state after them, computed by themselves."""
        inputs = torch.cat((history, self.inputs[rows]))
        convolved = torch.nn.functional.conv1d(inputs.T[None], self.weight[:, None], self.bias, groups=CHANNELS)[0].T
        mixed = []
        for row in rows:
            run = Run(*(x[row][None, :, None] for x in self.rule))
            output, trace = scan(run, state[None], torch.ones(1, 1, 1, dtype=torch.bool))
            state = state * trace.totals[0].exp() + trace.keys[0].transpose(-1, -2) @ trace.updates[0]
            mixed.append(output[0, :, 0])
        return convolved, torch.stack(mixed), inputs[-(WIDTH - 1) :], state


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


SEGMENTS = [(3, 0, 5, None), (1, 9, 1, None), (0, 4, 7, TREE), (2, 6, 6, None), (None, 0, 3, None), (5, 3, 80, None)]
"""Slot, start, length and parents of each segment."""


def make_pass(store: RecurrentStore, marks: list[tuple[int, ...]] | None = None) -> RecurrentPass:
    segments = [Segment(table(slot), start, length, parents=tree) for slot, start, length, tree in SEGMENTS]
    batch = RaggedBatch(segments, torch.zeros(sum(segment.length for segment in segments), dtype=torch.long))
    return RecurrentPass(batch, LAYOUT, store, marks)


MARKS = [(), (), (), (), (), (10, 70, 79)]


@pytest.mark.parametrize("marks", [None, MARKS], ids=["open", "marked"])
def test_every_segment_is_computed_as_by_itself(marks: list[tuple[int, ...]] | None) -> None:
    store = make_store()
    own = make_pass(store, marks)
    layer = Layer(len(own.batch))
    histories, states = (tensor.clone() for tensor in (store.histories[0], store.states[0]))
    convolved, mixed = layer.run(own)
    for index, (slot, start, length, tree) in enumerate(SEGMENTS):
        offset = own.batch.offsets[index]
        history, state = histories[slot or 0], states[slot or 0]
        if start == 0:  # whatever its slot held before
            history, state = torch.zeros_like(history), torch.zeros_like(state)
        for path in [list(range(length))] if tree is None else [PATH, [0, 1, 3], [0, 2, 4]]:
            rows = [offset + row for row in path]
            expected = layer.along(rows, history, state)
            close(convolved[rows], expected[0])
            close(mixed[rows], expected[1])


@pytest.mark.parametrize("in_c", [True, False])
def test_what_is_written_is_the_states_after_the_tokens_that_stay(monkeypatch: pytest.MonkeyPatch, in_c: bool) -> None:
    monkeypatch.setattr(native, "is_built", in_c and native.is_built)
    store = make_store()
    own = make_pass(store, MARKS)
    layer = Layer(len(own.batch))
    before = [tensor.clone() for tensor in (store.histories[0], store.states[0])]
    layer.run(own)
    assert torch.equal(store.histories[0], before[0])
    changed = [slot for slot in range(9) if not torch.equal(store.states[0][slot], before[1][slot])]
    assert changed == [1] * native.is_built, "a pass itself writes what cannot be cut, where it is computed in C"
    kept = [(0, [*range(4)], 3), (1, [0], 1), (1, [0], 8), (2, PATH, 0), (3, [*range(2)], 7), (3, [*range(5)], 2)]
    kept += [(5, [*range(71)], 6), (5, [*range(80)], 5)]
    own.write([Wanted(segment, path[-1], slot) for segment, path, slot in kept])
    for segment, path, slot in kept:
        source, start, _, _ = SEGMENTS[segment]
        history, state = (torch.zeros_like(x[0]) if start == 0 else x[source] for x in before)
        rows = [own.batch.offsets[segment] + row for row in path]
        _, _, history, state = layer.along(rows, history, state)
        close(store.histories[0][slot], history)
        close(store.states[0][slot], state)
    assert torch.equal(store.states[0][4], before[1][4])


def test_one_request_alone_moves_its_states_in_place() -> None:
    store = make_store()
    segment = Segment(table(3), 5, 6)
    own = RecurrentPass(RaggedBatch([segment], torch.zeros(6, dtype=torch.long)), LAYOUT, store)
    layer = Layer(6)
    _, _, history, state = layer.along([0, 1, 2], store.histories[0][3].clone(), store.states[0][3].clone())
    layer.run(own)
    own.write([Wanted(0, 2, 3)])
    close(store.histories[0][3], history)
    close(store.states[0][3], state)


@pytest.mark.parametrize("length", [4, 70])
def test_without_a_store_every_segment_begins_with_zeros(length: int) -> None:
    segment = Segment(table(3), 5, length)
    own = RecurrentPass(RaggedBatch([segment], torch.zeros(length, dtype=torch.long)), LAYOUT)
    layer = Layer(length)
    found = layer.run(own)
    expected = layer.along([*range(length)], torch.zeros(WIDTH - 1, CHANNELS), torch.zeros(HEADS, KEYS, VALUES))
    close(found[0], expected[0])
    close(found[1], expected[1])
    with pytest.raises(AssertionError, match="without a store"):
        own.write([Wanted(0, 1, 3)])


def test_a_bidirectional_segment_is_refused() -> None:
    batch = RaggedBatch([Segment(table(0), 0, 4, causal=False)], torch.zeros(4, dtype=torch.long))
    with pytest.raises(UnsupportedModelError, match="left to right"):
        RecurrentPass(batch, LAYOUT)
