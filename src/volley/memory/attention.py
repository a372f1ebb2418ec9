"""Compute attention of a ragged batch to its pages, for every model and phase.

All implementations have one signature, ``attend(batch, store, layer, queries, keys, values, options) -> [T, heads, d]``.
``paged_attention`` groups segments of one shape into one call of PyTorch's fused kernel, reads a dense store in place if a
request's pages are consecutive, and plans once per batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_store import KVStore
from volley.memory.upload import upload, upload_together

Attention = Callable[[RaggedBatch, KVStore, int, Tensor, Tensor, Tensor, "AttentionOptions"], Tensor]


class AttentionOptions(NamedTuple):
    """Attention settings of a layer."""

    scale: float
    window: int | None = None
    """Sliding window. A causal token sees the last ``window`` positions, itself included; a bidirectional segment sees
    ``window`` positions before it and all of itself."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """Attention sinks ``[heads]``: one learnt logit per head that takes probability and adds nothing (gpt-oss)."""
    symmetric: bool = False
    """True if a token of a bidirectional segment, or of a group of several tokens, sees ``window`` positions before it and
    after it."""


def first_visible(segment: Segment, window: int | None, symmetric: bool = False) -> int:
    """Return the first position that any token of the segment may see."""
    first = segment.table.first
    sees_itself_within = segment.causal and not (symmetric and segment.groups is not None)
    return first if window is None else max(first, segment.start - window + sees_itself_within)


def visible_mask(segment: Segment, window: int | None, first: int, symmetric: bool = False) -> Tensor:
    """Return which of positions ``[first, end)`` each token of the segment sees: boolean ``[length, end − first]``."""
    keys, queries = np.arange(first, segment.end), np.arange(segment.start, segment.end)[:, None]
    if segment.parents is not None:
        return _visible_in_tree(segment, window, first)
    if segment.causal:
        begins, ends = (own[:, None] for own in segment.spans())
        visible = keys < ends
        if window is not None:
            near = keys > begins - window
            if symmetric:
                near = np.where(ends - begins > 1, np.abs(keys - queries) <= window, near)
            visible &= near
    elif symmetric and window is not None:
        visible = np.abs(keys - queries) <= window
    else:
        visible = (keys >= first_visible(segment, window))[None].repeat(segment.length, axis=0)
    return torch.from_numpy(visible)


def _visible_in_tree(segment: Segment, window: int | None, first: int) -> Tensor:
    visible = np.ones((segment.length, segment.end - first), dtype=np.bool_)
    visible[:, segment.start - first :] = segment.ancestors()
    if window is not None:
        keys = np.concatenate((np.arange(first, segment.start), segment.positions()))
        visible &= keys > segment.origins()[:, None] - window
    return torch.from_numpy(visible)


IntArray = np.ndarray[Any, np.dtype[np.int64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]
_SHORT = 16  # segments up to this length may share a call if their lengths differ


class GroupLimits(NamedTuple):
    """Limits of a group, measured on a CPU. A segment beyond them is faster in a separate call."""

    copied_bytes: int = 2**17
    """Most bytes of one layer's K/V of one request that a group copies."""
    padded_rows: int = 32
    """Most padding tokens that a group adds to equalise its segments."""
    padded_keys: int = 512
    """Most padding keys that a group reads for the same purpose."""


DEFAULT_LIMITS = GroupLimits()


@dataclass(slots=True)
class _Group:
    """Segments of one causality and of similar lengths, which attend in one call, padded to the longest."""

    rows: slice  # rows of their tokens, in the order of the groups
    count: int
    slots: slice | Tensor  # slots of their keys: a slice or [S] for one segment, [count · S] with padding for several
    mask: Tensor | None  # additive [count, 1, length or 1, S]; None when every token sees every key
    repeated: dict[int, Tensor] = field(default_factory=dict)  # the mask repeated for heads that share keys


class _GroupedBatch(NamedTuple):
    groups: list[_Group]
    taken: Tensor | None
    """Indices of the batch's tokens in the order of the groups; a segment's first token repeats as padding. ``None``: the
    order of the batch, without padding."""
    places: Tensor | None
    """Row of each token of the batch in that order. ``None``: the order of the batch."""


