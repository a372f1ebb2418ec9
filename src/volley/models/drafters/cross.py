"""A drafter that attends to the target's own K/V (AitherOS): it makes none of its context and reads no hidden states.

Each layer attends to its block in both directions, then to the K/V of one layer of the target, then runs a gated MLP. Queries
are rotated by their positions in the text, as the target's keys are. A mask has a row of its own beside the target's embedding.
A timestep embedding says how much of the block is still masked.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from volley.errors import MismatchError
from volley.models.checkpoints.checkpoint import DrafterConfig
from volley.models.drafters.drafter import DraftAttention, Drafter, DraftMLP, RMSNorm

MASK = -1
"""Stands for a mask among token ids; it is no token of the target's vocabulary."""
CrossAttend = Callable[[int, Tensor], Tensor]
"""Attention to the target's K/V: ``attend(layer, queries [N, B, heads, d]) -> [N, B, heads, d]``."""


class CrossAttention(DraftAttention):
    """Queries and outputs of an attention whose keys and values are the target's."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        del self.k_proj, self.v_proj, self.k_norm


class CrossLayer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn_norm, self.self_attn = RMSNorm(width, eps), DraftAttention(config)
        self.cross_attn_norm, self.cross_attn = RMSNorm(width, eps), CrossAttention(config)
        self.mlp_norm, self.mlp = RMSNorm(width, eps), DraftMLP(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Return states ``[N, B, H]`` of N blocks."""
        own, cross = self.self_attn, self.cross_attn
        normed = self.self_attn_norm(hidden)
        rows = (own.queries(normed, cos, sin), *own.keys_values(normed, cos, sin))
        queries, keys, values = (x.transpose(1, 2) for x in rows)
        mixed = scaled_dot_product_attention(queries, keys, values, enable_gqa=True).transpose(1, 2)
        hidden = hidden + own.o_proj(mixed.flatten(-2))
        mixed = attend(cross.queries(self.cross_attn_norm(hidden), cos, sin))
        hidden = hidden + cross.o_proj(mixed.flatten(-2))
        output: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return output


class CrossDrafter(Drafter):
    """Layer i reads the K/V of the target's layer ``target_layer_ids[i]``. The config's mask token is not used."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        del self.fc, self.hidden_norm
        self.layers = nn.ModuleList(CrossLayer(config) for _ in config.target_layer_ids)
        self.mask = nn.Parameter(torch.empty(config.hidden_size).normal_(std=0.02))
        self.timestep = nn.Embedding(config.block_size, config.hidden_size)
        nn.init.zeros_(self.timestep.weight)

    @property
    def cross_layers(self) -> list[CrossLayer]:
        return [cast(CrossLayer, layer) for layer in self.layers]

    def check_kv(self, kv_shapes: list[tuple[int, int]], num_layers: int) -> None:
        """Refuse a target whose K/V have another shape than those it was trained on."""
        own, read = self.kv_shapes[0], self.config.target_layer_ids
        if len(kv_shapes) != num_layers or any(tuple(kv_shapes[layer]) != own for layer in read):
            raise MismatchError(
                f"the drafter reads K/V of {own[0]} heads of {own[1]} in layers {list(read)}, and this target's are "
                f"{[tuple(shape) for shape in kv_shapes]} in {num_layers} layers; use the drafter of this target"
            )

    def denoise(self, embeddings: Tensor, masked: Tensor, positions: Tensor, attend: CrossAttend) -> Tensor:
        """Return final states ``[N, B, H]`` of N blocks, anchor first.

        ``embeddings [N, B, H]`` are the target's, of any token where ``masked [N, B]``; ``positions`` are ``[N, B]``.
        """
        steps, slots = self.config.block_size - 1, masked.shape[1] - 1
        level = -(-masked.sum(-1) * steps // slots)  # all masked is the same level for a block of any size
        hidden = torch.where(masked[..., None], self.mask.to(embeddings.dtype), embeddings)
        hidden = hidden + self.timestep(level)[:, None].to(hidden.dtype)
        cos, sin = self.rotary(positions, hidden.dtype)
        for index, layer in enumerate(self.cross_layers):
            hidden = layer(hidden, cos, sin, lambda queries, index=index: attend(index, queries))
        states: Tensor = self.norm(hidden)
        return states
