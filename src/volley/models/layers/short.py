"""DiffusionGemma's layers in fp32 on a CPU, in half of transformers' operations.

Projections of one input are one matrix, and the layer's own weights are views of it. Norms, rotary embeddings and gates are
kernels (``native/rows.c``). The router's scales are folded into its norm. The attention function stays.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from volley import native
from volley.memory.attention import AttentionOptions
from volley.models.layers.experts import is_gelu
from volley.models.layers.joined import Matrix
from volley.models.layers.products import is_linear

_TOLERANCE = 1e-4


class ShortGate:
    """Gated MLP ``down(gelu(gate(x)) · up(x))``, with one matmul for gate and up."""

    def __init__(self, module: Any) -> None:
        self.both = Matrix.of([module.gate_proj, module.up_proj])
        self.down: Tensor = module.down_proj.weight.detach()

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[T, H]`` of ``x [T, H]``."""
        return linear(native.gated_gelu(self.both(x)), self.down)


class ShortConditioning:
    """Forward of a decoder's self-conditioning."""

    def __init__(self, module: Any) -> None:
        self.gate, self.before, self.eps = ShortGate(module), module.pre_norm.weight.detach(), module.pre_norm.eps

    def __call__(self, inputs_embeds: Tensor, self_conditioning_signal: Tensor) -> Tensor:
        """Return ``[..., T, H]`` from embeddings and the last prediction, both of that shape."""
        shape = inputs_embeds.shape
        told = self.gate(native.rms_norm(self_conditioning_signal.reshape(-1, shape[-1]), self.before, self.eps))
        return native.rms_norm(inputs_embeds.reshape(told.shape).add(told), None, self.eps).view(shape)


class ShortLayer:
    """Forward of one encoder layer, which serves both modes."""

    def __init__(self, layer: Any) -> None:
        own = layer.self_attn
        self.layer, self.index, self.dim = layer, own.layer_idx, own.head_dim
        self.options = AttentionOptions(own.scaling, own.sliding_window)
        sizes = [part.out_features // self.dim for part in (own.q_proj, own.k_proj)]
        self.heads, self.shared = sizes
        self.project = Matrix.of([part for part in (own.q_proj, own.k_proj, own.v_proj) if part is not None])
        self.has_values = own.v_proj is not None
        self.eps: float = own.q_norm.eps
        self.turned = own.q_norm.weight.detach(), own.k_norm.weight.detach()
        self.output: Tensor = own.o_proj.weight.detach()
        self.norms = {name: part.weight.detach() for name, part in layer.named_children() if "layernorm" in name}
        self.gate = ShortGate(layer.mlp)
        router = layer.router
        self.routed = (router.scale * router.scalar_root_size).detach()
        self.scores, self.weights = router.proj.weight.detach(), router.per_expert_scale.detach()
        self.num_chosen: int = router.config.top_k_experts
        self.experts = layer.experts.forward

    @classmethod
    @torch.no_grad()
    def of(cls, layer: nn.Module, rotary: Any) -> Self | None:
        """Shorten a layer; ``None`` if a trial shows another result."""
        if not _is_plain(layer):
            return None
        attention: Any = layer.self_attn
        states = torch.randn(1, 6, attention.q_proj.in_features, generator=torch.Generator().manual_seed(0))
        turns = rotary(states, torch.arange(6)[None], attention.layer_type)
        expected = layer(states, position_embeddings=turns, volley_call=_causal)
        own = cls(layer)
        found = own(states, position_embeddings=turns, volley_call=_causal)
        return own if bool((found - expected).norm() <= _TOLERANCE * (expected - states).norm()) else None

    def __call__(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], volley_call: Any, **_: Any
    ) -> Tensor:
        """Return the states ``[1, T, H]`` after the layer."""
        states, norms = hidden_states[0], self.norms
        mixed = self._attend(self._norm(states, norms["input_layernorm"]), position_embeddings, volley_call)
        states = native.add_norm(states, mixed, norms["post_attention_layernorm"], self.eps)
        gated = self.gate(self._norm(states, norms["pre_feedforward_layernorm"]))
        chosen = self.experts(self._norm(states, norms["pre_feedforward_layernorm_2"]), *self._route(states))
        both = self._norm(gated, norms["post_feedforward_layernorm_1"])
        both = native.add_norm(both, chosen, norms["post_feedforward_layernorm_2"], self.eps)
        states = native.add_norm(states, both, norms["post_feedforward_layernorm"], self.eps)
        return states[None].mul_(self.layer.layer_scalar)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return native.rms_norm(x, weight, self.eps)

    def _attend(self, normed: Tensor, turns: tuple[Tensor, Tensor], call: Any) -> Tensor:
        cos, sin = turns[0][0], turns[1][0]
        rows = self.project(normed).view(len(normed), -1, self.dim)
        rows = native.norm_and_turn_floats(rows, self.turned, cos, sin, self.heads, self.shared, self.eps)
        split = rows.split_with_sizes([self.heads, self.shared, self.shared], dim=1)
        mixed: Tensor = call(self.index, *split, self.options)
        return linear(mixed.reshape(len(rows), -1), self.output)

    def _route(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of each token and their weights, ``[T, k]``."""
        scores = linear(self._norm(states, self.routed), self.scores).softmax(dim=-1)
        weights, chosen = scores.topk(self.num_chosen, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        return chosen, weights.mul_(self.weights[chosen])


def shorten(encoder: Any, decoder: Any) -> int:
    """Replace the forward of every layer of ``encoder`` that can be shortened, and of ``decoder``'s self-conditioning.

    Return the number of shortened layers. Their weights stay readable, but must not be trained further.
    """
    found = [(layer, ShortLayer.of(layer, encoder.rotary_emb)) for layer in encoder.layers]
    for layer, short in found:
        if short is not None:
            layer.forward = short
    conditioning = decoder.self_conditioning
    if all(short is not None for _, short in found) and _are_plain(conditioning, _GATED):
        conditioning.forward = ShortConditioning(conditioning)
    return sum(short is not None for _, short in found)


_GATED = ("gate_proj", "up_proj", "down_proj")
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", *(f"mlp.{name}" for name in _GATED))


def _is_plain(layer: Any) -> bool:
    """Return whether a layer has the parts of DiffusionGemma's, in fp32 on a CPU."""
    if type(layer).__name__ != "DiffusionGemmaEncoderTextLayer" or not native.is_built:
        return False
    value = layer.self_attn.v_proj
    is_gated = is_gelu(layer.mlp.act_fn)
    return (
        is_gated
        and _are_plain(layer, _PROJECTIONS)
        and (value is None or is_linear(value))
        and is_linear(layer.router.proj)
    )


def _are_plain(module: nn.Module, names: tuple[str, ...]) -> bool:
    parts = [module.get_submodule(name) for name in names]
    return all(
        is_linear(part)
        and part.weight.dtype == torch.float32
        and part.weight.device.type == "cpu"
        and part.bias is None
        for part in parts
    )


def _causal(_: int, queries: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    queries, keys, values = (x.transpose(0, 1)[None] for x in (queries, keys, values))
    mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=options.scale, enable_gqa=True)
    return mixed[0].transpose(0, 1)
