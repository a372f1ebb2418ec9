"""Compute ragged paged attention in Triton: every segment through its own pages, be it causal, bidirectional or a tree.

The reference is ``memory.attention.paged_attention``. One program attends a tile of tokens of one segment, for all heads
that share keys. Keys are divided into parts at fixed positions, and the results of the parts are joined in order: by the
program itself, or by a second kernel if each part has a separate program. A token's result is therefore batch-invariant, bit
for bit.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from volley.memory import tiles
from volley.memory.attention import AttentionOptions, paged_attention, write_slots
from volley.memory.batch import RaggedBatch
from volley.memory.kernels import launching
from volley.memory.kernels.write import write
from volley.memory.kv_store import DenseKVStore, KVStore
from volley.memory.tiles import PART, TiledBatch, Tiling, tiled_batch

_BIDIRECTIONAL, _CAUSAL, _TREE = (tl.constexpr(kind) for kind in (tiles.BIDIRECTIONAL, tiles.CAUSAL, tiles.TREE))
_MOST_PARTIAL_BYTES = 2**28  # bytes of the results of all parts, if each part has a separate program


class TileShape(NamedTuple):
    """Amount of data that a program holds at once."""

    rows: int
    """Number of tokens times the heads that share keys."""
    keys: int
    warps: int
    stages: int = 3
    """Pipeline stages of the loop over keys, whose loads run ahead."""


def tile_shape(groups: int, dim: int, dtype: torch.dtype) -> TileShape:
    """Return the tile for ``groups`` heads of size ``dim`` that share keys: it spills no register, and fits sm_86's 99 KiB of
    shared memory.

    ``scripts/gpu/kernel_resources.py`` prints both. The shape depends on nothing else, because tiles of another shape may round
    differently.
    """
    if dtype.itemsize > 2 or dim > 256:
        shape = TileShape(16, 32, 4) if 64 < dim <= 128 else TileShape(16, 16, 8)
    else:
        shape = TileShape(16, 128, 4, 2) if dim <= 128 else TileShape(32, 32, 8)
    return shape._replace(rows=max(shape.rows, 1 << (groups - 1).bit_length()))


@triton.jit
def _join(best, total, mixed, part_best, part_total, part_mixed):
    """Join the softmax so far with that of one more part. A part without a visible key changes no bit."""
    higher = tl.maximum(best, part_best)
    anchor = tl.where(higher == -float("inf"), 0.0, higher)
    old, new = tl.exp(best - anchor), tl.exp(part_best - anchor)
    return higher, total * old + part_total * new, mixed * old[:, None] + part_mixed * new[:, None]


@triton.jit(do_not_specialize=["window", "num_tokens"])
def _attention_kernel(
    queries,
    keys,
    values,
    sinks,
    positions,
    origins,
    tiles,
    segments,
    cells,
    output,
    bests,
    totals,
    scale,
    softcap,
    window,
    num_tokens,
    query_stride,
    query_head_stride,
    slot_stride,
    PAGE_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    PARTED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Attend one tile: its row r is token ``first + r // GROUPS`` of the segment, head ``r % GROUPS`` of those that share
    keys.

    PARTED: this program attends to one part of the keys, and ``_join_kernel`` finishes; else to all.
    """
    tile = tiles + tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    segment = segments + tl.load(tile) * 7
    first, low, high = tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    offset, start, length = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
    kind, page_start, num_pages = tl.load(segment + 3), tl.load(segment + 4), tl.load(segment + 5)
    mask_start = tl.load(segment + 6)

    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_DIM)
    token = first + row // GROUPS
    real = (token < length) & (row < ROWS // GROUPS * GROUPS)
    head = kv_head * GROUPS + row % GROUPS
    query_row = (offset + token).to(tl.int64)
    in_dim = column < DIM
    query_place = query_row[:, None] * query_stride + head[:, None] * query_head_stride + column[None, :]
    q = tl.load(queries + query_place, mask=real[:, None] & in_dim[None, :], other=0.0)
    query_position = tl.load(positions + offset + token, mask=real, other=0)
    origin = query_position
    if WINDOWED:
        origin = tl.load(origins + offset + token, mask=real, other=0)

    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    if SINKS and not PARTED:
        best = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
        total += 1.0

    part_from = low // PART
    part_to = tl.cdiv(high, PART)
    if PARTED:
        part_from += tl.program_id(2)
        part_to = tl.minimum(part_to, part_from + 1)
    for part in range(part_from, part_to):
        part_best = tl.full([ROWS], -float("inf"), tl.float32)
        part_total = tl.zeros([ROWS], tl.float32)
        part_mixed = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
        part_low = tl.maximum(low // KEYS * KEYS, part * PART)
        part_high = tl.minimum(high, part * PART + PART)
        for begin in range(part_low, part_high, KEYS):
            index = begin + tl.arange(0, KEYS)
            exists = (index >= low) & (index < high)
            own = index >= start  # K/V of the segment itself
            page = tl.load(cells + page_start + (index // PAGE_SIZE) % num_pages, mask=exists, other=0)
            slot = page.to(tl.int64) * PAGE_SIZE + index % PAGE_SIZE
            place = slot * slot_stride + kv_head * DIM
            there = exists[:, None] & in_dim[None, :]
            k = tl.load(keys + place[:, None] + column[None, :], mask=there, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if CAPPED:
                scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)

            visible = real[:, None] & exists[None, :]
            if kind == _CAUSAL:
                visible &= index[None, :] <= start + token[:, None]
            if kind == _TREE:
                cell = mask_start + token[:, None] * length + (index - start)[None, :]
                visible &= tl.load(cells + cell, mask=visible & own[None, :], other=1) != 0
            if WINDOWED:
                key_position = tl.load(positions + offset + index - start, mask=exists & own, other=0)
                key_position = tl.where(own, key_position, index)
                lowest = origin - window + 1
                if kind == _BIDIRECTIONAL:
                    lowest = tl.zeros_like(query_position) + start - window
                    if SYMMETRIC:
                        lowest = query_position - window
                        visible &= key_position[None, :] <= query_position[:, None] + window
                if kind == _TREE and SYMMETRIC:
                    visible &= key_position[None, :] <= query_position[:, None] + window
                visible &= key_position[None, :] >= lowest[:, None]

            scores = tl.where(visible, scores, -float("inf"))
            higher = tl.maximum(part_best, tl.max(scores, axis=1))
            anchor = tl.where(higher == -float("inf"), 0.0, higher)  # rows that have seen no key yet
            weights = tl.exp(scores - anchor[:, None])
            shrink = tl.exp(part_best - anchor)
            v = tl.load(values + place[:, None] + column[None, :], mask=there, other=0.0)
            part_mixed = part_mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            part_total = part_total * shrink + tl.sum(weights, axis=1)
            part_best = higher
        if PARTED:
            best, total, mixed = part_best, part_total, part_mixed
        else:
            best, total, mixed = _join(best, total, mixed, part_best, part_total, part_mixed)

    place = query_row * (tl.num_programs(1) * GROUPS) + head
    if PARTED:
        place += tl.program_id(2) * num_tokens.to(tl.int64) * tl.num_programs(1) * GROUPS
        tl.store(bests + place, best, mask=real)
        tl.store(totals + place, total, mask=real)
    else:
        mixed = mixed / tl.where(real, total, 1.0)[:, None]
    place_in_dim = place[:, None] * DIM + column[None, :]
    tl.store(output + place_in_dim, mixed.to(output.dtype.element_ty), mask=real[:, None] & in_dim[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _join_kernel(
    parts,
    bests,
    totals,
    sinks,
    output,
    num_rows,
    num_parts,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Join the parts of one token and head."""
    row = tl.program_id(0).to(tl.int64)
    only = tl.arange(0, 1)
    column = tl.arange(0, BLOCK_DIM)[None, :]
    best = tl.full([1], -float("inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([1, BLOCK_DIM], tl.float32)
    if SINKS:
        best = tl.load(sinks + row % HEADS + only).to(tl.float32)
        total += 1.0
    for part in range(num_parts):
        place = part * num_rows.to(tl.int64) + row
        part_best = tl.load(bests + place + only)
        part_total = tl.load(totals + place + only)
        part_mixed = tl.load(parts + place * DIM + column, mask=column < DIM, other=0.0)
        best, total, mixed = _join(best, total, mixed, part_best, part_total, part_mixed)
    mixed = mixed / total[:, None]
    tl.store(output + row * DIM + column, mixed.to(output.dtype.element_ty), mask=column < DIM)


def ragged_attention(
    batch: RaggedBatch,
    store: KVStore,
    layer: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    options: AttentionOptions,
    parted: bool | None = None,
) -> Tensor:
    """Compute ``paged_attention``; a quantised store is passed on to it.

    ``parted`` gives each part of the keys a separate program, which changes only the speed; ``None``: if the tiles do not fill
    the processors.
    """
    if not isinstance(store, DenseKVStore):
        return paged_attention(batch, store, layer, queries, keys, values, options)
    slots = write_slots(batch)
    if isinstance(slots, slice):  # once for all layers
        slots = batch.plans["write"] = torch.arange(slots.start, slots.stop, device=queries.device)
    write(store, layer, slots, keys, values)
    kv_heads = keys.shape[1]
    groups = queries.shape[1] // kv_heads
    rows = tile_shape(groups, queries.shape[2], queries.dtype).rows
    tiled = tiled_batch(batch, Tiling(options.window, options.symmetric, rows // groups, kv_heads))
    if parted is None:
        parted = worth_parting(tiled, kv_heads, 4 * queries.numel(), queries.device)
    return attend(tiled, batch.segments[0].table.page_size, store, layer, queries, options, parted=parted)


def attend(
    tiled: TiledBatch,
    page_size: int,
    store: DenseKVStore,
    layer: int,
    queries: Tensor,
    options: AttentionOptions,
    *,
    parted: bool,
) -> Tensor:
    """Attend ``queries [T, heads, d]``."""
    pool = store.keys[layer]
    count, heads, dim = queries.shape
    kv_heads, device = pool.shape[1], queries.device
    queries = queries if queries.stride(2) == 1 else queries.contiguous()
    output = torch.empty(count, heads, dim, dtype=queries.dtype, device=device)
    mixed, bests, totals = output, output, output
    if parted:
        mixed = torch.empty(tiled.num_parts, count, heads, dim, dtype=torch.float32, device=device)
        bests, totals = torch.empty(2, tiled.num_parts, count, heads, dtype=torch.float32, device=device)
    sinks = queries if options.sinks is None else options.sinks
    shape = tile_shape(heads // kv_heads, dim, queries.dtype)
    block_dim = max(16, triton.next_power_of_2(dim))
    read = (tiled.positions, tiled.origins, tiled.tiles, tiled.segments, tiled.cells)
    strides = (queries.stride(0), queries.stride(1), pool.stride(0))
    same = {"DIM": dim, "BLOCK_DIM": block_dim, "SINKS": options.sinks is not None}
    same["enable_fp_fusion"] = False  # both kernels must round alike
    launching.launch(
        _attention_kernel,
        (len(tiled.tiles), kv_heads, tiled.num_parts if parted else 1),
        device,
        *(queries, pool, store.values[layer], sinks, *read, mixed, bests, totals),
        *(options.scale, options.softcap or 0.0, options.window or 0, count, *strides),
        PAGE_SIZE=page_size,
        GROUPS=heads // kv_heads,
        ROWS=shape.rows,
        KEYS=shape.keys,
        PART=PART,
        PARTED=parted,
        WINDOWED=options.window is not None,
        SYMMETRIC=options.symmetric,
        CAPPED=options.softcap is not None,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **same,
    )
    if parted:
        arguments = (mixed, bests, totals, sinks, output, count * heads, tiled.num_parts)
        launching.launch(_join_kernel, (count * heads,), device, *arguments, HEADS=heads, **same)
    return output


def worth_parting(tiled: TiledBatch, kv_heads: int, part_bytes: int, device: torch.device) -> bool:
    """Return True if the tiles alone leave processors idle, and the results of the parts, ``part_bytes`` each, fit in memory."""
    leaves_idle = launching.leaves_idle(len(tiled.tiles) * kv_heads, device)
    return tiled.num_parts > 1 and leaves_idle and tiled.num_parts * part_bytes <= _MOST_PARTIAL_BYTES
