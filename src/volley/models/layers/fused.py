"""Decoder layers of the Llama and Qwen kind: recognised, and in volley's own kernels for a CPU, of targets and drafters alike.

A :class:`FusedLayer` replaces the ``forward`` of one of transformers' layers once it was seen to compute the same; hooks fire
as before, and the attention function stays whatever the model is set to. A :class:`FusedDecoder` runs all such layers in one
call where K and V lie in bf16 pages.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, Generic, NamedTuple, Self
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from volley import native
from volley.memory.attention import AttentionOptions
from volley.memory.batch import RaggedBatch
from volley.memory.kv_store import DenseKVStore, KVStore
from volley.memory.native_attention import attention_plan, serves
from volley.models.layers.products import codes_of, inputs_of, is_linear
from volley.models.layers.residency import MappedFiles, StackedRows
from volley.native import Product, Weights
from volley.native.decoder import Decoder, LayerShape, LayerWeights, P, attends

_TOLERANCE = 2**-6
_ASKING = Lock()  # transformers' table of attention functions is one for all threads
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_JOINED = (_PROJECTIONS[:3], _PROJECTIONS[3:], _GATED[:2], _GATED[2:])
LINEAR = (*_PROJECTIONS, *_GATED)
"""The linear layers whose weights a fused layer holds."""


def layer_weights(layer: Any, join: Callable[[Sequence[nn.Linear]], P]) -> LayerWeights[P]:
    """The norms of a decoder layer, of transformers or of a drafter, and what ``join`` makes of linear layers that read alike."""
    attention = layer.self_attn
    normed = hasattr(attention, "q_norm")
    joined = [join([layer.get_submodule(name) for name in names]) for names in _JOINED]
    return LayerWeights(
        layer.input_layernorm.weight.detach(),
        layer.post_attention_layernorm.weight.detach(),
        attention.q_norm.weight.detach() if normed else None,
        attention.k_norm.weight.detach() if normed else None,
        *joined,
    )


def products_of(layer: Any, weights: Weights, files: MappedFiles | None = None) -> LayerWeights[Product]:
    """Copies of the weights of a decoder layer; those read from ``files`` leave memory on the way."""

    def join(layers: Sequence[nn.Linear]) -> Product:
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        rows = StackedRows([layer.weight for layer in layers], files)
        stored = [] if weights == "bf16" else codes_of(layers)
        return Product(rows, torch.cat(biases) if biases else None, weights, stored)

    return layer_weights(layer, join)


def _side_by_side(layers: Sequence[nn.Linear]) -> Callable[[Tensor], Tensor]:
    """The layers as they are, with their outputs as one."""
    return lambda x: torch.cat([layer(x) for layer in layers], dim=-1)


def layer_shape(layer: Any, scale: float) -> LayerShape:
    attention, dim = layer.self_attn, layer.self_attn.head_dim
    norm = layer.input_layernorm
    return LayerShape(
        hidden=norm.weight.shape[0],
        heads=attention.q_proj.out_features // dim,
        shared=attention.k_proj.out_features // dim,
        dim=dim,
        inner=layer.mlp.up_proj.out_features,
        eps=norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps,
        scale=scale,
    )


def fits(layer: nn.Module, weights: Weights = "bf16") -> bool:
    """Whether a layer is built like Llama's or Qwen's, of sizes that the kernels for a CPU take."""
    return (
        is_gated_layer(layer)
        and not getattr(layer.self_attn, "head_dim", 1) % 16
        and all(_fit(layer, names, weights) for names in _JOINED)
    )


def _fit(layer: nn.Module, names: Sequence[str], weights: Weights) -> bool:
    """Whether the products take the weights of linear layers that are joined. Reading codes takes long: only if they decide."""
    linear = [module for name in names if is_linear(module := layer.get_submodule(name))]
    if all(native.fits(module.weight, weights) for module in linear):
        return True
    inputs = inputs_of(codes_of(linear))
    return all(native.fits(module.weight, weights, inputs) for module in linear)


def is_gated_layer(layer: nn.Module) -> bool:
    """Whether a layer is built like Llama's or Qwen's."""
    modules = dict(layer.named_modules())
    if set(dict(layer.named_children())) != {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}:
        return False
    linear = [modules.get(name) for name in LINEAR]
    if not all(is_linear(module) for module in linear):
        return False
    attention: Any = layer.self_attn
    norms = {name for name, _ in attention.named_children()} - {"q_proj", "k_proj", "v_proj", "o_proj"}
    dim = getattr(attention, "head_dim", 0)
    return (
        norms in (set(), {"q_norm", "k_norm"})
        and all(getattr(attention, name).weight.shape == (dim,) for name in norms)
        and all((modules[a].bias is None) == (modules[_PROJECTIONS[0]].bias is None) for a in _PROJECTIONS[:3])
        and all((modules[a].bias is None) == (modules[_GATED[0]].bias is None) for a in _GATED[:2])
        and all(hasattr(getattr(layer, name), "weight") for name in ("input_layernorm", "post_attention_layernorm"))
    )


def layers_with_rotary(model: Any) -> list[tuple[nn.Module, nn.Module]]:
    """Each decoder layer of a model with its rotary embedding; none if they are not where Llama has them."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    layers, rotary = getattr(decoder, "layers", None), getattr(decoder, "rotary_emb", None)
    if not (isinstance(layers, nn.ModuleList) and isinstance(rotary, nn.Module)):
        return []
    return [(layer, rotary) for layer in layers]


