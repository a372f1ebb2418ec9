"""K/V injection for all draft layers in one step: one matmul, one norm, one rotation, one scatter.

``Drafter.context_kv`` computes the same layer by layer. It is the reference, and training differentiates it.
"""

from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from volley.memory import kernels
from volley.memory.kv_store import DenseKVStore, KVStore
from volley.models.drafters.drafter import Drafter, DraftLayer, MergedKV, rotate
from volley.models.layers.accelerate import packing_pays
from volley.models.layers.products import make_product

_TOKENS_AT_ONCE = 256  # bounds the temporary K/V beside the store


def merge_kv(drafter: Drafter) -> MergedKV:
    """Copy all layers' ``k_proj`` and ``v_proj`` into one linear layer, and their ``k_norm`` into one tensor."""
    attentions = [cast(DraftLayer, layer).self_attn for layer in drafter.layers]
    projections = [attention.k_proj for attention in attentions] + [attention.v_proj for attention in attentions]
    weight = torch.cat([projection.weight.detach() for projection in projections])
    biases = [projection.bias.detach() for projection in projections if projection.bias is not None]
    bias = torch.cat(biases) if biases else None
    norms = torch.stack([attention.k_norm.weight.detach() for attention in attentions])
    return make_product(weight, bias) if packing_pays(weight) else lambda x: linear(x, weight, bias), norms


class Injection:
    """Projection of context features into the K/V store of one drafter.

    The result of :func:`merge_kv` is cached until one of the drafter's weights changes.
    """

    def __init__(self, drafter: Drafter, store: KVStore) -> None:
        self.drafter = drafter
        self.store = store
        attentions = [cast(DraftLayer, layer).self_attn for layer in drafter.layers]
        parts = [part for own in attentions for part in (own.k_proj, own.v_proj, own.k_norm)]
        self._weights = [weight for part in parts for weight in part.parameters()]
        self._made_from: list[tuple[int, int]] = []
        self._merged: MergedKV

    def __call__(self, features: Tensor, positions: Tensor, slots: slice | Tensor) -> None:
        """Store every layer's K and V of tapped features ``[T, taps · H]`` at ``positions [T]`` in ``slots``."""
        if isinstance(self.store, DenseKVStore) and kernels.usable(features.device):
            from volley.memory.kernels.inject import inject

            projected = self.project(features)
            cos, sin = self.drafter.rotary(positions, projected.dtype)
            inject(projected, self._merged[1], self.drafter.config.rms_norm_eps, cos, sin, self.store, slots)
        else:
            for start in range(0, len(features), _TOKENS_AT_ONCE):
                some = slice(start, start + _TOKENS_AT_ONCE)
                keys, values = self.keys_values(features[some], positions[some])
                if isinstance(slots, Tensor):
                    own: slice | Tensor = slots[some]
                else:
                    own = slice(slots.start + start, slots.start + start + keys.shape[1])
                self.store.write_layers(own, keys, values)

    def keys_values(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V ``[layers, T, kv_heads, d]``, equal to :meth:`Drafter.context_kv`."""
        keys, values = self.project(features).unbind(1)
        cos, sin = self.drafter.rotary(positions, keys.dtype)
        normed = rms_norm(keys, keys.shape[-1:], None, self.drafter.config.rms_norm_eps) * self._merged[1][:, None]
        return rotate(normed, cos[:, None], sin[:, None]).transpose(0, 1), values.transpose(0, 1)

    def project(self, features: Tensor) -> Tensor:
        """Keys before norm and rotation, and values: ``[T, 2, layers, kv_heads, d]``."""
        made_from = [(weight.data_ptr(), weight._version) for weight in self._weights]
        if made_from != self._made_from:
            self._made_from, self._merged = made_from, self.drafter.merged_kv or merge_kv(self.drafter)
        config = self.drafter.config
        context = self.drafter.hidden_norm(self.drafter.fc(features))
        shape = (len(context), 2, config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        return self._merged[0](context).view(shape)