def paged_attention(
    batch: RaggedBatch,
    store: KVStore,
    layer: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    options: AttentionOptions,
    limits: GroupLimits = DEFAULT_LIMITS,
) -> Tensor:
    """Compute attention of ``queries [T, heads, d]`` to ``keys`` and ``values`` ``[T, kv_heads, d]`` and those stored before.

    ``limits`` change only its speed.
    """
    store.write(layer, write_slots(batch), keys, values)
    groups, taken, places = _grouped(batch, options, queries.dtype, keys[0].nbytes + values[0].nbytes, limits)
    queries = store.rotate(layer, queries)
    if taken is not None:
        queries = queries.index_select(0, taken)
    outputs = [_attend_group(group, store, layer, queries[group.rows], options) for group in groups]
    output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    if places is not None:
        output = output.index_select(0, places)
    return store.unrotate(layer, output)


def _attend_group(group: _Group, store: KVStore, layer: int, queries: Tensor, options: AttentionOptions) -> Tensor:
    heads, dim = queries.shape[1:]
    q = queries.view(group.count, -1, heads, dim).transpose(1, 2)
    k, v = (x.view(group.count, -1, *x.shape[1:]).transpose(1, 2) for x in store.read(layer, group.slots))
    if options.sinks is None and options.softcap is None:
        sharing, mask = heads // k.shape[1], group.mask
        if sharing > 1 and q.shape[2] <= _SHORT:  # heads that share keys become rows: up to seven times faster on a CPU
            q, mask = q.reshape(group.count, k.shape[1], -1, dim), _repeated_mask(group, sharing)
        mixed = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=options.scale, enable_gqa=q.shape[1] != k.shape[1]
        ).reshape(group.count, heads, -1, v.shape[-1])  # a view where SDPA's layout allows it
    else:
        mixed = _explicit_attention(q, k, v, group.mask, options)
    return mixed.transpose(1, 2).reshape(-1, heads, v.shape[-1])


def _repeated_mask(group: _Group, times: int) -> Tensor | None:
    if group.mask is None or group.mask.shape[2] == 1:
        return group.mask
    if times not in group.repeated:
        group.repeated[times] = group.mask.repeat(1, 1, times, 1)
    return group.repeated[times]


def _explicit_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: AttentionOptions) -> Tensor:
    """Compute attention that the fused kernel does not support: capped scores and attention sinks."""
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
    """Return the K/V slots of the batch's tokens."""
    slots = batch.plans.get("write")
    if slots is None:
        segments = batch.segments
        if len(segments) == 1:
            slots = segments[0].table.slots(segments[0].start, segments[0].end)
        else:
            slots = torch.from_numpy(np.concatenate([s.table.slot_array(s.start, s.end) for s in segments]))
        if isinstance(slots, Tensor):
            slots = upload(slots.numpy(), batch.token_ids.device)
        batch.plans["write"] = slots
    return slots  # type: ignore[return-value]


def _grouped(
    batch: RaggedBatch, options: AttentionOptions, dtype: torch.dtype, token_bytes: int, limits: GroupLimits
) -> _GroupedBatch:
    window = options.window
    key = (window, options.symmetric, dtype, token_bytes, limits)
    grouped = batch.plans.get(key)
    if grouped is None:
        alone: list[list[int]] = []
        shapes: dict[tuple[int, bool], list[int]] = {}
        for index, segment in enumerate(batch.segments):
            if _worth_a_call(segment, window, token_bytes, batch.token_ids.device, limits.copied_bytes):
                alone.append([index])
            else:
                shapes.setdefault((max(segment.length, _SHORT), segment.causal), []).append(index)
        seen = [segment.end - first_visible(segment, window, options.symmetric) for segment in batch.segments]
        lengths = [segment.length for segment in batch.segments]
        groups = [
            group
            for members in shapes.values()
            for alike in _split(members, lengths, limits.padded_rows)
            for group in _split(alike, seen, limits.padded_keys)
        ]
        grouped = batch.plans[key] = _group_batch(batch, [*alone, *groups], options, dtype)
    return grouped  # type: ignore[return-value]


