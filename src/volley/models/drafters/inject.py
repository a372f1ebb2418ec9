"""K/V injection for all draft layers in one step: one product, one norm, one rotation, one scatter.

``Drafter.context_kv`` is the same layer by layer: the reference, and what training differentiates.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from volley.memory import kernels
from volley.memory.kv_store import DenseKVStore, KVStore
from volley.models.drafters.drafter import Drafter, DraftLayer, rotate
from volley.models.layers.accelerate import packing_pays
from volley.models.layers.products import Float8Product, make_product


class Injection:
    """Writes the context features of one drafter into its store.

    Holds a copy of all layers' ``k_proj`` and ``v_proj`` as one matrix, which is made again when one of them has changed.
    """

    def __init__(self, drafter: Drafter, store: KVStore) -> None:
        self.drafter = drafter
        self.store = store
        attentions = [cast(DraftLayer, layer).self_attn for layer in drafter.layers]
        projections = [attention.k_proj for attention in attentions] + [attention.v_proj for attention in attentions]
        self._weights = [projection.weight for projection in projections]
        self._biases = [projection.bias for projection in projections if projection.bias is not None]
        self._norms = [attention.k_norm.weight for attention in attentions]
        self._made_from: list[tuple[int, int]] = []
        self._project: Callable[[Tensor], Tensor]
        self.norm_weights: Tensor
        """``[layers, d]``."""

    def __call__(self, features: Tensor, positions: Tensor, slots: slice | Tensor) -> None:
        """Store K and V for tapped features ``[T, taps · H]`` at ``positions [T]`` in ``slots``, of every layer."""
        if isinstance(self.store, DenseKVStore) and kernels.usable(features.device):
            from volley.memory.kernels.inject import inject

            projected = self.project(features)
            cos, sin = self.drafter.rotary(positions, projected.dtype)
            inject(projected, self.norm_weights, self.drafter.config.rms_norm_eps, cos, sin, self.store, slots)
        else:
            self.store.write_layers(slots, *self.keys_values(features, positions))

    def keys_values(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """K and V ``[layers, T, kv_heads, d]``: what :meth:`Drafter.context_kv` computes."""
        keys, values = self.project(features).unbind(1)
        cos, sin = self.drafter.rotary(positions, keys.dtype)
        normed = rms_norm(keys, keys.shape[-1:], None, self.drafter.config.rms_norm_eps) * self.norm_weights[:, None]
        return rotate(normed, cos[:, None], sin[:, None]).transpose(0, 1), values.transpose(0, 1)

    def project(self, features: Tensor) -> Tensor:
        """Keys before norm and rotation, and values: ``[T, 2, layers, kv_heads, d]``."""
        made_from = [(w.data_ptr(), w._version) for w in (*self._weights, *self._biases, *self._norms)]
        if made_from != self._made_from:
            self._made_from = made_from
            self._build()
        config = self.drafter.config
        context = self.drafter.hidden_norm(self.drafter.fc(features))
        shape = (len(context), 2, config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        return self._project(context).view(shape)

    def _build(self) -> None:
        weight = torch.cat([w.detach() for w in self._weights])
        bias = torch.cat([b.detach() for b in self._biases]) if self._biases else None
        if self.drafter.float8:
            self._project = Float8Product(weight.to(self.drafter.norm.weight.device), bias)
        else:
            self._project = make_product(weight, bias) if packing_pays(weight) else lambda x: linear(x, weight, bias)
        self.norm_weights = torch.stack([w.detach() for w in self._norms])
