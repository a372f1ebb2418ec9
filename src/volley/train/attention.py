"""Compute attention of training blocks: a block sees its document's features before its anchor, and its own tokens.

``Layout.allowed`` has this rule. It has three implementations: ``grouped`` (document by document, for CPUs), ``sdpa`` (PyTorch's
attention with a mask for each document, for GPUs) and ``flex`` (FlexAttention's sparse kernel, which is compiled first, for long
trainings with many blocks of long documents).
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from volley.models.drafters.drafter import Attend

log = logging.getLogger(__name__)
TILE_SCORES = 65_536  # scores per head of one tile; a tile and its copies should fit a core's L2 cache

MASK_CELLS = 2**27
"""Most cells of a mask. A cell takes a byte, and PyTorch converts it to a number of the scores' dtype."""

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
        """Number of blocks of a document, A."""
        return self.anchors.shape[1]

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """Return whether query row ``query`` may see key row ``key``, broadcast (DFlash §4.2, Figure 4)."""
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

    def context_mask(self) -> Tensor:
        """Return a mask ``[D, A, S]`` (boolean) of the context that each block must not see."""
        position = torch.arange(self.length, device=self.anchors.device)
        hidden = position >= self.anchors[..., None]
        if self.window is not None:
            hidden |= position < self.anchors[..., None] - self.window
        return hidden


def attend_grouped(layout: Layout, context: Context) -> Attend:
    """Attend document by document, a few blocks at a time (``_TiledAttention``)."""
    documents, blocks, size = layout.documents, layout.blocks, layout.block_size
    bounds = _tiles(layout)
    hidden = layout.context_mask()

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        heads, dim = queries.shape[1:]
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        rows = queries.view(documents, blocks, size, kv_heads, group, dim).permute(0, 3, 1, 4, 2, 5)
        rows = (rows * dim**-0.5).reshape(documents, kv_heads, blocks, group * size, dim)
        context_keys, context_values = (
            x.view(documents, layout.length, kv_heads, dim).transpose(1, 2).contiguous() for x in context[layer]
        )
        own_keys, own_values = (
            x.view(documents, blocks, size, kv_heads, dim).permute(0, 3, 1, 2, 4).contiguous() for x in (keys, values)
        )
        own = own_keys, own_values
        mixed: Tensor = _TiledAttention.apply(rows, context_keys, context_values, *own, hidden, bounds)  # type: ignore[no-untyped-call]
        mixed = mixed.view(documents, kv_heads, blocks, group, size, dim)
        return mixed.permute(0, 2, 4, 1, 3, 5).reshape(-1, heads, dim)

    return attend


Tile = tuple[int, slice, int]
"""Document, a slice of its blocks, and the number of context positions that the last of them sees."""


