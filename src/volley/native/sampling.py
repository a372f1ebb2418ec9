"""Sampling operations over whole rows of a vocabulary."""

from collections.abc import Sequence
from ctypes import byref, c_float, c_int64
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from volley.native import functions, is_built


def exponentials(seed: int, purpose: int, position: int, size: int) -> Tensor:
    """Return unit exponentials ``[size]`` (fp32); the reference is :mod:`volley.decode.noise`."""
    out = torch.empty(size, dtype=torch.float32)
    functions().exponentials(seed, purpose, position, out.data_ptr(), size)
    return out


def likeliest(logits: Tensor, *, checked: bool) -> Tensor:
    """Return the token of the largest of ``logits [R, V]`` (bf16, contiguous) of each row, ``[R]``; the first of equal ones.

    A NaN is above all others. If ``checked``, −1 stands for a token whose logit is not finite.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64)
    functions().likeliest(logits.data_ptr(), *logits.shape, checked, tokens.data_ptr())
    return tokens


def forbid(row: Tensor, allowed: NDArray[np.uint8]) -> None:
    """Replace logits in ``row [V]`` (fp32, contiguous) by −∞ where the token has no bit in ``allowed [≥ V / 8]``."""
    assert row.dtype == torch.float32, f"masks are for fp32, not {row.dtype}"
    assert 8 * allowed.nbytes >= len(row), "every token has a bit"
    functions().forbid(row.data_ptr(), allowed.ctypes.data, len(row))


def allowed_softmax(row: Tensor, allowed: NDArray[np.uint8], out: Tensor, temperature: float) -> None:
    """Write to ``out [V]`` the softmax of ``row [V] / temperature`` over the tokens with a bit in ``allowed [≥ V / 8]``.

    All other tokens get 0. ``row`` and ``out`` are fp32 and contiguous.
    """
    assert row.dtype == out.dtype == torch.float32, f"masks are for fp32, not {row.dtype}"
    assert 8 * allowed.nbytes >= len(row), "every token has a bit"
    functions().allowed_softmax(row.data_ptr(), allowed.ctypes.data, out.data_ptr(), len(row), 1 / temperature)


class Added(NamedTuple):
    """Correction of a row's logits: token t gets ``outputs[places[t]] · mixed``, or ``outputs[t] · mixed`` without places."""

    outputs: Tensor
    """Output table ``[n, r]`` in bf16."""
    mixed: Tensor
    """Factors ``[r]`` in fp32."""
    places: Tensor | None = None
    """Rows ``[V]`` of the table by token."""


def can_choose(*tensors: Tensor) -> bool:
    """Return whether :func:`likeliest`, :func:`allowed_best` and :func:`follow` support such tensors."""
    return is_built and all(x.device.type == "cpu" and x.dtype == torch.bfloat16 and x.is_contiguous() for x in tensors)


def allowed_best(
    row: Tensor, allowed: NDArray[np.uint8], added: Added | None = None, *, with_chance: bool = False
) -> tuple[int, float] | None:
    """Return the likeliest token of ``row [V]`` (bf16) with a bit in ``allowed [≥ V / 8]``, and its probability among these.

    The first of equal tokens wins. The probability is 0 without ``with_chance``. Return ``None`` if all allowed tokens have −∞.
    """
    assert 8 * allowed.nbytes >= len(row), "every token has a bit"
    values, best, chance = np.empty(len(row), dtype=np.float32), c_int64(), c_float()
    outputs, mixed, places = added or (None, None, None)
    functions().allowed_best(
        *(row.data_ptr(), allowed.ctypes.data, len(row)),
        *(None if x is None else x.data_ptr() for x in (outputs, mixed, places)),
        *(0 if outputs is None else outputs.shape[1], values.ctypes.data),
        *(byref(best), byref(chance) if with_chance else None),
    )
    return None if best.value < 0 else (best.value, chance.value)


class Tables(NamedTuple):
    """Tables of a sequential head, in bf16: the logit of token j after token c grows by ``outputs[j] · u``.

    ``u`` is ``rows[c]``, or ``silu(rows[c] + own)`` if the position's state has a share ``own``.
    """

    rows: Tensor
    """``[n, r]``"""
    outputs: Tensor
    """``[n, r]``"""
    own: Tensor | None
    """``[R, r]``"""


def follow(
    logits: Tensor,
    tables: Tables,
    anchors: Sequence[int],
    sizes: Sequence[int],
    most: int,
    drafted: Tensor | None = None,
) -> tuple[list[int], list[float]]:
    """Return greedy chains: the likeliest token of every position after the previous one, and its probability.

    Candidates are the ``most`` tokens with the largest ``logits [R, V]`` (bf16); R is the sum of ``sizes``. ``drafted [N]`` are
    the tokens that may be drafted, by default all. A table has a row for each token. ``anchors`` are the tokens before the
    chains.
    """
    assert drafted is None or (drafted.dtype == torch.int64 and drafted.is_contiguous())
    count = logits.shape[1] if drafted is None else len(drafted)
    starts, before = np.array([0, *accumulate(sizes)]), np.array(anchors)
    tokens, sure = np.empty(len(logits), dtype=np.int64), np.empty(len(logits), dtype=np.float32)
    chosen, values = np.empty((len(sizes), count), dtype=np.int32), np.empty((len(sizes), count), dtype=np.float32)
    rows, outputs, own = tables
    functions().follow(
        *(logits.data_ptr(), logits.shape[1], None if drafted is None else drafted.data_ptr(), count, most),
        *(rows.data_ptr(), None if own is None else own.data_ptr(), outputs.data_ptr(), outputs.shape[1]),
        *(starts.ctypes.data, before.ctypes.data, len(sizes)),
        *(chosen.ctypes.data, values.ctypes.data, tokens.ctypes.data, sure.ctypes.data),
    )
    return tokens.tolist(), sure.tolist()


def draw_after(
    logits: Tensor, outputs: Tensor, mixed: Tensor, temperature: float, uniform: float, probs: Tensor
) -> int:
    """Draw one of n tokens by ``uniform`` from the softmax of ``(logits [n] + outputs [n, r] · mixed [r]) / temperature``.

    The distribution is written to ``probs [n]`` (fp32). ``logits`` and ``outputs`` are bf16, and ``outputs`` may have more rows.
    Return the token's index. The reference is :func:`volley.decode.propose.walk_sampled`.
    """
    assert all(own.is_contiguous() for own in (logits, outputs, probs)), "they are read as they lie"
    assert (logits.dtype, outputs.dtype, probs.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert len(probs) == len(logits) <= len(outputs)
    own, place = mixed.float().contiguous(), c_int64()
    functions().draw_after(
        *(logits.data_ptr(), outputs.data_ptr(), own.data_ptr(), outputs.shape[1], len(logits)),
        *(1 / temperature, uniform, probs.data_ptr(), byref(place)),
    )
    return place.value
