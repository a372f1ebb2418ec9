"""Attention as a plain loop in fp32, by which all implementations are judged."""

import torch
from torch import Tensor

from volley.memory.attention import AttentionOptions, first_visible, visible_mask
from volley.memory.batch import RaggedBatch
from volley.memory.kv_store import KVStore


def reference_attention(
    batch: RaggedBatch,
    store: KVStore,
    layer: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Compute attention segment by segment in fp32; queries are ``[T, heads, d]``, keys and values ``[T, kv_heads, d]``."""
    for segment, start in zip(batch.segments, batch.offsets, strict=False):
        rows = slice(start, start + segment.length)
        store.write(layer, segment.table.slots(segment.start, segment.end), keys[rows], values[rows])
    output = torch.empty_like(queries)
    groups = queries.shape[1] // keys.shape[1]
    for segment, start in zip(batch.segments, batch.offsets, strict=False):
        rows = slice(start, start + segment.length)
        first = first_visible(segment, options.window, options.symmetric)
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