def _tiles(layout: Layout) -> list[Tile]:
    """Return runs of blocks whose scores fit the cache. Anchors ascend, so a run needs no key after its last anchor."""
    step = max(1, TILE_SCORES // (layout.block_size * (layout.length + layout.block_size)))
    anchors = layout.anchors.tolist()
    return [
        (document, slice(first, first + step), max(row[first : first + step]))
        for document, row in enumerate(anchors)
        for first in range(0, len(row), step)
    ]


class _TiledAttention(torch.autograd.Function):
    """Softmax attention of tiles over ``[context before the anchor | own block]``. The backward pass recomputes the scores.

    ``queries [D, kv, A, M, d]``, scaled, where M = group · B; context ``[D, kv, S, d]``; own ``[D, kv, A, B, d]``;
    ``hidden [D, A, S]``. Recomputing scores is faster than reading them from memory.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, *plan: Any
    ) -> Tensor:
        hidden, tiles = plan
        mixed = torch.empty_like(queries)
        for document, run, limit in tiles:
            probs = _tile_probs(queries, keys, own_keys, hidden, (document, run, limit))
            seen = probs[..., :limit].flatten(1, 2) @ values[document, :, :limit]
            mixed[document, :, run] = probs[..., limit:] @ own_values[document, :, run]
            mixed[document, :, run] += seen.view_as(mixed[document, :, run])
        ctx.save_for_backward(queries, keys, values, own_keys, own_values, hidden, mixed)
        ctx.tiles = tiles
        return mixed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, own_keys, own_values, hidden, mixed = ctx.saved_tensors
        grad = grad.contiguous()
        grad_queries, grad_own_keys, grad_own_values = map(torch.empty_like, (queries, own_keys, own_values))
        grad_keys, grad_values = (torch.zeros_like(x, dtype=torch.float32) for x in (keys, values))
        delta = (grad * mixed).sum(-1, keepdim=True)
        for document, run, limit in ctx.tiles:
            probs = _tile_probs(queries, keys, own_keys, hidden, (document, run, limit))
            here = (document, slice(None), run)
            flat_grad, flat_queries = grad[here].flatten(1, 2), queries[here].flatten(1, 2)
            to_context = (flat_grad @ values[document, :, :limit].mT).view(*probs.shape[:-1], limit)
            scores = torch.cat([to_context, grad[here] @ own_values[here].mT], -1)
            scores.sub_(delta[here]).mul_(probs)
            seen, score_seen = (x[..., :limit].flatten(1, 2) for x in (probs, scores))
            grad_values[document, :, :limit] += seen.mT @ flat_grad
            grad_keys[document, :, :limit] += score_seen.mT @ flat_queries
            grad_own_values[here] = probs[..., limit:].mT @ grad[here]
            grad_own_keys[here] = scores[..., limit:].mT @ queries[here]
            grad_queries[here] = scores[..., limit:] @ own_keys[here]
            grad_queries[here] += (score_seen @ keys[document, :, :limit]).view_as(queries[here])
        return (
            grad_queries, grad_keys.to(keys.dtype), grad_values.to(keys.dtype), grad_own_keys, grad_own_values, None, None
        )  # fmt: skip


def _tile_probs(queries: Tensor, keys: Tensor, own_keys: Tensor, hidden: Tensor, tile: Tile) -> Tensor:
    """Return the softmax ``[kv, n, M, limit + B]`` of a tile."""
    document, run, limit = tile
    rows = queries[document, :, run]
    to_context = (rows.flatten(1, 2) @ keys[document, :, :limit].mT).view(*rows.shape[:-1], limit)
    to_context.masked_fill_(hidden[document, run, None, :limit], -math.inf)
    return torch.cat([to_context, rows @ own_keys[document, :, run].mT], -1).softmax(-1)


def attend_sdpa(layout: Layout, context: Context) -> Attend:
    """Attend some documents at a time: queries of all blocks of a document, keys of its context and its blocks, and a mask."""
    documents, blocks = layout.documents, layout.blocks
    rows = blocks * layout.block_size
    seen = (~layout.context_mask()).repeat_interleave(layout.block_size, dim=1)
    block = torch.arange(rows, device=seen.device) // layout.block_size
    own = (block[:, None] == block).expand(documents, -1, -1)
    together = max(1, MASK_CELLS // (rows * (layout.length + rows)))

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        heads, dim = queries.shape[1:]
        group = heads // keys.shape[1]
        q = queries.view(documents, rows, heads, dim).transpose(1, 2)
        k, v = (
            torch.cat([x.view(documents, -1, *x.shape[1:]) for x in pair], dim=1)
            .repeat_interleave(group, 2)
            .transpose(1, 2)
            for pair in zip(context[layer], (keys, values), strict=True)
        )
        mixed = [
            scaled_dot_product_attention(q[some], k[some], v[some], torch.cat([seen[some], own[some]], dim=2)[:, None])
            for some in (slice(first, first + together) for first in range(0, documents, together))
        ]
        return torch.cat(mixed).transpose(1, 2).reshape(-1, heads, dim)

    return attend


def attend_flex(layout: Layout, context: Context) -> Attend:
    """Attend with FlexAttention over the flat layout. Tiles that the rule hides as a whole are not computed."""
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


compiled_flex: list[Callable[..., Any]] = []


def _flex_kernel() -> Callable[..., Any]:
    """Compile FlexAttention once per process. Uncompiled, it holds all scores in memory."""
    if not compiled_flex:
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention, dynamic=True)

        def first(*given: Any, **options: Any) -> Any:
            started = time.perf_counter()
            mixed = compiled(*given, **options)
            log.warning("FlexAttention was compiled in %.0f s", time.perf_counter() - started)
            compiled_flex[0] = compiled
            return mixed

        compiled_flex.append(first)
    return compiled_flex[0]


ATTENTION: dict[str, Callable[[Layout, Context], Attend]] = {
    "grouped": attend_grouped,
    "sdpa": attend_sdpa,
    "flex": attend_flex,
}
