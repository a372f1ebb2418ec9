"""Finish a K/V injection after its matmul, in one launch: key norm, rotation, and the scatter into the pool.

The references are ``models.inject.Injection.keys_values`` and ``DenseKVStore.write_layers``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from volley.memory.kernels import launching
from volley.memory.kv_store import DenseKVStore


@triton.jit
def _inject_kernel(
    projected,
    norm_weights,
    eps,
    cos,
    sin,
    slots,
    keys,
    values,
    layer_stride,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Finish one token and layer; a head is held as its two halves, which the rotation mixes."""
    token = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < HEADS) & (column < HALF)
    in_row = head * (2 * HALF) + column
    row = projected + (token * 2 * LAYERS + layer) * (HEADS * 2 * HALF) + in_row
    place = layer * layer_stride + tl.load(slots + token) * (HEADS * 2 * HALF) + in_row

    first = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(row + HALF, mask=inside, other=0.0).to(tl.float32)
    mean_square = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * HALF)
    scale = tl.rsqrt(mean_square + eps)[:, None]
    weight = norm_weights + layer * (2 * HALF) + column
    angle = token * (2 * HALF) + column
    in_half = column < HALF
    first *= scale * tl.load(weight, mask=in_half, other=0.0).to(tl.float32)
    second *= scale * tl.load(weight + HALF, mask=in_half, other=0.0).to(tl.float32)
    turned_first = first * tl.load(cos + angle, mask=in_half, other=0.0).to(tl.float32)
    turned_first -= second * tl.load(sin + angle, mask=in_half, other=0.0).to(tl.float32)
    turned_second = second * tl.load(cos + angle + HALF, mask=in_half, other=0.0).to(tl.float32)
    turned_second += first * tl.load(sin + angle + HALF, mask=in_half, other=0.0).to(tl.float32)
    tl.store(keys + place, turned_first.to(keys.dtype.element_ty), mask=inside)
    tl.store(keys + place + HALF, turned_second.to(keys.dtype.element_ty), mask=inside)

    value_row = row + LAYERS * HEADS * 2 * HALF
    tl.store(values + place, tl.load(value_row, mask=inside, other=0.0), mask=inside)
    tl.store(values + place + HALF, tl.load(value_row + HALF, mask=inside, other=0.0), mask=inside)


def inject(
    projected: Tensor,
    norm_weights: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    store: DenseKVStore,
    slots: slice | Tensor,
) -> None:
    """Finish and store ``projected [T, 2, layers, kv_heads, d]``: keys before norm and rotation, and values.

    ``norm_weights [layers, d]``; ``cos`` and ``sin`` ``[T, 1, d]``. All layers of ``store`` have one shape.
    """
    count, _, layers, heads, dim = projected.shape
    assert store.all_keys is not None and store.all_values is not None  # noqa: PT018
    if isinstance(slots, slice):
        slots = torch.arange(slots.start, slots.stop, device=projected.device)
    launching.launch(
        _inject_kernel,
        (count, layers),
        projected.device,
        projected.contiguous(),
        norm_weights,
        eps,
        cos.contiguous(),
        sin.contiguous(),
        slots,
        store.all_keys,
        store.all_values,
        store.all_keys.stride(0),
        LAYERS=layers,
        HEADS=heads,
        HALF=dim // 2,
        BLOCK_HEADS=triton.next_power_of_2(heads),
        BLOCK_HALF=triton.next_power_of_2(dim // 2),
    )
