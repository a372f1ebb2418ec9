"""The EAGLE-3 drafter (Li et al. 2025, §3): one decoder layer that drafts a chain token by token.

Position t reads two vectors, the embedding of token t + 1 and a state, and predicts token t + 2. The state is ``fc`` of three
layers of the target at token t. After the last token that the target has computed, the state is the drafter's own output at
position t − 1. Both vectors are normed and concatenated, so queries, keys and values are projections of inputs of size 2H.

``eagle_format.py`` reads its checkpoint formats.
"""

from typing import cast

import torch
from torch import Tensor, nn

from volley.models.checkpoints.checkpoint import DrafterConfig
from volley.models.checkpoints.eagle_format import NUM_TAPS, EagleConfig
from volley.models.drafters.drafter import Attend, DraftAttention, Drafter, DraftLayer, RMSNorm


class EagleAttention(DraftAttention):
    """Attention over inputs of size 2H; queries and keys are normed only if the checkpoint says so."""

    def __init__(self, config: DrafterConfig, *, qk_norm: bool) -> None:
        super().__init__(config)
        for projection in ("q_proj", "k_proj", "v_proj"):
            width = getattr(self, projection).out_features
            setattr(self, projection, nn.Linear(2 * config.hidden_size, width, bias=False))
        if not qk_norm:
            self.q_norm = self.k_norm = nn.Identity()  # type: ignore[assignment]


class EagleDrafter(Drafter):
    def __init__(self, config: DrafterConfig) -> None:
        assert config.eagle is not None, "an EAGLE-3 drafter has its switches"
        super().__init__(config)
        self.switches: EagleConfig = config.eagle
        width = config.target_hidden_size or config.hidden_size
        self.layer.self_attn = EagleAttention(config, qk_norm=config.eagle.qk_norm)
        self.input_norm: RMSNorm | None = None
        if config.eagle.norm_before_fc:
            self.input_norm = RMSNorm(NUM_TAPS * width, config.rms_norm_eps)
        norms = NUM_TAPS if config.eagle.fc_norm else 0
        self.fc_norm = nn.ModuleList(RMSNorm(width, config.rms_norm_eps) for _ in range(norms))

    @property
    def layer(self) -> DraftLayer:
        return cast(DraftLayer, self.layers[0])

    def fused_states(self, features: Tensor) -> Tensor:
        """Project the target's tapped features ``[T, 3 · H]`` to states ``[T, H]``."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm:
            parts = zip(self.fc_norm, features.chunk(NUM_TAPS, dim=-1), strict=True)
            features = torch.cat([norm(part) for norm, part in parts], dim=-1)
        fused: Tensor = self.fc(features)
        return fused

    def keys_values(self, embeddings: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """K and V ``[T, kv_heads, d]`` of positions that read ``embeddings`` and ``states``, ``[T, H]`` each."""
        cos, sin = self.rotary(positions, states.dtype)
        return self.layer.self_attn.keys_values(self._inputs(embeddings, self.hidden_norm(states)), cos, sin)

    def advance(self, embeddings: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the drafter's own states ``[T, H]`` at ``positions [T]``; the head reads them normed."""
        layer, normed = self.layer, self.hidden_norm(states)
        cos, sin = self.rotary(positions, states.dtype)
        inputs = self._inputs(embeddings, normed)
        residual = normed if self.switches.norm_before_residual else states
        queries = layer.self_attn.queries(inputs, cos, sin)
        mixed = attend(0, queries, *layer.self_attn.keys_values(inputs, cos, sin))
        hidden = residual + layer.self_attn.o_proj(mixed.flatten(-2))
        output: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return output

    def _inputs(self, embeddings: Tensor, normed: Tensor) -> Tensor:
        return torch.cat([self.layer.input_layernorm(embeddings), normed], dim=-1)


def drafter_class(config: DrafterConfig) -> type[Drafter]:
    return Drafter if config.eagle is None else EagleDrafter
