"""A draft pass: blocks of several requests, each an anchor and masks, that see the features of their contexts in a K/V store."""

from collections.abc import Sequence

import torch
from torch import Tensor

from volley.memory.attention import Attention, AttentionOptions
from volley.memory.batch import RaggedBatch
from volley.memory.kv_store import KVStore
from volley.models.drafter import Drafter, Projection


def block_states(
    drafter: Drafter,
    batch: RaggedBatch,
    store: KVStore,
    attention: Attention,
    embed: Projection,
    windows: Sequence[int | None],
) -> Tensor:
    """Final states ``[T, H]`` of every token of ``batch``; its K/V are scratch behind the contexts'.

    ``embed`` gives the target's embeddings; ``windows`` are :meth:`Drafter.windows`.
    """
    scale = drafter.config.head_dim**-0.5

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(batch, store, layer, q, k, v, AttentionOptions(scale, windows[layer]))

    states: Tensor = drafter(drafter.embed(batch.token_ids, embed), batch.positions, attend)
    return states


def without_anchors(batch: RaggedBatch, states: Tensor) -> Tensor:
    """The states ``[Σ k, H]`` of the slots alone."""
    if len(batch.segments) == 1:
        return states[1:]
    keep = torch.ones(len(batch), dtype=torch.bool)
    keep[batch.offsets[:-1]] = False
    return states[keep.to(states.device)]