class Recognised(NamedTuple):
    """What a layer of transformers' makes of some states, and how."""

    states: Tensor
    turns: tuple[Tensor, Tensor]
    options: AttentionOptions
    output: Tensor


def recognise(layer: nn.Module, rotary: nn.Module) -> Recognised | None:
    """Try a layer that is built like Llama's or Qwen's; ``None`` if it is not, or is called otherwise.

    ``None`` too where only a part of each head is turned, or scores are capped or have sinks: no kernel does that.
    """
    attention: Any = getattr(layer, "self_attn", None)
    if not (is_gated_layer(layer) and hasattr(attention, "config") and hasattr(attention, "layer_idx")):
        return None
    if not _is_silu(layer.mlp):
        return None
    weight = attention.q_proj.weight
    states = torch.randn(1, 6, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    tried = _try(layer, rotary, states)
    if tried is None:
        return None
    seen = Recognised(states, *tried)
    is_plain = seen.options.softcap is None and seen.options.sinks is None
    return seen if is_plain and seen.turns[0].shape[-1] == attention.head_dim else None


class LayerForward(ABC):
    """The forward of one of transformers' decoder layers; hooks fire as before."""

    def __init__(self, layer: nn.Module, options: AttentionOptions) -> None:
        self.attention: Any = layer.self_attn
        self.options = options
        self.shape = layer_shape(layer, options.scale)

    @abstractmethod
    def before(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries, keys and values ``[T, heads + 2 · shared, d]`` of states ``[T, H]``; ``cos`` and ``sin``: ``[T, d]``."""

    @abstractmethod
    def after(self, states: Tensor, mixed: Tensor) -> Tensor:
        """States ``[T, H]`` after the layer, of those before it and attention's output ``[T, heads · d]``."""

    @torch.no_grad()
    def computes(self, seen: Recognised) -> bool:
        """Whether it makes of the states what the layer itself makes."""

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            return _causal(q, k, v, options.scale)[0]

        found = self(seen.states, position_embeddings=seen.turns, volley_call=attend)
        change = (seen.output - seen.states).float().norm()
        return bool((found - seen.output).float().norm() <= _TOLERANCE * change)

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> Tensor:
        """States ``[B, T, H]`` after the layer."""
        assert position_embeddings is not None, "a decoder layer is given its rotary embedding"
        size, shape = self.shape, hidden_states.shape
        states = hidden_states.reshape(-1, size.hidden)
        cos, sin = (x.expand(*shape[:2], -1).reshape(-1, size.dim) for x in position_embeddings)
        rows = self.before(states, cos, sin)
        split = torch.split(rows, [size.heads, size.shared, size.shared], dim=1)
        if "volley_call" in options:
            mixed = options["volley_call"](self.attention.layer_idx, *split, self.options)
        else:
            mixed = self._dense(split, shape[0], attention_mask, past_key_values, options)
        return self.after(states, mixed.reshape(len(rows), -1)).view(shape)

    def _dense(
        self, split: Sequence[Tensor], batch: int, mask: Tensor | None, past_key_values: Any, options: dict[str, Any]
    ) -> Tensor:
        """Attention by transformers' own function."""
        queries, keys, values = (x.reshape(batch, -1, *x.shape[1:]).transpose(1, 2) for x in split)
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.attention.layer_idx)
        eager = getattr(sys.modules[type(self.attention).__module__], "eager_attention_forward", None)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.attention.config._attn_implementation, eager)
        settings = {"scaling": self.options.scale, "sliding_window": self.options.window}
        mixed: Tensor = attend(self.attention, queries, keys, values, mask, **settings, **options)[0]
        return mixed


