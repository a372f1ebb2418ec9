"""Apply norms, rotation and activation to a decoder layer's rows, one launch each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from volley.memory.kernels import launching

_BLOCK = 1024  # values of a row that one program of the activation computes


@triton.jit
def _add_norm_kernel(
    states, update, weight, added, normed, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr
):
    """Process one row."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(states + row + column, mask=inside, other=0.0)
    if ADDS:
        x = (x.to(tl.float32) + tl.load(update + row + column, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(added + row + column, x, mask=inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    by = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row + column, (x * scale * by).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _turn_kernel(
    rows,
    query_norm,
    key_norm,
    cos,
    sin,
    eps,
    row_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMS: tl.constexpr,
):
    """Process one token and head; a head is held as its two halves, which the rotation mixes."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    place = rows + token * row_stride + head * (2 * HALF) + column
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORMS:
        scale = tl.rsqrt((tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / (2 * HALF) + eps)
        is_query = head < HEADS
        of_query = tl.load(query_norm + column, mask=inside, other=0.0).to(tl.float32)
        of_key = tl.load(key_norm + column, mask=inside, other=0.0).to(tl.float32)
        first *= scale * tl.where(is_query, of_query, of_key)
        of_query = tl.load(query_norm + HALF + column, mask=inside, other=0.0).to(tl.float32)
        of_key = tl.load(key_norm + HALF + column, mask=inside, other=0.0).to(tl.float32)
        second *= scale * tl.where(is_query, of_query, of_key)
    angle = token * (2 * HALF) + column
    turned_first = first * tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    turned_first -= second * tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    turned_second = second * tl.load(cos + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    turned_second += first * tl.load(sin + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, turned_first.to(rows.dtype.element_ty), mask=inside)
    tl.store(place + HALF, turned_second.to(rows.dtype.element_ty), mask=inside)


@triton.jit
def _gated_silu_kernel(rows, output, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Process a part of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(rows + row * 2 * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(rows + row * 2 * SIZE + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * SIZE + column, (gate * tl.sigmoid(gate) * up).to(output.dtype.element_ty), mask=inside)


def add_norm(states: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``states + update`` and its RMS norm, both ``[T, H]``; without an update the states are returned unchanged."""
    count, size = states.shape
    states, normed = states.contiguous(), torch.empty(states.shape, dtype=states.dtype, device=states.device)
    added = states if update is None else torch.empty_like(states)
    given = states if update is None else update.contiguous()
    block = triton.next_power_of_2(size)
    sizes = {"SIZE": size, "BLOCK": block, "ADDS": update is not None, "num_warps": min(8, max(1, block // 512))}
    launching.launch(_add_norm_kernel, (count,), states.device, states, given, weight, added, normed, eps, **sizes)
    return added, normed


def norm_and_turn(
    rows: Tensor, norms: tuple[Tensor, Tensor] | None, cos: Tensor, sin: Tensor, heads: int, eps: float
) -> None:
    """Norm queries and keys by weights ``[d]``, if there are any, and apply the rotary embedding; in place.

    ``rows [T, heads + 2 · shared, d]`` are ``heads`` queries, then ``shared`` keys and as many values. ``cos`` and ``sin``:
    ``[T, d]``.
    """
    count, all_heads, dim = rows.shape
    grid = (count, heads + (all_heads - heads) // 2)
    tensors = (rows, *(norms or (rows, rows)), cos.contiguous(), sin.contiguous())
    sizes = {"HEADS": heads, "HALF": dim // 2, "BLOCK": triton.next_power_of_2(dim // 2), "num_warps": 1}
    launching.launch(_turn_kernel, grid, rows.device, *tensors, eps, rows.stride(0), NORMS=norms is not None, **sizes)


def gated_silu(rows: Tensor) -> Tensor:
    """Return ``silu(gate) · up`` ``[T, I]`` for ``rows [T, 2 · I]``, gates first."""
    count, size = rows.shape[0], rows.shape[1] // 2
    output = torch.empty(count, size, dtype=rows.dtype, device=rows.device)
    grid = (count, triton.cdiv(size, _BLOCK))
    launching.launch(_gated_silu_kernel, grid, rows.device, rows.contiguous(), output, SIZE=size, BLOCK=_BLOCK)
    return output
