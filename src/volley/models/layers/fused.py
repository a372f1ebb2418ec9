"""Decoder layers of transformers, recognised and run on volley's own CPU kernels, in targets and drafters.

A family is described by :class:`LayerParts`, :class:`LayerShape` and :class:`LayerRotary`: its norms and how they round, its
activation, scales and caps, and each layer's window and rotary embedding.

A :class:`FusedLayer` replaces the ``forward`` of one of transformers' layers after a test that both compute the same. Hooks fire
as before, and the model's attention function stays. A :class:`FusedDecoder` runs all such layers in one call if K and V are in
bf16 pages.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from threading import Lock
from typing import Any, Generic, NamedTuple, Self
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from volley import native
from volley.memory.attention import AttentionOptions
from volley.memory.batch import RaggedBatch
from volley.memory.kv_store import DenseKVStore, KVStore
from volley.memory.native_attention import attention_plan, serves
from volley.models.layers.host_memory import MappedFiles, StackedRows
from volley.models.layers.norms import STYLES, NormStyle, eps_of, style_of
from volley.models.layers.products import codes_of, inputs_of, is_linear
from volley.models.layers.routed import RoutedMLP, made_up_experts
from volley.native import GELU, SILU, Activation, Product, Turns, Weights
from volley.native.decoder import Decoder, Experts, LayerShape, LayerWeights, P, Routing, attends

_TOLERANCE = 2**-6
_ASKING = Lock()  # all threads share transformers' table of attention functions
Cosines = tuple[Tensor, Tensor]
"""Cosines and sines of a rotary embedding, in transformers' form."""

# -- parts of a layer ---------------------------------------------------------------------------------------------------