class FusedLayer(LayerForward, Generic[P]):
    """A layer in volley's kernels for a CPU."""

    def __init__(self, layer: nn.Module, options: AttentionOptions, weights: LayerWeights[P]) -> None:
        super().__init__(layer, options)
        self.weights = weights

    @staticmethod
    def of(
        layer: nn.Module, rotary: nn.Module, weights: Weights, files: MappedFiles | None = None
    ) -> "FusedLayer[Product] | None":
        """The layer in few operations; ``None`` if it is of another kind, which is found by trying.

        It is tried with the layer's own linear layers, so that no copy of the weights is made for it.
        """
        if not hasattr(layer, "self_attn") or not fits(layer, weights):
            return None
        seen = recognise(layer, rotary)
        if seen is None:
            return None
        if not FusedLayer(layer, seen.options, layer_weights(layer, _side_by_side)).computes(seen):
            return None
        return FusedLayer(layer, seen.options, products_of(layer, weights, files))

    def before(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        of, size = self.weights, self.shape
        rows = of.project(native.rms_norm(states, of.first_norm, size.eps))
        native.norm_and_turn(rows, of.norms, cos, sin, size.heads, size.shared, size.eps)
        return rows.view(len(rows), -1, size.dim)

    def after(self, states: Tensor, mixed: Tensor) -> Tensor:
        of = self.weights
        states = states + of.output(mixed)
        gated = native.gated_silu(of.gate_up(native.rms_norm(states, of.second_norm, self.shape.eps)))
        return states + of.down(gated)


class FusedDecoder:
    """All layers of a model in one call."""

    def __init__(
        self, layers: Sequence[LayerWeights[Product]], shape: LayerShape, windows: Sequence[int | None]
    ) -> None:
        """``windows``: each layer's, as :class:`AttentionOptions` has it."""
        self._decoder = Decoder(layers, shape)
        self._scale = shape.scale
        self._attends = attends(shape.heads, shape.shared, shape.dim)
        self._windows = list(dict.fromkeys(windows))
        self._plans = [self._windows.index(window) for window in windows]
        self._store: Callable[[], KVStore | None] = lambda: None  # a reference that does not keep it
        self._alone = Lock()  # engines that share a target may run in several threads

    @classmethod
    def of_layers(cls, layers: Sequence[nn.Module]) -> Self | None:
        """Of transformers' decoder layers, if all of them are fused and of one shape."""
        fused = [vars(layer).get("forward") for layer in layers]
        found = [forward for forward in fused if isinstance(forward, FusedLayer)]
        if not found or len(found) < len(fused) or any(layer.shape != found[0].shape for layer in found):
            return None
        return cls([layer.weights for layer in found], found[0].shape, [layer.options.window for layer in found])

    def serves(self, store: KVStore) -> bool:
        """Whether K and V in ``store`` are where the kernels read them."""
        return self._attends and serves(store, AttentionOptions(self._scale))

    def __call__(
        self,
        states: Tensor,
        turns: tuple[Tensor, Tensor],
        batch: RaggedBatch,
        store: KVStore,
        tapped: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor]:
        """States ``[T, H]`` after the last layer, of embeddings ``[T, H]``; ``turns`` are cosines and sines ``[T, d]``.

        Beside them the states after the layers ``tapped``, -1 being before the first: ``[T, len(tapped) · H]``.
        """
        plans = [attention_plan(batch, window) for window in self._windows]
        cos, sin = (turn.contiguous() for turn in turns)
        states = states.clone(memory_format=torch.contiguous_format)
        with self._alone:
            self._place(store)
            features = self._decoder.run(states, cos, sin, plans, tapped)
        return states, features

    def _place(self, store: KVStore) -> None:
        if store is not self._store():
            assert isinstance(store, DenseKVStore)
            self._decoder.place(store.keys, store.values, self._plans)
            self._store = ref(store)


def _causal(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """``[1, T, heads, d]`` of ``[1, heads, T, d]``."""
    return scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True).transpose(
        1, 2
    )


@torch.no_grad()
def _try(
    layer: nn.Module, rotary: nn.Module, states: Tensor
) -> tuple[tuple[Tensor, Tensor], AttentionOptions, Tensor] | None:
    """Rotary embedding of ``states [1, T, H]``, what the layer asks of attention, and what it makes of the states.

    ``None`` if its arguments are others than Llama's.
    """
    asked: list[AttentionOptions] = []

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        asked.append(AttentionOptions(scaling, sliding_window, softcap, s_aux))
        return _causal(query, key, value, scaling), None

    config: Any = layer.self_attn.config  # type: ignore[union-attr]
    # A layer that looks at positions itself (Ministral 3 scales queries by them, from 16,384 on) finds none and is left alone.
    before, positions = config._attn_implementation, torch.arange(states.shape[1], device=states.device)[None]
    with _ASKING:
        ALL_ATTENTION_FUNCTIONS["volley_asking"] = attend
        config._attn_implementation = "volley_asking"
        try:
            turns = rotary(states, positions)
            output = layer(states, position_embeddings=turns, position_ids=None, attention_mask=None)
        except TypeError:
            return None
        finally:
            config._attn_implementation = before
            del ALL_ATTENTION_FUNCTIONS["volley_asking"]
    return (turns, asked[0], output) if len(asked) == 1 and isinstance(output, Tensor) else None


def _is_silu(mlp: Any) -> bool:
    x = torch.linspace(-3, 3, 7)
    return hasattr(mlp, "act_fn") and torch.equal(mlp.act_fn(x), silu(x))
