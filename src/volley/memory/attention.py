"""The attention seam: a ragged batch attends to its pages, whatever the model and the phase.

Implementations of one signature, ``attend(batch, store, layer, queries, keys, values, options) -> [T, heads, d]``:
``reference_attention`` is a loop anybody can check; ``paged_attention`` groups segments of one shape into one call of
PyTorch's fused kernel, reads a dense store in place when a request's pages are consecutive, and plans once per batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from volley.memory import kernels
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_store import KVStore

Attention = Callable[[RaggedBatch, KVStore, int, Tensor, Tensor, Tensor, "AttentionOptions"], Tensor]


class AttentionOptions(NamedTuple):
    """What a layer asks of attention beyond Q, K and V."""

    scale: float
    window: int | None = None
    """A causal token sees the last ``window`` positions, itself included; a bidirectional segment sees ``window``
    positions before it and all of itself."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """One learnt logit per head ``[heads]`` that takes probability and gives nothing (gpt-oss)."""
    symmetric: bool = False
    """A token of a bidirectional segment sees ``window`` positions before it and after it."""


def first_visible(segment: Segment, window: int | None) -> int:
    """The first position that any token of the segment may see."""
    if window is None:
        return 0
    return max(0, segment.start - window + segment.causal)


def visible_mask(segment: Segment, window: int | None, first: int, symmetric: bool = False) -> Tensor:
    """Which of positions ``[first, end)`` each token of the segment sees: boolean ``[length, end − first]``."""
    keys = torch.arange(first, segment.end)
    if not segment.causal and symmetric and window is not None:
        return (keys - torch.arange(segment.start, segment.end)[:, None]).abs() <= window
    if not segment.causal:
        return (keys >= first_visible(segment, window)).expand(segment.length, -1)
    if segment.parents is not None:
        return _visible_in_tree(segment, segment.parents, window, first)
    queries = torch.arange(segment.start, segment.end)[:, None]
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)


def _visible_in_tree(segment: Segment, parents: tuple[int, ...], window: int | None, first: int) -> Tensor:
    visible = np.ones((segment.length, segment.end - first), dtype=np.bool_)
    inside = visible[:, segment.start - first :]
    inside[:] = np.eye(segment.length, dtype=np.bool_)
    for token, parent in enumerate(parents, start=1):
        inside[token] |= inside[parent]
    if window is not None:
        queries = segment.positions().numpy()
        keys = np.concatenate((np.arange(first, segment.start), queries))
        visible &= keys > queries[:, None] - window
    return torch.from_numpy(visible)


def reference_attention(
    batch: RaggedBatch,
    store: KVStore,
    layer: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Attention written out segment by segment in fp32; queries ``[T, heads, d]``, keys and values ``[T, kv_heads, d]``."""
    for segment, start in zip(batch.segments, batch.offsets, strict=False):
        rows = slice(start, start + segment.length)
        store.write(layer, segment.table.slots(segment.start, segment.end), keys[rows], values[rows])
    output = torch.empty_like(queries)
    groups = queries.shape[1] // keys.shape[1]
    for segment, start in zip(batch.segments, batch.offsets, strict=False):
        rows = slice(start, start + segment.length)
        first = first_visible(segment, options.window)
        seen = store.extract(layer, segment.table, first, segment.end)
        k, v = (x.float().repeat_interleave(groups, dim=1) for x in seen)
        scores = torch.einsum("qhd,khd->hqk", queries[rows].float(), k) * options.scale
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        visible = visible_mask(segment, options.window, first, options.symmetric)
        scores = scores.masked_fill(~visible.to(scores.device), -torch.inf)
        if options.sinks is not None:
            sink = options.sinks.float()[:, None, None].expand(-1, segment.length, 1)
            scores = torch.cat((scores, sink), dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(k)]
        output[rows] = torch.einsum("hqk,khd->qhd", weights, v).to(output.dtype)
    return output


_COPY_LIMIT = 2**17  # bytes of one layer's K/V of one request that a copy may take before a call of its own is cheaper


def attention_for(device: torch.device) -> Attention:
    """The fastest implementation on ``device``."""
    if kernels.usable(device):
        from volley.memory.kernels.attention import ragged_attention

        return ragged_attention
    return paged_attention


@dataclass(slots=True)
class _Group:
    """Segments of one length and causality, attended in one call."""

    rows: slice | Tensor  # their tokens in the batch
    count: int
    slots: slice | Tensor  # where their keys live: a slice or [S] for one segment, [count · S] padded for several
    mask: Tensor | None  # additive [count, 1, length, S]; None when every token sees every key