def _group_batch(
    batch: RaggedBatch, groups: list[list[int]], options: AttentionOptions, dtype: torch.dtype
) -> _GroupedBatch:
    device = batch.token_ids.device
    padded = [_padded(batch, members) for members in groups]
    ends = np.cumsum([rows.size for rows, _ in padded])
    built = [
        _build_group(batch, members, slice(int(end) - rows.size, int(end)), options, dtype)
        for members, (rows, _), end in zip(groups, padded, ends, strict=True)
    ]
    taken = np.concatenate([rows.ravel() for rows, _ in padded])
    if np.array_equal(taken, np.arange(len(batch))):
        return _GroupedBatch(built, None, None)
    real = np.concatenate([inside.ravel() for _, inside in padded])
    places = np.empty(len(batch), dtype=np.int64)
    places[taken[real]] = np.flatnonzero(real)
    return _GroupedBatch(built, *upload_together([taken, places], device))


def _split(members: list[int], sizes: list[int], limit: int) -> list[list[int]]:
    """Divide segments into groups by size: padding a group to its largest segment adds about ``limit`` at most."""
    own = [sizes[index] for index in members]
    if len(members) * (max(own) - min(own)) < limit:
        return [members]
    ordered = sorted(members, key=lambda index: -sizes[index])
    groups: list[list[int]] = [[]]
    for place, index in enumerate(ordered):
        if groups[-1] and (sizes[groups[-1][0]] - sizes[index]) * (len(ordered) - place) >= limit:
            groups.append([])
        groups[-1].append(index)
    return groups


def _worth_a_call(
    segment: Segment, window: int | None, token_bytes: int, device: torch.device, copied_bytes: int
) -> bool:
    """Return True if reading the segment's K/V in place, in a separate call, is faster than copying them into a group."""
    size = (segment.end - first_visible(segment, window)) * token_bytes
    return device.type == "cpu" and size >= copied_bytes and segment.table.is_consecutive


def _build_group(
    batch: RaggedBatch, members: list[int], rows: slice, options: AttentionOptions, dtype: torch.dtype
) -> _Group:
    device, window = batch.token_ids.device, options.window
    segments = [batch.segments[index] for index in members]
    firsts = [first_visible(segment, window, options.symmetric) for segment in segments]
    length = 1 if all(_see_alike(own, options) for own in segments) else max(own.length for own in segments)
    longest = max(segment.end - first for segment, first in zip(segments, firsts, strict=True))
    slots: slice | Tensor = segments[0].table.slots(firsts[0], segments[0].end)
    every = np.empty((len(segments), longest), dtype=np.int64)
    visible = np.zeros((len(segments), length, longest), dtype=np.bool_)
    for place, (segment, first) in enumerate(zip(segments, firsts, strict=True)):
        mask = visible_mask(segment, window, first, options.symmetric).numpy()
        # A padding token sees what the segment's last token sees, because the softmax over no key would be NaN.
        visible[place, :, : mask.shape[1]] = mask[np.minimum(np.arange(length), segment.length - 1)]
        if len(segments) > 1:
            own = segment.table.slot_array(first, segment.end)
            every[place] = own[0]  # a weight of 0 does not hide a NaN, so padding reads the segment's own slot
            every[place, : len(own)] = own
            slots = torch.from_numpy(every.ravel())
    bias = None
    if not visible.all():
        hidden = upload(~visible, device)
        bias = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)[:, None]
    slots = upload(slots.numpy(), device) if isinstance(slots, Tensor) else slots
    return _Group(rows, len(segments), slots, bias)


def _see_alike(segment: Segment, options: AttentionOptions) -> bool:
    """Return True if all tokens of a segment see the same keys, as in a canvas; then one mask row serves them all."""
    is_canvas = not segment.causal or segment.groups == (segment.length,)
    return is_canvas and (options.window is None or not options.symmetric)


def _padded(batch: RaggedBatch, members: list[int]) -> tuple[IntArray, BoolArray]:
    """Return the token indices of the segments ``members`` ``[count, longest]``, padded with each one's first token, and which
    are real."""
    lengths = np.array([batch.segments[index].length for index in members])[:, None]
    starts = np.array([batch.offsets[index] for index in members])[:, None]
    places = np.arange(lengths.max())
    inside = places < lengths
    return np.where(inside, starts + places, starts), inside