_NORMS: dict[frozenset[str], tuple[str | None, ...]] = {
    frozenset(name for name in names if name): names
    for names in (
        ("input_layernorm", None, "post_attention_layernorm", None),
        (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    )
}
"""Names of the norms before and after attention, and before and after the MLP, by the set of a layer's norms."""
_MERGED = (
    (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.qkv_proj",)),
    (("self_attn.o_proj",),),
    (("mlp.gate_proj", "mlp.up_proj"), ("mlp.gate_up_proj",)),
    (("mlp.down_proj",),),
)
"""Names of linear layers that read the same input, in the order of their outputs, with each family's alternatives."""


_ROUTERS = ("mlp.gate", "mlp.router")


class LayerParts(NamedTuple):
    """Names of the modules that a decoder layer consists of."""

    norms: tuple[str | None, ...]
    """Norms before and after attention, before and after the MLP."""
    head_norms: tuple[str, ...]
    """Norms of queries and keys, if there are any."""
    merged: tuple[tuple[str, ...], ...]
    """Linear layers that read the same input: of attention, and of the MLP unless that has experts."""
    router: str | None = None
    """Router of the experts ``mlp.experts``."""

    @classmethod
    def of(cls, layer: nn.Module) -> "LayerParts | None":
        """Return the parts of a layer with attention and a gated MLP; ``None`` if it has others."""
        modules = dict(layer.named_modules())
        own = {name for name, part in layer.named_children() if next(part.parameters(), None) is not None}
        norms = _NORMS.get(frozenset(own - {"self_attn", "mlp"}))
        inside = {
            name
            for name, module in modules.items()
            if name.startswith(("self_attn.", "mlp.")) and next(module.parameters(recurse=False), None) is not None
        }
        router = next((name for name in _ROUTERS if inside >= {name, "mlp.experts"}), None)
        choices = _MERGED if router is None else _MERGED[:2]
        found = [next((names for names in choice if names[0] in modules), ()) for choice in choices]
        if norms is None or not {"self_attn", "mlp"} <= own:
            return None
        if not all(_alike([modules.get(name) for name in names]) for names in found):
            return None
        routed = set() if router is None else {router, "mlp.experts"}
        head_norms = inside - routed - {name for names in found for name in names}
        named = ("self_attn.q_norm", "self_attn.k_norm")
        if head_norms not in (set(), set(named)):
            return None
        return cls(norms, named if head_norms else (), tuple(found), router)

    @property
    def linear(self) -> list[str]:
        """Names of the linear layers, whose weights a fused layer holds."""
        return [name for names in self.merged for name in names]

    @property
    def is_llamas(self) -> bool:
        """Return whether the parts have the names of Llama's or Qwen's."""
        return (
            self.router is None
            and self.norms[1] is None is self.norms[3]
            and self.merged == tuple(choice[0] for choice in _MERGED)
        )

    def all_norms(self, layer: nn.Module) -> list[nn.Module]:
        return [layer.get_submodule(name) for name in (*self.norms, *self.head_norms) if name is not None]


def _alike(layers: Sequence[nn.Module | None]) -> bool:
    """Return whether ``layers`` are linear layers that can be merged."""
    return (
        bool(layers)
        and all(is_linear(layer) for layer in layers)
        and len({getattr(layer, "bias", None) is None for layer in layers}) == 1
    )


def is_gated_layer(layer: nn.Module) -> bool:
    """Return whether a layer is built like Llama's or Qwen's."""
    parts = LayerParts.of(layer)
    return parts is not None and parts.is_llamas


def layer_weights(
    layer: Any,
    merge: Callable[[Sequence[nn.Linear]], P],
    style: NormStyle = STYLES[0],
    routed: Callable[[], tuple[P, P, Routing[P] | None]] | None = None,
) -> LayerWeights[P]:
    """Collect the norms of a decoder layer of transformers or of a drafter; ``merge`` merges linear layers with the same input.

    ``routed`` makes the weights of experts.
    """
    parts = LayerParts.of(layer)
    assert parts is not None, f"{type(layer).__name__} is no layer of this kind"
    norms = [_scale(layer, name, style) for name in (*parts.norms, *(parts.head_norms or (None, None)))]
    project, output, *rest = (merge([layer.get_submodule(name) for name in names]) for names in parts.merged)
    routing = None
    if routed is None:
        gate_up, down = rest
    else:
        gate_up, down, routing = routed()
    return LayerWeights(
        before_attention=norms[0],
        behind_attention=norms[1],
        before_mlp=norms[2],
        behind_mlp=norms[3],
        query_norm=norms[4],
        key_norm=norms[5],
        sinks=getattr(layer.self_attn, "sinks", None),
        project=project,
        output=output,
        gate_up=gate_up,
        down=down,
        routing=routing,
    )


def _scale(layer: nn.Module, name: str | None, style: NormStyle) -> Tensor | None:
    return None if name is None else style.scale(layer.get_submodule(name).get_parameter("weight"))


def products_of(
    layer: Any,
    weights: Weights,
    files: MappedFiles | None = None,
    style: NormStyle = STYLES[0],
    routed: RoutedMLP | None = None,
) -> LayerWeights[Product]:
    """Copy the weights of a decoder layer; weights mapped from ``files`` leave memory during the copy."""

    def merge(layers: Sequence[nn.Linear]) -> Product:
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        rows = StackedRows([layer.weight for layer in layers], files)
        stored = codes_of(layers, weights)
        return Product(rows, torch.cat(biases) if biases else None, weights, stored)

    if routed is None:
        return layer_weights(layer, merge, style)
    return layer_weights(layer, merge, style, lambda: routed.products(_format_of_experts(layer, weights), files))


def _format_of_experts(layer: Any, weights: Weights) -> Weights:
    """Return the format of experts.

    The format of experts that were decoded from a quantised checkpoint is bf16, because quantising again changes them. Experts
    of a GGUF file are treated as its other weights are.
    """
    is_decoded = hasattr(layer.self_attn.o_proj, "stored_codes") and not hasattr(layer.mlp.experts, "stored_experts")
    return "bf16" if is_decoded else weights


def _made_up(layer: nn.Linear, seed: int) -> Callable[[Tensor], Tensor]:
    """Return a map ``[..., in] -> [..., out]`` that replaces a linear layer in a trial: random inputs with random signs.

    A trial compares how a layer connects its matmuls. Their own weights would have to be decoded, and multiplied slowly.
    """
    chance = torch.Generator().manual_seed(seed)
    places = torch.randint(layer.in_features, (layer.out_features,), generator=chance)
    signs = 2 * torch.randint(2, (layer.out_features,), generator=chance) - 1
    return lambda x: x[..., places] * signs.to(x.dtype)


def _all_made_up(layer: nn.Module) -> dict[nn.Module, Callable[..., Tensor]]:
    """Return the made-up maps of the linear layers and experts of a decoder layer with :class:`LayerParts`."""
    parts = LayerParts.of(layer)
    found = [layer.get_submodule(name) for name in (() if parts is None else parts.linear)]
    made: dict[nn.Module, Callable[..., Tensor]] = {
        module: _made_up(module, seed) for seed, module in enumerate(found) if isinstance(module, nn.Linear)
    }
    experts = layer.get_submodule("mlp.experts") if parts is not None and parts.router is not None else None
    if experts is not None and getattr(experts, "has_gate", False):
        made[experts] = made_up_experts(experts)
    return made


@contextmanager
def _computing_by(made_up: Mapping[nn.Module, Callable[..., Tensor]]) -> Iterator[None]:
    """Let modules compute something else in the body."""
    for module, function in made_up.items():
        module.forward = function
    try:
        yield
    finally:
        for module in made_up:
            del module.forward


def layer_shape(
    layer: Any,
    options: AttentionOptions,
    style: NormStyle = STYLES[0],
    activation: Activation = SILU,
    routed: RoutedMLP | None = None,
) -> LayerShape:
    """Return the shape of a layer that has :class:`LayerParts`."""
    parts = LayerParts.of(layer)
    assert parts is not None, f"{type(layer).__name__} is no layer of this kind"
    project, _, *mlp = ([layer.get_submodule(name) for name in names] for names in parts.merged)
    dim, heads = layer.self_attn.head_dim, layer.self_attn.o_proj.in_features // layer.self_attn.head_dim
    eps = eps_of(parts.all_norms(layer)[0])
    assert eps is not None
    return LayerShape(
        hidden=project[0].in_features,
        heads=heads,
        shared=(sum(part.out_features for part in project) // dim - heads) // 2,
        dim=dim,
        inner=mlp[1][0].in_features if routed is None else routed.experts.inner,
        eps=eps,
        scale=options.scale,
        rounds=style.rounds,
        activation=activation,
        residual=float(getattr(layer, "residual_multiplier", 1.0)),
        softcap=options.softcap,
    )


def fits(layer: nn.Module, weights: Weights = "bf16") -> bool:
    """Return whether the CPU kernels support a layer's parts and sizes; experts are checked when they are tried."""
    parts = LayerParts.of(layer)
    return (
        parts is not None
        and not getattr(layer.self_attn, "head_dim", 1) % 16
        and all(_fit(layer, names, weights) for names in parts.merged)
    )


def _fit(layer: nn.Module, names: Sequence[str], weights: Weights) -> bool:
    """Return whether the kernels support the weights of merged layers; stored codes are read only if needed, as that is slow."""
    linear = [module for name in names if is_linear(module := layer.get_submodule(name))]
    if all(native.fits(module.weight, weights) for module in linear):
        return True
    inputs = inputs_of(codes_of(linear))
    return all(native.fits(module.weight, weights, inputs) for module in linear)


# -- rotary embeddings --------------------------------------------------------------------------------------------------


class LayerRotary(NamedTuple):
    """Rotary embedding of a layer's queries and keys."""

    kind: str | None
    """Type of the layer, if the model has a rotary embedding for each type."""
    is_half: bool
    """True if cosines and sines cover only one half of a head (gpt-oss)."""

    def __call__(self, given: Cosines) -> Cosines:
        """Return cosines and sines ``[T, width]`` of the rotated numbers, from those of the model."""
        cos, sin = given
        return (torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)) if self.is_half else given


PLAIN = LayerRotary(None, is_half=False)
_STATIC = ("default", "linear", "llama3", "yarn")  # rotary embeddings that do not depend on the longest position


def turns_of(rotary: Any, kind: str | None, states: Tensor, positions: Tensor) -> Cosines:
    """Return cosines and sines ``[1, T, width]`` of a model's rotary embedding for layers of this type."""
    turns: Cosines = rotary(states, positions) if kind is None else rotary(states, positions, kind)
    return turns


class CosineTable:
    """Cosines and sines of a model's rotary embedding for layers of one type, computed once for each position."""

    def __init__(self, rotary: Any, kind: str | None) -> None:
        self._rotary, self._kind = rotary, kind
        of = getattr(rotary, "rope_type", None)
        self._is_static = (of.get(kind) if isinstance(of, dict) else of) in _STATIC
        self._table: Cosines | None = None

    def __call__(self, states: Tensor, positions: Tensor, end: int) -> Cosines:
        """Return cosines and sines ``[T, width]`` at ``positions [T]``, all before ``end``, in the dtype of ``states [T, H]``."""
        if not self._is_static:
            return self._of(states, positions)
        if self._table is None or len(self._table[0]) < end:
            self._table = self._of(states, torch.arange(max(1024, 1 << (end - 1).bit_length())))
        cos, sin = self._table
        return cos[positions], sin[positions]

    def _of(self, states: Tensor, positions: Tensor) -> Cosines:
        cos, sin = turns_of(self._rotary, self._kind, states[None], positions[None])
        return cos[0], sin[0]


def layers_with_rotary(model: Any) -> list[tuple[nn.Module, nn.Module]]:
    """List each decoder layer of a model with its rotary embedding; none if the model is not structured like Llama."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    layers, rotary = getattr(decoder, "layers", None), getattr(decoder, "rotary_emb", None)
    if not (isinstance(layers, nn.ModuleList) and isinstance(rotary, nn.Module)):
        return []
    return [(layer, rotary) for layer in layers]


# -- recognised by trying -----------------------------------------------------------------------------------------------


class Recognised(NamedTuple):
    """Recognised layer of transformers': its output for ``states [1, T, H]``, and its description."""

    states: Tensor
    turns: Cosines
    options: AttentionOptions
    split: tuple[Tensor, ...]
    """Queries, keys and values ``[T, heads or shared, d]`` passed to attention."""
    mixed: Tensor
    """Output of attention, ``[T, heads · d]``."""
    output: Tensor
    style: NormStyle
    activation: Activation
    rotaries: tuple[LayerRotary | None, ...]
    """Candidate rotary embeddings of queries and keys; ``None``: no rotation."""
    routed: RoutedMLP | None
    """MLP of the layer, if it has experts."""

    def shape(self, layer: nn.Module) -> LayerShape:
        return layer_shape(layer, self.options, self.style, self.activation, self.routed)

    def is_llamas(self, layer: nn.Module) -> bool:
        """Return whether it computes like Llama's or Qwen's layers and rotates whole heads."""
        shape = self.shape(layer)
        plain = shape.activation == SILU and shape.residual == 1.0 and not self.style.offset
        is_usual = self.options.softcap is None and self.options.sinks is None
        return is_gated_layer(layer) and plain and is_usual and self.turns[0].shape[-1] == shape.dim


def recognise(
    layer: nn.Module, rotary: nn.Module, made_up: Mapping[nn.Module, Callable[..., Tensor]] | None = None
) -> Recognised | None:
    """Recognise a layer with :class:`LayerParts` by trying it; ``None`` if its arguments or its parts differ.

    ``made_up`` replaces its linear layers and experts, whose weights are then not read.
    """
    attention: Any = getattr(layer, "self_attn", None)
    parts = LayerParts.of(layer)
    if parts is None or not all(hasattr(attention, name) for name in ("config", "layer_idx", "head_dim")):
        return None
    routed = None
    if parts.router is not None:
        routed = RoutedMLP.of(layer.get_submodule(parts.router), layer.get_submodule("mlp.experts"))
        if routed is None:
            return None
    style = style_of(parts.all_norms(layer))
    activation = _activation(layer.mlp) if routed is None else routed.experts.activation
    if style is None or activation is None:
        return None
    inputs = layer.get_submodule(parts.merged[0][0]).get_parameter("weight").shape[1]
    norm = parts.all_norms(layer)[0].get_parameter("weight")
    states = torch.randn(1, 6, inputs, generator=torch.Generator().manual_seed(0)).to(norm)
    by_type = "layer_type" in signature(rotary.forward).parameters
    kind = attention.config.layer_types[attention.layer_idx] if by_type else None
    with _computing_by(made_up or {}):
        tried = _try(layer, rotary, kind, states)
    if tried is None:
        return None
    is_half = 2 * tried[0][0].shape[-1] == attention.head_dim
    rotaries = (LayerRotary(kind, is_half=False), *([LayerRotary(kind, is_half=True)] if is_half else []), None)
    return Recognised(states, *tried, style, activation, rotaries, routed)


class LayerForward(ABC):
    """Forward of one of transformers' decoder layers; hooks fire as before."""

    def __init__(self, layer: nn.Module, seen: Recognised, rotary: LayerRotary | None) -> None:
        self.attention: Any = layer.self_attn
        self.options, self.rotary = seen.options, rotary
        self.shape = seen.shape(layer)

    @abstractmethod
    def before(self, states: Tensor, turns: Cosines | None) -> Tensor:
        """Return queries, keys and values ``[T, heads + 2 · shared, d]`` of states ``[T, H]``; ``turns``: ``[T, width]`` each."""

    @abstractmethod
    def after(self, states: Tensor, mixed: Tensor) -> Tensor:
        """Return the states ``[T, H]`` after the layer, from the states before it and attention's output ``[T, heads · d]``."""

    @torch.no_grad()
    def computes(self, seen: Recognised) -> bool:
        """Return whether its results before and after attention equal the layer's own."""
        rows = self._split(self.before(seen.states[0], self._turned(seen.turns, seen.states)))
        for own, theirs in zip(rows, seen.split, strict=True):
            if (own - theirs).float().norm() > _TOLERANCE * theirs.float().norm():
                return False
        found = self.after(seen.states[0], seen.mixed)
        change = (seen.output - seen.states).float().norm()
        return bool((found - seen.output[0]).float().norm() <= _TOLERANCE * change)

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> Tensor:
        """Return the states ``[B, T, H]`` after the layer."""
        assert position_embeddings is not None, "a decoder layer is given its rotary embedding"
        size, shape = self.shape, hidden_states.shape
        states = hidden_states.reshape(-1, size.hidden)
        rows = self.before(states, self._turned(position_embeddings, hidden_states))
        split = self._split(rows)
        if "volley_call" in options:
            mixed = options["volley_call"](self.attention.layer_idx, *split, self.options)
        else:
            mixed = self._dense(split, shape[0], attention_mask, past_key_values, options)
        return self.after(states, mixed.reshape(len(rows), -1)).view(shape)

    def _turned(self, given: Cosines, states: Tensor) -> Cosines | None:
        """Return cosines and sines of each row of ``states [B, T, H]``."""
        if self.rotary is None:
            return None
        cos, sin = (x.expand(*states.shape[:2], -1).reshape(-1, x.shape[-1]) for x in given)
        return self.rotary((cos, sin))

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        return torch.split(rows, [self.shape.heads, self.shape.shared, self.shape.shared], dim=1)

    def _dense(
        self, split: Sequence[Tensor], batch: int, mask: Tensor | None, past_key_values: Any, options: dict[str, Any]
    ) -> Tensor:
        """Attend with transformers' own function."""
        queries, keys, values = (x.reshape(batch, -1, *x.shape[1:]).transpose(1, 2) for x in split)
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.attention.layer_idx)
        eager = getattr(sys.modules[type(self.attention).__module__], "eager_attention_forward", None)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.attention.config._attn_implementation, eager)
        settings: dict[str, Any] = {"scaling": self.options.scale, "sliding_window": self.options.window}
        if self.options.softcap is not None:
            settings["softcap"] = self.options.softcap
        if self.options.sinks is not None:
            settings["s_aux"] = self.options.sinks
        mixed: Tensor = attend(self.attention, queries, keys, values, mask, **settings, **options)[0]
        return mixed


