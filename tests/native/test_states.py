"""States of recurrent layers moved on in C, against the same in PyTorch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from volley import native
from volley.memory.recurrence import Run, Trace, advance, scan
from volley.native.states import Moved, move_states, take_token

pytestmark = pytest.mark.skipif(not native.is_built, reason="the kernels were not built")
SLOTS = 6


def ancestors_of(length: int, is_tree: bool) -> Tensor:
    seen = torch.eye(length, dtype=torch.bool)
    for token in range(1, length):
        seen[token] |= seen[int(torch.randint(token, ())) if is_tree else token - 1]
    return seen


def random_layer(runs: int, length: int, sizes: tuple[int, int, int], by_channel: bool) -> Moved:
    """With strides as the rules leave them: tokens before heads, and updates in the order of a triangular solver."""
    heads, keys, values = sizes
    own_keys = torch.randn(runs, length, heads, keys).transpose(1, 2)
    updates = torch.randn(runs, heads, values, length).transpose(2, 3)
    totals = -torch.rand(runs, heads, length, keys if by_channel else 1).cumsum(dim=2) * 4
    return Moved(torch.randn(SLOTS, *sizes), own_keys, updates, totals)


@given(
    runs=st.integers(1, 3),
    length=st.sampled_from([1, 2, 7, 64, 65, 150]),
    sizes=st.sampled_from([(1, 1, 1), (2, 3, 5), (4, 8, 12), (2, 16, 130)]),
    by_channel=st.booleans(),
    is_tree=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_moved_states_are_those_of_pytorch(
    runs: int, length: int, sizes: tuple[int, int, int], by_channel: bool, is_tree: bool, seed: int
) -> None:
    """The first run also leaves a snapshot, from a slot that its own move then overwrites; the last one begins with zeros."""
    torch.manual_seed(seed)
    layers = [random_layer(runs, length, sizes, by_channel) for _ in range(2)]
    ancestors = ancestors_of(length, is_tree)
    moves = [(0, int(torch.randint(length, ())), 0, 5)]
    moves += [(run, int(torch.randint(length, ())), run if run < 2 else -1, run) for run in range(runs)]
    expected = []
    for layer in layers:
        states = layer.states.clone()
        for run, row, source, target in moves:
            trace = Trace(*(x[run : run + 1] for x in layer[1:]))
            before = torch.zeros_like(states[:1]) if source < 0 else layer.states[source : source + 1]
            states[target] = advance(trace, ancestors[None], torch.tensor([row]))(before)[0]
        expected.append(states)
    stays = np.stack([ancestors[row].numpy() for _, row, _, _ in moves])
    move_states(layers, np.array(moves, dtype=np.int64), stays)
    for layer, states in zip(layers, expected, strict=True):
        torch.testing.assert_close(layer.states, states, rtol=1e-5, atol=1e-5)


@given(
    runs=st.integers(1, 3),
    sizes=st.sampled_from([(1, 1, 1), (2, 3, 5), (4, 8, 12), (2, 18, 130)]),
    by_channel=st.booleans(),
    subtracts=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_one_token_moves_states_as_pytorch_does(
    runs: int, sizes: tuple[int, int, int], by_channel: bool, subtracts: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    heads, keys, values = sizes
    states = torch.randn(SLOTS, *sizes)
    queries, own_keys = torch.randn(2, runs, 1, heads, keys).transpose(2, 3)
    decays, betas = -torch.rand(runs, heads, 1, keys if by_channel else 1) * 9, torch.rand(runs, heads, 1, 1)
    run = Run(queries, own_keys, torch.randn(runs, heads, 1, values), decays, betas if subtracts else None)
    slots, every = torch.randperm(SLOTS)[:runs], torch.ones(1, 1, 1, dtype=torch.bool)
    expected, after = states.clone(), torch.zeros(runs, dtype=torch.long)
    outputs, trace = scan(run, states[slots], every)
    expected[slots] = advance(trace, every, after)(states[slots])
    torch.testing.assert_close(take_token(states, slots.numpy(), run), outputs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)
