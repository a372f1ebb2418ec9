"""Ragged paged attention in Triton: every segment through its own pages, be it causal, bidirectional or a tree.

Reference: ``memory.attention.reference_attention``. One program attends a tile of tokens of one segment, for all heads
that share keys, to a part of the keys they see; where the parts of a tile are several, a second kernel joins them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from volley.memory.attention import AttentionOptions, first_visible, paged_attention, visible_mask, write_slots
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_store import DenseKVStore, KVStore

_BIDIRECTIONAL, _CAUSAL, _TREE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BLOCK_KEYS = 64  # keys a program reads at once
_MOST_SPLITS = 32


@triton.jit
def _attention_kernel(
    queries,
    keys,
    values,
    sinks,
    positions,
    tiles,
    segments,
    pages,
    masks,
    output,
    log_sums,
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
    SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Row r of a tile is token ``first + r // GROUPS`` of the segment, head ``r % GROUPS`` of those that share keys."""
    tile = tiles + tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    segment = segments + tl.load(tile) * 7
    first, low, high = tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    offset, start, length = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
    kind, page_start, num_pages = tl.load(segment + 3), tl.load(segment + 4), tl.load(segment + 5)
    mask_start = tl.load(segment + 6)

    part = tl.cdiv(tl.cdiv(high - low, KEYS), SPLITS) * KEYS
    low = low + split * part
    high = tl.minimum(high, low + part)

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

    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    if SINKS:  # noqa: SIM102 - one condition is known at compile time, the other is not
        if split == 0:
            best = tl.load(sinks + head).to(tl.float32)
            total += 1.0

    for begin in range(low, high, KEYS):
        index = begin + tl.arange(0, KEYS)
        exists = index < high
        own = index >= start  # K/V of the segment itself
        page = tl.load(pages + page_start + (index // PAGE_SIZE) % num_pages, mask=exists, other=0)
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
            visible &= tl.load(masks + cell, mask=visible & own[None, :], other=1) != 0
        if WINDOWED:
            key_position = tl.load(positions + offset + index - start, mask=exists & own, other=0)
            key_position = tl.where(own, key_position, index)
            lowest = query_position - window + 1
            if kind == _BIDIRECTIONAL:
                lowest = tl.zeros_like(query_position) + start - window
                if SYMMETRIC:
                    lowest = query_position - window
                    visible &= key_position[None, :] <= query_position[:, None] + window
            visible &= key_position[None, :] >= lowest[:, None]

        scores = tl.where(visible, scores, -float("inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        anchor = tl.where(higher == -float("inf"), 0.0, higher)  # rows that have seen no key yet
        weights = tl.exp(scores - anchor[:, None])
        shrink = tl.exp(best - anchor)
        v = tl.load(values + place[:, None] + column[None, :], mask=there, other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, axis=1)
        best = higher

    total = tl.where(total == 0, 1.0, total)  # a part without keys
    mixed = mixed / total[:, None]
    place = (split * num_tokens + query_row) * (tl.num_programs(1) * GROUPS) + head
    tl.store(
        output + place[:, None] * DIM + column[None, :],
        mixed.to(output.dtype.element_ty),
        mask=real[:, None] & in_dim[None, :],
    )
    if SPLITS > 1:
        tl.store(log_sums + place, best + tl.log(total), mask=real)


@triton.jit
def _join_kernel(parts, log_sums, output, num_rows, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, SPLITS: tl.constexpr):
    """Joins the parts of one token and head, each weighted by the sum of its exponentials."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, BLOCK_DIM)
    in_dim = column < DIM
    log_sum = tl.load(log_sums + split * num_rows + row)
    weights = tl.exp(log_sum - tl.max(log_sum, axis=0))
    place = (split[:, None] * num_rows + row) * DIM + column[None, :]
    part = tl.load(parts + place, mask=in_dim[None, :], other=0.0)
    joined = tl.sum(part * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(output + row * DIM + column, joined.to(output.dtype.element_ty), mask=in_dim)


@dataclass(slots=True)
class TiledBatch:
    """What the kernel reads about a batch, the same for all layers of one window."""

    rows: int
    tiles: Tensor
    """``[n, 4]`` int32: segment, its first token, and the keys ``[low, high)`` that any of the tile's tokens sees."""
    segments: Tensor
    """``[n, 7]`` int32: first row, start, length, kind, first page, number of pages, first cell of its mask."""
    pages: Tensor
    """Page ids of all segments, end to end."""
    masks: Tensor
    """What tokens see of each other ``[length, length]``, of all trees and groups end to end; int32."""
    positions: Tensor
    longest: int
    """Keys that the tile with most of them sees."""


def ragged_attention(
    batch: RaggedBatch,
    store: KVStore,
    layer: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    options: AttentionOptions,
    splits: int | None = None,
    block_keys: int = BLOCK_KEYS,
) -> Tensor:
    """Same contract as ``reference_attention``; a quantised store and windows over groups are left to ``paged_attention``.

    ``splits`` programs share the keys of a tile and read ``block_keys`` of them at once, both powers of 2: they change the
    speed alone. ``None`` fills the processors.
    """
    windowed_groups = options.window is not None and any(segment.groups is not None for segment in batch.segments)
    if windowed_groups or not isinstance(store, DenseKVStore):
        return paged_attention(batch, store, layer, queries, keys, values, options)
    store.write(layer, write_slots(batch), keys, values)
    groups = queries.shape[1] // keys.shape[1]
    tiled = tiled_batch(batch, options, groups)
    if splits is None:
        splits = choose_splits(tiled, keys.shape[1], queries.device)
    return launch(tiled, batch.segments[0].table.page_size, store, layer, queries, options, splits, block_keys)


def _seen_inside(segment: Segment) -> Tensor | None:
    """What the tokens of a tree or of groups see of each other ``[length, length]``; ``None`` for a chain."""
    is_chain = segment.parents is None and segment.groups is None
    return None if is_chain else visible_mask(segment, None, segment.start)


def launch(
    tiled: TiledBatch,
    page_size: int,
    store: DenseKVStore,
    layer: int,
    queries: Tensor,
    options: AttentionOptions,
    splits: int,
    block_keys: int,
) -> Tensor:
    """Attend ``queries [T, heads, d]``, the keys of every tile divided among ``splits`` programs."""
    pool = store.keys[layer]
    count, heads, dim = queries.shape
    kv_heads = pool.shape[1]
    queries = queries if queries.stride(2) == 1 else queries.contiguous()
    output = torch.empty(count, heads, dim, dtype=queries.dtype, device=queries.device)
    parts, log_sums = output, output
    if splits > 1:
        parts = torch.empty(splits, count, heads, dim, dtype=torch.float32, device=queries.device)
        log_sums = torch.empty(splits, count, heads, dtype=torch.float32, device=queries.device)
    block_dim = max(16, triton.next_power_of_2(dim))
    _attention_kernel[(len(tiled.tiles), kv_heads, splits)](
        queries,
        pool,
        store.values[layer],
        queries if options.sinks is None else options.sinks,
        tiled.positions,
        tiled.tiles,
        tiled.segments,
        tiled.pages,
        tiled.masks,
        parts,
        log_sums,
        options.scale,
        options.softcap or 0.0,
        options.window or 0,
        count,
        queries.stride(0),
        queries.stride(1),
        pool.stride(0),
        PAGE_SIZE=page_size,
        GROUPS=heads // kv_heads,
        DIM=dim,
        BLOCK_DIM=block_dim,
        ROWS=tiled.rows,
        KEYS=block_keys,
        SPLITS=splits,
        WINDOWED=options.window is not None,
        SYMMETRIC=options.symmetric,
        CAPPED=options.softcap is not None,
        SINKS=options.sinks is not None,
    )
    if splits > 1:
        _join_kernel[(count * heads,)](parts, log_sums, output, count * heads, dim, block_dim, splits)
    return output


def choose_splits(tiled: TiledBatch, kv_heads: int, device: torch.device) -> int:
    """Enough programs for all processors, none with fewer than four blocks of keys."""
    if device.type != "cuda":
        return 1
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count // (len(tiled.tiles) * kv_heads)
    most = min(wanted, tiled.longest // (4 * BLOCK_KEYS), _MOST_SPLITS)
    return 1 << max(0, most.bit_length() - 1)


def tiled_batch(batch: RaggedBatch, options: AttentionOptions, groups: int) -> TiledBatch:
    key = ("triton", options.window, options.symmetric, groups)
    tiled = batch.plans.get(key)
    if tiled is None:
        tiled = batch.plans[key] = _tile_batch(batch, options, groups)
    return tiled  # type: ignore[return-value]


def _tile_batch(batch: RaggedBatch, options: AttentionOptions, groups: int) -> TiledBatch:
    tokens_wanted = min(max(segment.length for segment in batch.segments), 64)
    rows = max(16, triton.next_power_of_2(groups), min(64, triton.next_power_of_2(tokens_wanted * groups)))
    step = rows // groups
    segments: list[tuple[int, ...]] = []
    tiles: list[tuple[int, int, int, int]] = []
    pages: list[int] = []
    masks: list[Tensor] = []
    mask_size = 0
    for number, (segment, offset) in enumerate(zip(batch.segments, batch.offsets, strict=False)):
        mask, table = _seen_inside(segment), segment.table.pages
        kind = _TREE if mask is not None else _CAUSAL if segment.causal else _BIDIRECTIONAL
        row = (offset, segment.start, segment.length, kind.value, len(pages), len(table), mask_size)
        segments.append(row)
        pages += table
        if mask is not None:
            masks.append(mask.flatten())
            mask_size += mask.numel()
        for first in range(0, segment.length, step):
            tiles.append((number, first, *_seen(segment, first, step, options)))

    def tensor(rows_of: Sequence[object]) -> Tensor:
        return torch.from_numpy(np.array(rows_of, dtype=np.int32)).to(batch.token_ids.device)

    return TiledBatch(
        rows=rows,
        tiles=tensor(tiles),
        segments=tensor(segments),
        pages=tensor(pages),
        masks=tensor(torch.cat(masks).tolist() if masks else [0]),
        positions=batch.positions,
        longest=max(high - low for *_, low, high in tiles),
    )


def _seen(segment: Segment, first: int, count: int, options: AttentionOptions) -> tuple[int, int]:
    """Bounds ``[low, high)`` of the keys that any of ``count`` tokens of the segment sees, the first being ``first``."""
    low, high = first_visible(segment, options.window), segment.end
    start, end = segment.start + first, min(segment.start + first + count, high)
    if segment.causal and segment.parents is None and segment.groups is None:
        return low if options.window is None else max(low, start - options.window + 1), end
    if not segment.causal and options.symmetric and options.window is not None:
        return max(low, start - options.window), min(high, end + options.window)
    return low, high