class FusedLayer(LayerForward, Generic[P]):
    """Decoder layer on volley's CPU kernels."""

    def __init__(
        self,
        layer: nn.Module,
        seen: Recognised,
        rotary: LayerRotary | None,
        weights: LayerWeights[P],
        experts: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take a recognised layer with its weights; ``experts`` replace the MLP if the layer has experts."""
        super().__init__(layer, seen, rotary)
        self.weights, self.experts = weights, experts

    @staticmethod
    def of(
        layer: nn.Module, rotary: nn.Module, weights: Weights, files: MappedFiles | None = None
    ) -> "FusedLayer[Product] | None":
        """Fuse a layer; ``None`` if a trial shows another result.

        The trial makes up the layer's matmuls. Weights whose stored codes are copied may be on the meta device.
        """
        if not hasattr(layer, "self_attn") or not fits(layer, weights):
            return None
        made_up = _all_made_up(layer)
        seen = recognise(layer, rotary, made_up)
        if seen is None:
            return None
        routed = seen.routed
        if routed is not None and not routed.fits(_format_of_experts(layer, weights)):
            return None

        def mix(x: Tensor) -> Tensor:
            assert routed is not None
            return made_up[routed.experts.experts](x, *routed.choose(x))

        mlp = None if routed is None else mix

        def side_by_side(layers: Sequence[nn.Linear]) -> Callable[[Tensor], Tensor]:
            return lambda x: torch.cat([made_up[layer](x) for layer in layers], dim=-1)

        own = layer_weights(layer, side_by_side, seen.style, mlp and (lambda: (mlp, mlp, None)))
        for turning in seen.rotaries:
            if FusedLayer(layer, seen, turning, own, mlp).computes(seen):
                products = products_of(layer, weights, files, seen.style, routed)
                experts = None if routed is None else Experts(products, seen.shape(layer))
                return FusedLayer(layer, seen, turning, products, experts)
        return None

    def before(self, states: Tensor, turns: Cosines | None) -> Tensor:
        of, size = self.weights, self.shape
        rows = of.project(self._norm(states, of.before_attention)).view(len(states), -1, size.dim)
        turned = None if turns is None else Turns(*turns)
        native.norm_and_turn(rows, of.norms, turned, size.heads, size.shared, size.eps, rounds=size.rounds)
        return rows

    def after(self, states: Tensor, mixed: Tensor) -> Tensor:
        of = self.weights
        states = self._add(states, of.output(mixed), of.behind_attention)
        normed = self._norm(states, of.before_mlp)
        if self.experts is not None:
            return self._add(states, self.experts(normed), of.behind_mlp)
        return self._add(states, of.down(native.gated(of.gate_up(normed), self.shape.activation)), of.behind_mlp)

    def _norm(self, states: Tensor, weight: Tensor | None) -> Tensor:
        return states if weight is None else native.rms_norm(states, weight, self.shape.eps, rounds=self.shape.rounds)

    def _add(self, states: Tensor, update: Tensor, weight: Tensor | None) -> Tensor:
        update = self._norm(update, weight)
        return states + (update if self.shape.residual == 1.0 else update * self.shape.residual)


class FusedDecoder:
    """All layers of a model in one call."""

    def __init__(
        self,
        layers: Sequence[LayerWeights[Product]],
        shape: LayerShape,
        windows: Sequence[int | None],
        rotaries: Sequence[LayerRotary | None] = (),
    ) -> None:
        """Take each layer's window (see :class:`AttentionOptions`) and rotary embedding, by default Llama's."""
        own = rotaries or [PLAIN] * len(layers)
        self.rotaries = list(dict.fromkeys(rotary for rotary in own if rotary is not None))
        """Rotary embeddings for which :meth:`__call__` needs cosines and sines."""
        turns = [-1 if rotary is None else self.rotaries.index(rotary) for rotary in own]
        self._decoder = Decoder(layers, shape, turns)
        self._scale = shape.scale
        self._attends = attends(shape.heads, shape.shared, shape.dim)
        self._windows = list(dict.fromkeys(windows))
        self._plans = [self._windows.index(window) for window in windows]
        self._store: Callable[[], KVStore | None] = lambda: None  # a weak reference
        self._alone = Lock()  # engines that share a target may run in several threads

    @classmethod
    def of_layers(cls, layers: Sequence[nn.Module]) -> Self | None:
        """Make a decoder of transformers' layers, if all of them are fused and of one shape."""
        fused = [vars(layer).get("forward") for layer in layers]
        found = [forward for forward in fused if isinstance(forward, FusedLayer)]
        if not found or len(found) < len(fused):
            return None
        widest = max(found, key=lambda layer: layer.shape.inner).shape
        if any(replace(layer.shape, inner=widest.inner) != widest for layer in found):
            return None
        windows, rotaries = [layer.options.window for layer in found], [layer.rotary for layer in found]
        return cls([layer.weights for layer in found], widest, windows, rotaries)

    def serves(self, store: KVStore) -> bool:
        """Return whether the kernels can read K and V in ``store``."""
        return self._attends and serves(store, AttentionOptions(self._scale))

    def __call__(
        self,
        states: Tensor,
        turns: Sequence[Cosines],
        batch: RaggedBatch,
        store: KVStore,
        tapped: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor]:
        """Return the states ``[T, H]`` after the last layer, from embeddings ``[T, H]``.

        Also return the states after the layers ``tapped``, -1 being before the first: ``[T, len(tapped) · H]``. ``turns`` are
        the model's cosines and sines ``[T, width]`` for each of :attr:`rotaries`.
        """
        plans = [attention_plan(batch, window) for window in self._windows]
        turned = [Turns(*rotary(given)) for rotary, given in zip(self.rotaries, turns, strict=True)]
        states = states.clone(memory_format=torch.contiguous_format)
        with self._alone:
            self._place(store)
            features = self._decoder.run(states, turned, plans, tapped)
        return states, features

    def _place(self, store: KVStore) -> None:
        if store is not self._store():
            assert isinstance(store, DenseKVStore)
            self._decoder.place(store.keys, store.values, self._plans)
            self._store = ref(store)


def _causal(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend causally: ``[1, heads, T, d] -> [1, T, heads, d]``."""
    return scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True).transpose(
        1, 2
    )


@torch.no_grad()
def _try(
    layer: nn.Module, rotary: nn.Module, kind: str | None, states: Tensor
) -> tuple[Cosines, AttentionOptions, tuple[Tensor, ...], Tensor, Tensor] | None:
    """Return what :class:`Recognised` has of a layer applied to ``states [1, T, H]``, from ``turns`` to ``output``.

    Return ``None`` if the layer's arguments differ from Llama's.
    """
    asked: list[tuple[AttentionOptions, tuple[Tensor, ...], Tensor]] = []

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
        mixed = _causal(query, key, value, scaling)
        split = tuple(x[0].transpose(0, 1) for x in (query, key, value))
        asked.append((AttentionOptions(scaling, sliding_window, softcap, s_aux), split, mixed[0].flatten(1)))
        return mixed, None

    config: Any = layer.self_attn.config  # type: ignore[union-attr]
    # A layer that reads positions itself (Ministral 3 scales queries by them, from 16,384 on) gets none, fails and is not fused.
    before, positions = config._attn_implementation, torch.arange(states.shape[1], device=states.device)[None]
    with _ASKING:
        ALL_ATTENTION_FUNCTIONS["volley_asking"] = attend
        config._attn_implementation = "volley_asking"
        try:
            turns = turns_of(rotary, kind, states, positions)
            output = layer(states, position_embeddings=turns, position_ids=None, attention_mask=None)
        except TypeError:
            return None
        finally:
            config._attn_implementation = before
            del ALL_ATTENTION_FUNCTIONS["volley_asking"]
    return (turns, *asked[0], output) if len(asked) == 1 and isinstance(output, Tensor) else None


def _activation(mlp: Any) -> Activation | None:
    """Return the activation of a gated MLP, if the kernels have it."""
    x, function = torch.linspace(-3, 3, 7), getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    if function is None:
        return None
    if torch.equal(function(x), silu(x)):
        return SILU
    return GELU if torch.equal(function(x), gelu(x, approximate="tanh")) else None
