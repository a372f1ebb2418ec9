"""Attention of training blocks by its definition: one boolean mask over all documents and blocks, slow."""

import math

import torch
from torch import Tensor

from volley.models.drafters.drafter import Attend
from volley.train.attention import Context, Layout


def allowed(layout: Layout, query: Tensor, key: Tensor) -> Tensor:
    """Return whether query row ``query`` may see key row ``key``, broadcast: the whole rule (DFlash §4.2, Figure 4)."""
    block = query // layout.block_size
    anchor = layout.anchors.flatten()[block]
    context_rows = layout.documents * layout.length
    position = key % layout.length
    before = position < anchor
    if layout.window is not None:
        before = before & (position >= anchor - layout.window)
    in_context = (key < context_rows) & (key // layout.length == block // layout.blocks) & before
    in_block = (key >= context_rows) & ((key - context_rows) // layout.block_size == block)
    return in_context | in_block


def dense_mask(layout: Layout) -> Tensor:
    """Return the rule as a boolean ``[D · A · B, D · S + D · A · B]``."""
    queries = layout.anchors.numel() * layout.block_size
    query = torch.arange(queries)[:, None]
    return allowed(layout, query, torch.arange(layout.documents * layout.length + queries)[None])


def attend_dense(layout: Layout, context: Context) -> Attend:
    mask = dense_mask(layout)

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        context_keys, context_values = context[layer]
        group = queries.shape[1] // keys.shape[1]
        all_keys = torch.cat([context_keys, keys]).repeat_interleave(group, 1)
        all_values = torch.cat([context_values, values]).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, all_keys).float() / math.sqrt(queries.shape[-1])
        probs = scores.masked_fill(~mask, -math.inf).softmax(-1).to(queries.dtype)
        return torch.einsum("hqk,khd->qhd", probs, all_values)

    return attend
