"""Attention of blocks in training: each sees its own document's features before its anchor, and itself, nothing else.

Three implementations of the one rule in ``Layout.allowed``: ``dense`` (an explicit mask over all keys: slow, the reference),
``grouped`` (one product per document, for CPUs) and ``flex`` (FlexAttention's sparse kernel, for GPUs).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from volley.models.drafter import Attend

Context = list[tuple[Tensor, Tensor]]
"""K and V ``[D · S, kv_heads, d]`` of every draft layer (``Drafter.context_kv``)."""


@dataclass(frozen=True)
class Layout:
    """``D`` right-padded documents of ``length`` S, each with ``A`` blocks of ``block_size`` B at ``anchors [D, A]``.

    Queries are the rows of all blocks, ``[D · A · B]``; keys are ``[D · S context | D · A · B block rows]``.
    """

    anchors: Tensor
    length: int
    block_size: int
    window: int | None = None

    @property
    def documents(self) -> int:
        return self.anchors.shape[0]

    @property
    def blocks(self) -> int:
        """Blocks of a document, A."""
        return self.anchors.shape[1]

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether query row ``query`` may see key row ``key`` (broadcast): the whole rule (DFlash §4.2, Figure 4)."""
        block = query // self.block_size
        anchor = self.anchors.flatten()[block]
        context_rows = self.documents * self.length
        position = key % self.length
        before = position < anchor
        if self.window is not None:
            before = before & (position >= anchor - self.window)
        in_context = (key < context_rows) & (key // self.length == block // self.blocks) & before
        in_block = (key >= context_rows) & ((key - context_rows) // self.block_size == block)
        return in_context | in_block

    def dense_mask(self) -> Tensor:
        """``[D·A·B, D·S + D·A·B]`` bool."""
        queries = self.anchors.numel() * self.block_size
        device = self.anchors.device
        query = torch.arange(queries, device=device)[:, None]
        return self.allowed(query, torch.arange(self.documents * self.length + queries, device=device)[None])

    def context_mask(self) -> Tensor:
        """``[D, A, S]`` bool: the context part of the rule by document, true where hidden."""
        position = torch.arange(self.length, device=self.anchors.device)
        hidden = position >= self.anchors[..., None]
        if self.window is not None:
            hidden |= position < self.anchors[..., None] - self.window
        return hidden


def attend_dense(layout: Layout, context: Context) -> Attend:
    """The reference: one boolean mask over all documents and blocks."""
    mask = layout.dense_mask()

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        context_keys, context_values = context[layer]
        group = queries.shape[1] // keys.shape[1]
        all_keys = torch.cat([context_keys, keys]).repeat_interleave(group, 1)
        all_values = torch.cat([context_values, values]).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, all_keys).float() / math.sqrt(queries.shape[-1])
        probs = scores.masked_fill(~mask, -math.inf).softmax(-1).to(queries.dtype)
        return torch.einsum("hqk,khd->qhd", probs, all_values)

    return attend


def attend_grouped(layout: Layout, context: Context) -> Attend:
    """Documents as a batch: scores against the document's S positions and the block's own B, joined by one softmax."""
    documents, blocks, size = layout.documents, layout.blocks, layout.block_size
    hidden = layout.context_mask()[:, None, None, :, None]

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        heads, dim = queries.shape[1:]
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        own = (documents, kv_heads, group, blocks, size)
        context_keys, context_values = (
            x.view(documents, layout.length, kv_heads, dim).transpose(1, 2) for x in context[layer]
        )
        block_keys, block_values = (
            x.view(documents, blocks, size, kv_heads, dim).permute(0, 3, 1, 2, 4)[:, :, None] for x in (keys, values)
        )
        scaled = queries * dim**-0.5
        scaled = scaled.view(documents, blocks, size, kv_heads, group, dim).permute(0, 3, 4, 1, 2, 5)
        scaled = scaled.reshape(documents, kv_heads, -1, dim)
        to_context = (scaled @ context_keys.transpose(-1, -2)).view(*own, layout.length)
        to_block = scaled.view(*own, dim) @ block_keys.transpose(-1, -2)
        scores = torch.cat([to_context.masked_fill(hidden, -math.inf), to_block], -1)
        probs = scores.softmax(-1)
        seen = probs[..., : layout.length].reshape(documents, kv_heads, -1, layout.length) @ context_values
        mixed = seen.view(*own, dim) + probs[..., layout.length :] @ block_values
        return mixed.permute(0, 3, 4, 1, 2, 5).reshape(-1, heads, dim)

    return attend


def attend_flex(layout: Layout, context: Context) -> Attend:
    """FlexAttention over the flat layout; whole tiles that the rule hides are never computed."""
    from torch.nn.attention.flex_attention import create_block_mask

    queries_count = layout.anchors.numel() * layout.block_size
    keys_count = layout.documents * layout.length + queries_count

    def mask_mod(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return layout.allowed(query, key)

    mask = create_block_mask(
        mask_mod, None, None, queries_count, keys_count, device=str(layout.anchors.device), _compile=True
    )
    kernel = _flex_kernel()

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        all_keys, all_values = (torch.cat(pair) for pair in zip(context[layer], (keys, values), strict=True))
        q, k, v = (x.transpose(0, 1)[None] for x in (queries, all_keys, all_values))
        mixed: Tensor = kernel(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
        return mixed[0].transpose(0, 1)

    return attend


_compiled_flex: list[Callable[..., Any]] = []


def _flex_kernel() -> Callable[..., Any]:
    """FlexAttention is only worth its name when compiled; compile it once for the process."""
    if not _compiled_flex:
        from torch.nn.attention.flex_attention import flex_attention

        _compiled_flex.append(torch.compile(flex_attention, dynamic=True))
    return _compiled_flex[0]


ATTENTION: dict[str, Callable[[Layout, Context], Attend]] = {
    "dense": attend_dense,
    "grouped": attend_grouped,
    "flex": attend_flex,
}
