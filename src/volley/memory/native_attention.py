"""Compute attention of bf16 models on a CPU with a C kernel. Unsupported attention goes to :func:`paged_attention`."""

import numpy as np
import torch
from torch import Tensor

from volley import native
from volley.memory.attention import AttentionOptions, IntArray, first_visible, paged_attention
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_store import DenseKVStore, KVStore
from volley.native.decoder import AttentionPlan, attends


def native_attention(
    batch: RaggedBatch,
    store: KVStore,
    layer: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Compute :func:`paged_attention`. A token's result is batch-invariant, bit for bit."""
    if not (serves(store, options) and _is_regular(queries, keys, values)):
        return paged_attention(batch, store, layer, queries, keys, values, options)
    assert isinstance(store, DenseKVStore)
    plan = attention_plan(batch, options.window)
    pools = store.keys[layer], store.values[layer]
    return plan.attend(queries, keys, values, *pools, options.scale, options.softcap, options.sinks)


def serves(store: KVStore, options: AttentionOptions) -> bool:
    """Return True if the kernel supports such attention over such a store."""
    if options.symmetric and options.window is not None:
        return False
    if not (native.available and isinstance(store, DenseKVStore)):
        return False
    pool = store.keys[0]
    return pool.dtype == torch.bfloat16 and pool.device.type == "cpu"


def _is_regular(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return True if the kernel can read such rows: packed, and as far apart in all three. One row has any stride."""

    def packed(x: Tensor) -> bool:
        return x.stride(2) == 1 and x.stride(1) == x.shape[2]

    def apart(x: Tensor) -> bool:
        return len(x) == 1 or x.stride(0) == queries.stride(0)

    fits = attends(queries.shape[1], *keys.shape[1:])
    return fits and all(packed(x) and apart(x) for x in (queries, keys, values))


def attention_plan(batch: RaggedBatch, window: int | None) -> AttentionPlan:
    """Return the plan of a batch for layers with this window, made once."""
    key = ("native", window)
    plan = batch.plans.get(key)
    if plan is None:
        plan = batch.plans[key] = _make_plan(batch, window)
    return plan  # type: ignore[return-value]


def _make_plan(batch: RaggedBatch, window: int | None) -> AttentionPlan:
    units: list[tuple[int, int, int, int, int]] = []
    slots: list[IntArray] = []
    entries = 0
    begins, ends = np.zeros((2, len(batch)), dtype=np.int64)
    written = np.concatenate([s.table.slot_array(s.start, s.end) for s in batch.segments])
    for segment, row in zip(batch.segments, batch.offsets, strict=False):
        first, rows = first_visible(segment, window), slice(row, row + segment.length)
        seen = segment.table.slot_array(first, segment.end)
        if segment.parents is None:
            begins[rows], ends[rows] = _seen(segment, first, window)
            units.append((row, segment.length, entries, len(seen), first))
            slots.append(seen)
            entries += len(seen)
        else:
            context = segment.start - first
            origins = segment.origins().tolist()
            for token, ancestors in enumerate(segment.ancestors()):  # each token sees a separate list of slots
                own = np.concatenate((seen[:context], seen[context:][ancestors]))
                ends[row + token] = first + len(own)
                begins[row + token] = first if window is None else max(first, origins[token] + 1 - window)
                units.append((row + token, 1, entries, len(own), first))
                slots.append(own)
                entries += len(own)
    arrays = (written, np.array(units, dtype=np.int64), np.concatenate(slots), begins, ends)
    return AttentionPlan(*(torch.from_numpy(array) for array in arrays))


def _seen(segment: Segment, first: int, window: int | None) -> tuple[IntArray | int, IntArray | int]:
    """Return the positions ``[begin, end)`` that each token of a segment sees; the segment must not be a tree."""
    if not segment.causal:
        return first, segment.end
    starts, ends = segment.spans()
    return first if window is None else np.maximum(first, starts + 1 - window), ends
