"""Advance states of recurrent layers over accepted tokens, with one read and one write of each state."""

from collections.abc import Sequence
from ctypes import Structure, byref, c_int64, c_void_p
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from volley.native import functions, pointer


class _Rule(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("states", "keys", "updates", "totals")),
        *((name, c_int64 * 3) for name in ("key_strides", "update_strides", "total_strides")),
        *((name, c_int64) for name in ("heads", "num_keys", "num_values", "by_channel")),
    )


class Moved(NamedTuple):
    """States of a layer, and the updates by the tokens of N runs; all fp32 (:class:`volley.memory.recurrence.Trace`)."""

    states: Tensor
    """States ``[slots, heads, keys, values]``, contiguous; changed in place."""
    keys: Tensor
    updates: Tensor
    totals: Tensor


def move_states(layers: Sequence[Moved], moves: NDArray[np.int64], stays: NDArray[np.bool_]) -> None:
    """Advance states in the order of ``moves [M, 4]``: run, last accepted token, source slot (−1: zeros), target slot.

    ``stays [M, T]`` marks the tokens that are added. A slot may be the source of several moves, the last of which may overwrite
    it. All layers have the same number of heads.
    """
    held, rules = [], (_Rule * len(layers))()
    for rule, (states, *parts) in zip(rules, layers, strict=True):
        keys, updates, totals = (x if x.stride(-1) == 1 else x.contiguous() for x in parts)
        held.append((keys, updates, totals))
        rule.states, rule.keys, rule.updates, rule.totals = (x.data_ptr() for x in (states, keys, updates, totals))
        rule.key_strides, rule.update_strides, rule.total_strides = (x.stride()[:3] for x in (keys, updates, totals))
        rule.heads, rule.num_keys, rule.num_values = states.shape[1:]
        rule.by_channel = totals.shape[-1] > 1
    moves, stays = np.ascontiguousarray(moves), np.ascontiguousarray(stays)
    functions().move_states(rules, len(layers), moves.ctypes.data, stays.ctypes.data, *stays.shape)


class _Token(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("states", "slots", "queries", "keys", "values", "decays", "betas", "outputs")),
        *((name, c_int64) for name in ("runs", "heads", "num_keys", "num_values", "by_channel")),
    )


def take_token(states: Tensor, slots: NDArray[np.int64], run: Sequence[Tensor | None]) -> Tensor:
    """Return outputs ``[N, heads, 1, values]`` of one token for each of N runs, and advance ``states`` in ``slots [N]`` over it.

    ``states [slots, heads, keys, values]`` are contiguous. ``run`` has the fields of :class:`volley.memory.recurrence.Run`. A
    slot belongs to one run.
    """
    queries, keys, values, decays, betas = (None if x is None else x.contiguous() for x in run)
    assert keys is not None
    assert values is not None
    assert decays is not None
    outputs = torch.empty_like(values)
    parts = map(pointer, (queries, keys, values, decays, betas, outputs))
    sizes = (*keys.shape[:2], *states.shape[2:], decays.shape[-1] > 1)
    functions().take_token(byref(_Token(states.data_ptr(), slots.ctypes.data, *parts, *sizes)))
    return outputs