def paged_attention(
    batch: RaggedBatch,
    store: KVStore,
    layer: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """The fast path; same contract as :func:`reference_attention`."""
    store.write(layer, write_slots(batch), keys, values)
    groups = _plan(batch, options, queries.dtype, keys[0].nbytes + values[0].nbytes)
    queries = store.rotate(layer, queries)
    if len(groups) == 1 and isinstance(groups[0].rows, slice):
        return store.unrotate(layer, _attend_group(groups[0], store, layer, queries, options))
    output = torch.empty_like(queries)
    for group in groups:
        output[group.rows] = _attend_group(group, store, layer, queries[group.rows], options)
    return store.unrotate(layer, output)


def _attend_group(group: _Group, store: KVStore, layer: int, queries: Tensor, options: AttentionOptions) -> Tensor:
    heads, dim = queries.shape[1:]
    q = queries.view(group.count, -1, heads, dim).transpose(1, 2)
    k, v = (x.view(group.count, -1, *x.shape[1:]).transpose(1, 2) for x in store.read(layer, group.slots))
    if options.sinks is None and options.softcap is None:
        if (
            q.shape[2] == 1
        ):  # heads that share keys become rows: the CPU's kernel is up to seven times slower for one row
            q = q.view(group.count, k.shape[1], -1, dim)
        mixed = scaled_dot_product_attention(
            q, k, v, attn_mask=group.mask, scale=options.scale, enable_gqa=q.shape[1] != k.shape[1]
        ).view(group.count, heads, -1, v.shape[-1])
    else:
        mixed = _explicit_attention(q, k, v, group.mask, options)
    return mixed.transpose(1, 2).reshape(-1, heads, v.shape[-1])


def _explicit_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: AttentionOptions) -> Tensor:
    """For what the fused kernel cannot do: capped scores and attention sinks."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if mask is not None:
        scores = scores + mask
    if options.sinks is not None:
        sink = options.sinks.float()[:, None, None].expand(len(q), -1, q.shape[2], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[2]]
    return torch.matmul(weights.to(v.dtype), v)


def write_slots(batch: RaggedBatch) -> slice | Tensor:
    """Where the K/V of the batch's tokens belong."""
    slots = batch.plans.get("write")
    if slots is None:
        segments = batch.segments
        if len(segments) == 1:
            slots = segments[0].table.slots(segments[0].start, segments[0].end)
        else:
            slots = torch.from_numpy(np.concatenate([s.table.slot_array(s.start, s.end) for s in segments]))
        if isinstance(slots, Tensor):
            slots = slots.to(batch.token_ids.device)
        batch.plans["write"] = slots
    return slots  # type: ignore[return-value]


def _plan(batch: RaggedBatch, options: AttentionOptions, dtype: torch.dtype, token_bytes: int) -> list[_Group]:
    window = options.window
    key = (window, options.symmetric, dtype, token_bytes)
    plan = batch.plans.get(key)
    if plan is None:
        alone: list[list[int]] = []
        shapes: dict[tuple[int, bool], list[int]] = {}
        for index, segment in enumerate(batch.segments):
            if _worth_a_call(segment, window, token_bytes, batch.token_ids.device):
                alone.append([index])
            else:
                shapes.setdefault((segment.length, segment.causal), []).append(index)
        plan = batch.plans[key] = [_build_group(batch, each, options, dtype) for each in (*alone, *shapes.values())]
    return plan  # type: ignore[return-value]


def _worth_a_call(segment: Segment, window: int | None, token_bytes: int, device: torch.device) -> bool:
    """Whether reading the segment's K/V in place, in a call of its own, is cheaper than copying them into a group."""
    size = (segment.end - first_visible(segment, window)) * token_bytes
    return device.type == "cpu" and size >= _COPY_LIMIT and segment.table.is_consecutive


def _build_group(batch: RaggedBatch, members: list[int], options: AttentionOptions, dtype: torch.dtype) -> _Group:
    device, window = batch.token_ids.device, options.window
    segments = [batch.segments[index] for index in members]
    rows = _rows(batch, members)
    firsts = [first_visible(segment, window) for segment in segments]
    longest = max(segment.end - first for segment, first in zip(segments, firsts, strict=True))
    if len(segments) == 1:
        slots = segments[0].table.slots(firsts[0], segments[0].end)
        masks = [visible_mask(segments[0], window, firsts[0], options.symmetric)]
    else:
        padded = np.zeros((len(segments), longest), dtype=np.int64)
        masks = []
        for row, (segment, first) in enumerate(zip(segments, firsts, strict=True)):
            size = segment.end - first
            padded[row, :size] = segment.table.slot_array(first, segment.end)
            mask = torch.zeros(segment.length, longest, dtype=torch.bool)
            mask[:, :size] = visible_mask(segment, window, first, options.symmetric)
            masks.append(mask)
        slots = torch.from_numpy(padded.ravel())
    visible = torch.stack(masks)
    bias = None
    if not bool(visible.all()):
        bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)[:, None].to(device)
    return _Group(rows, len(segments), slots.to(device) if isinstance(slots, Tensor) else slots, bias)


def _rows(batch: RaggedBatch, members: list[int]) -> slice | Tensor:
    if members == list(range(members[0], members[-1] + 1)):
        return slice(batch.offsets[members[0]], batch.offsets[members[-1] + 1])
    spans = [torch.arange(batch.offsets[i], batch.offsets[i + 1]) for i in members]
    return torch.cat(spans).to(batch.token_ids.device)
