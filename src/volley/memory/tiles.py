"""Describe a batch for the Triton attention kernel: segments, their pages, and tiles of tokens with the keys they see."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from volley.memory.attention import first_visible, visible_mask
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.upload import upload, upload_together

BIDIRECTIONAL, CAUSAL, TREE = 0, 1, 2
PART = 256
"""Number of keys in a part."""

Ints = NDArray[np.signedinteger[Any]]


class Tiling(NamedTuple):
    """Division of a batch into tiles for layers of one type, and key of the :class:`TiledBatch` in the batch's plans."""

    window: int | None
    symmetric: bool
    tokens: int
    """Most tokens of a tile."""
    kv_heads: int


@dataclass(slots=True)
class TiledBatch:
    """Kernel inputs for a batch, shared by all layers with one tiling."""

    tiles: Tensor
    """Tiles ``[n, 4]`` int32: segment, its first token, and the keys ``[low, high)`` that any of the tile's tokens sees."""
    segments: Tensor
    """Segments ``[n, 7]`` int32: first row, start, length, type of attention, first page, number of pages, first cell of its
    mask."""
    cells: Tensor
    """Page ids of all segments, and masks ``[length, length]`` inside all trees and groups; int32."""
    positions: Tensor
    origins: Tensor
    """Positions ``[T]`` from which each token's window is counted: its own, or the first of its group."""
    num_parts: int
    """Number of parts for the keys of the largest tile, or more."""


def tiled_batch(batch: RaggedBatch, tiling: Tiling) -> TiledBatch:
    """Return ``batch`` in tiles, made once."""
    tiled = batch.plans.get(tiling)
    if tiled is None:
        tiles = tile_array(batch.segments, tiling)
        device, origins = batch.token_ids.device, batch.positions
        on_device = upload_together([tiles, *segment_arrays(batch)], device)
        if tiling.window is not None and any(own.groups is not None or own.canvas for own in batch.segments):
            origins = upload(origin_array(batch.segments, symmetric=tiling.symmetric), device)
        named = dict(zip(("tiles", "segments", "cells"), on_device, strict=True))
        tiled = batch.plans[tiling] = TiledBatch(
            **named, positions=batch.positions, origins=origins, num_parts=most_parts(tiles)
        )
    return tiled  # type: ignore[return-value]


def segment_arrays(batch: RaggedBatch) -> tuple[Ints, Ints]:
    """Return ``segments`` and ``cells`` of a :class:`TiledBatch`."""
    rows, cells, size = list[tuple[int, ...]](), list[Ints](), 0
    for segment, offset in zip(batch.segments, batch.offsets, strict=False):
        mask, table = _seen_inside(segment), segment.table.pages
        kind = TREE if mask is not None else CAUSAL if segment.causal else BIDIRECTIONAL
        rows.append((offset, segment.start, segment.length, kind, size, len(table), size + len(table)))
        own = np.concatenate((table, [] if mask is None else mask.ravel()), dtype=np.int32, casting="unsafe")
        cells.append(own)
        size += len(own)
    return np.array(rows, dtype=np.int32), np.concatenate(cells)


def tile_array(segments: list[Segment], tiling: Tiling) -> Ints:
    """Return ``tiles`` of a :class:`TiledBatch`."""
    tiles = [
        (number, first, *_seen(segment, first, tiling))
        for number, segment in enumerate(segments)
        for first in range(0, segment.length, tiling.tokens)
    ]
    return np.array(tiles, dtype=np.int32)


def origin_array(segments: list[Segment], *, symmetric: bool) -> Ints:
    """Return ``origins`` of a :class:`TiledBatch`, int64."""
    return np.concatenate([_origins(segment, symmetric) for segment in segments])


def _origins(segment: Segment, symmetric: bool) -> Ints:
    if segment.groups is None:
        return segment.origins()
    starts, ends = segment.spans()
    if not symmetric:
        return starts
    # The window of a canvas token begins one position earlier than a causal one.
    return np.where(ends - starts > 1, np.arange(segment.start, segment.end) - 1, starts)


def most_parts(tiles: Ints) -> int:
    """Return the number of parts for the keys of the largest tile."""
    return int((-(-tiles[:, 3] // PART) - tiles[:, 2] // PART).max())


def _seen_inside(segment: Segment) -> NDArray[np.bool_] | None:
    """Return the mask ``[length, length]`` inside a tree or groups; ``None`` for a chain."""
    is_chain = segment.parents is None and segment.groups is None
    return None if is_chain else visible_mask(segment, None, segment.start).numpy()


def _seen(segment: Segment, first: int, tiling: Tiling) -> tuple[int, int]:
    """Return the bounds ``[low, high)`` of the keys that a tile's tokens see; ``first`` is the tile's first token."""
    low, high = first_visible(segment, tiling.window, tiling.symmetric), segment.end
    start, end = segment.start + first, min(segment.start + first + tiling.tokens, high)
    if segment.causal and segment.parents is None and segment.groups is None:
        return low if tiling.window is None else max(low, start - tiling.window + 1), end
    if not segment.causal and tiling.symmetric and tiling.window is not None:
        return max(low, start - tiling.window), min(high, end + tiling.window)
    return low, high
