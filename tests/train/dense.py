"""The rule of the trainer's attention as one boolean mask over all documents and blocks: slow, and the reference."""

import math

import torch
from torch import Tensor

from volley.models.drafters.drafter import Attend
from volley.train.attention import Context, Layout


def dense_mask(layout: Layout) -> Tensor:
    """``[D·A·B, D·S + D·A·B]`` bool."""
    queries = layout.anchors.numel() * layout.block_size
    device = layout.anchors.device
    query = torch.arange(queries, device=device)[:, None]
    return layout.allowed(query, torch.arange(layout.documents * layout.length + queries, device=device)[None])


def attend_dense(layout: Layout, context: Context) -> Attend:
    """The reference: one boolean mask over all documents and blocks."""
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
