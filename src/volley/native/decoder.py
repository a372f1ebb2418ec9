"""Paged attention and whole decoder layers in C, for bf16 models on a CPU."""

from collections.abc import Callable, Sequence
from ctypes import Structure, addressof, byref, c_float, c_int64, c_void_p
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar

import torch
from torch import Tensor

from volley.native import (
    GROUP,
    SILU,
    Activation,
    ActivationStruct,
    HeadsStruct,
    Product,
    ProductStruct,
    Turns,
    TurnsStruct,
    functions,
    input_buffers,
    pointer,
)
from volley.weights import STORED


class _Plan(Structure):
    _fields_ = (
        *(("written", c_void_p), ("tokens", c_int64), ("units", c_void_p), ("num_units", c_int64)),
        *((name, c_void_p) for name in ("slots", "begins", "ends")),
    )


class _AttentionCall(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("queries", "keys", "values", "key_pool", "value_pool", "out", "sinks")),
        *((name, c_int64) for name in ("stride", "heads", "shared", "dim")),
        *(("scale", c_float), ("cap", c_float)),
    )


_NORMS = ("before_attention", "behind_attention", "before_mlp", "behind_mlp", "query_norm", "key_norm", "sinks")
"""Weights in fp32, all optional."""
_PRODUCTS = ("project", "output", "gate_up", "down")


class _Experts(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("count", "chosen", "normed")),
        *(("gate_up", c_void_p), ("down", c_void_p), ("scores", ProductStruct)),
    )


class _Layer(Structure):
    _fields_ = (
        *((name, c_void_p) for name in (*_NORMS, "key_pool", "value_pool")),
        *(("plan", c_int64), ("turns", c_int64), ("experts", c_void_p)),
        *((name, ProductStruct) for name in _PRODUCTS),
    )


class _Shape(Structure):
    _fields_ = (
        *(("hidden", c_int64), ("heads", HeadsStruct), ("activation", ActivationStruct)),
        *((name, c_float) for name in ("scale", "cap", "residual")),
    )


_ROOM = ("normed", "rows", "mixed", "gated", "active", "values", "scales", "sums")
_ROOM_OF_EXPERTS = ("scores", "ids", "starts", "order", "weights", "summed", "gathered")


class _Scratch(Structure):
    _fields_ = tuple((name, c_void_p) for name in (*_ROOM, *_ROOM_OF_EXPERTS))


def attends(heads: int, shared: int, dim: int) -> bool:
    """Return whether the kernel supports heads ``[dim]`` of which ``heads / shared`` share K and V."""
    return dim % 16 == 0 and dim <= 256 and heads <= 32 * shared


class AttentionPlan:
    """Map from a batch's tokens to the K/V slots that they see, made once for all layers with the same window.

    ``written [T]``: the slot of each token's own K and V. ``units [U, 5]``: first token, number of tokens, first entry in
    ``slots``, number of entries, position of the first entry. ``begins``, ``ends`` ``[T]``: positions a token sees. All int64.
    """

    def __init__(self, written: Tensor, units: Tensor, slots: Tensor, begins: Tensor, ends: Tensor) -> None:
        self._tensors = (written, units, slots, begins, ends)  # the struct points into them
        self.struct = _Plan(
            *(written.data_ptr(), len(written), units.data_ptr(), len(units)),
            *(slots.data_ptr(), begins.data_ptr(), ends.data_ptr()),
        )

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store ``keys`` and ``values`` ``[T, shared, d]`` in the pools ``[slots, shared, d]``, then attend.

        ``queries [T, heads, d]`` have the result's shape. All three have the same stride between tokens and are contiguous
        within a token.
        """
        out = torch.empty(queries.shape, dtype=torch.bfloat16)
        sinks = None if sinks is None else sinks.detach().float()
        call = _AttentionCall(
            *map(pointer, (queries, keys, values, key_pool, value_pool, out, sinks)),
            *(queries.stride(0), queries.shape[1], keys.shape[1], queries.shape[2], scale, softcap or 0.0),
        )
        functions().paged_attention(byref(call), byref(self.struct))
        return out


# -- decoder layers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerShape:
    """Sizes and switches common to the layers of one call."""

    hidden: int
    heads: int
    shared: int
    """Number of K/V heads."""
    dim: int
    inner: int
    """Width of the MLP's gated activation."""
    eps: float
    scale: float
    rounds: bool = True
    """True if norms also round to bf16 before their weight."""
    activation: Activation = SILU
    residual: float = 1.0
    """Factor of the outputs of attention and MLP before they are added to the states."""
    softcap: float | None = None
    """Cap of attention scores (:class:`AttentionOptions`)."""

    @property
    def struct(self) -> _Shape:
        """Return the C struct, for heads that are normed separately."""
        heads = HeadsStruct(self.heads, self.shared, self.dim, 0, self.rounds, self.eps)
        scales = self.scale, self.softcap or 0.0, self.residual
        return _Shape(self.hidden, heads, self.activation.struct, *scales)


P = TypeVar("P", bound=Callable[[Tensor], Tensor])


@dataclass(frozen=True)
class Routing(Generic[P]):
    """Routing of tokens to the experts of a layer."""

    scores: P
    """Matmul that gives scores ``[T, E]`` of states ``[T, H]``."""
    count: int
    chosen: int
    """Number of experts for each token."""
    is_normed: bool
    """True if the weights of a token's experts sum to 1."""


@dataclass(frozen=True)
class LayerWeights(Generic[P]):
    """Weights of a layer's norms and matmuls: q, k and v; attention's output; gate and up; down.

    With ``routing`` the last two hold all experts, stacked.
    """

    before_attention: Tensor | None
    """Norm weight ``[H]``, like all norms before and after attention and MLP."""
    behind_attention: Tensor | None
    before_mlp: Tensor | None
    behind_mlp: Tensor | None
    query_norm: Tensor | None
    """Norm weight ``[d]`` for each head, or ``[heads · d]`` for all heads as one."""
    key_norm: Tensor | None
    sinks: Tensor | None
    """Attention sinks (:class:`AttentionOptions`)."""
    project: P
    output: P
    gate_up: P
    down: P
    routing: Routing[P] | None = None

    @property
    def norms(self) -> tuple[Tensor, Tensor] | None:
        """Norms of queries and keys, if there are any."""
        return None if self.query_norm is None or self.key_norm is None else (self.query_norm, self.key_norm)

    @property
    def products(self) -> tuple[P, ...]:
        scores = () if self.routing is None else (self.routing.scores,)
        return self.project, self.output, self.gate_up, self.down, *scores


class _Workspace:
    """Buffers for the activations of layers, for the largest number of tokens so far."""

    def __init__(self, shape: LayerShape, routings: Sequence[Routing[Product]]) -> None:
        self._shape, self._routings = shape, routings
        self._tokens, self._struct, self._tensors = 0, _Scratch(), list[Tensor | None]()

    def of(self, tokens: int) -> _Scratch:
        if tokens > self._tokens:
            shape = self._shape
            heads = shape.heads * shape.dim
            widest = max(shape.hidden, shape.inner, heads)
            widths = (shape.hidden, heads + 2 * shape.shared * shape.dim, heads, 2 * shape.inner, shape.inner)
            buffers: list[Tensor | None] = [torch.empty(tokens * width, dtype=torch.bfloat16) for width in widths]
            buffers += input_buffers(tokens, -(-widest // GROUP) * GROUP, min(of.group for of in STORED.values()))
            if self._routings:
                buffers += self._of_experts(tokens)
            self._tokens, self._struct, self._tensors = tokens, _Scratch(*map(pointer, buffers)), buffers
        return self._struct

    def _of_experts(self, tokens: int) -> list[Tensor]:
        count, chosen = (max(getattr(own, name) for own in self._routings) for name in ("count", "chosen"))
        states = tokens * self._shape.hidden
        return [
            torch.empty(tokens * count, dtype=torch.bfloat16),
            *(torch.empty(size, dtype=torch.int64) for size in (tokens * chosen, count + 1, tokens * chosen)),
            *(torch.empty(size, dtype=torch.float32) for size in (tokens * chosen, states)),
            torch.empty(states, dtype=torch.bfloat16),
        ]


class _StackedExperts:
    """Experts, each a part of stacked weights."""

    def __init__(self, gate_up: Product, down: Product, count: int, shape: LayerShape) -> None:
        self._parts = [  # the structs point into them
            [whole.part(e * own, (e + 1) * own) for e in range(count)]
            for whole in (gate_up, down)
            for own in [whole.outputs // count]
        ]
        self._arrays = [(ProductStruct * count)(*(part.struct for part in parts)) for parts in self._parts]
        self.struct = _Experts(count, 0, 0, *map(addressof, self._arrays))
        self._shape = shape

    def _mix(self, function: Callable[..., None], x: Tensor, scratch: _Scratch) -> Tensor:
        """Return the weighted sum of each token's experts."""
        x = x.contiguous()
        out = torch.empty_like(x)
        function(
            *(addressof(self.struct), x.data_ptr(), out.data_ptr(), len(x)), byref(self._shape.struct), byref(scratch)
        )
        return out


class Experts(_StackedExperts):
    """Experts of a layer, and their routing."""

    def __init__(self, layer: LayerWeights[Product], shape: LayerShape) -> None:
        assert layer.routing is not None
        of = layer.routing
        super().__init__(layer.gate_up, layer.down, of.count, shape)
        self.struct.chosen, self.struct.normed, self.struct.scores = of.chosen, of.is_normed, of.scores.struct
        self._workspace = _Workspace(shape, [of])

    def __call__(self, x: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts for normed states ``[T, H]``."""
        return self._mix(functions().mix_experts, x, self._workspace.of(len(x)))


class ChosenExperts(_StackedExperts):
    """Experts of a layer whose routing is computed elsewhere."""

    def __init__(self, gate_up: Product, down: Product, count: int, activation: Activation) -> None:
        """Take the stacked weights of ``count`` experts, gate before up."""
        self.gate_up, self.down, self._workspaces = gate_up, down, dict[int, _Workspace]()
        shape = LayerShape(gate_up.inputs, 0, 0, 0, down.inputs, 0.0, 1.0, activation=activation)
        super().__init__(gate_up, down, count, shape)
        self._alone = Lock()  # engines that share a target may run in several threads

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts for states ``[T, H]``; ``ids`` and ``weights``: ``[T, chosen]``."""
        if not len(x):
            return x
        ids, weights, chosen = ids.long().contiguous(), weights.float().contiguous(), ids.shape[1]
        with self._alone:
            if chosen not in self._workspaces:
                self._workspaces[chosen] = _Workspace(
                    self._shape, [Routing(self.down, len(self._parts[0]), chosen, False)]
                )
            scratch = _Scratch.from_buffer_copy(self._workspaces[chosen].of(len(x)))
            scratch.ids, scratch.weights, self.struct.chosen = ids.data_ptr(), weights.data_ptr(), chosen
            return self._mix(functions().mix_chosen_experts, x, scratch)


class Decoder:
    """Layers of one shape that run in one call."""

    def __init__(self, layers: Sequence[LayerWeights[Product]], shape: LayerShape, turns: Sequence[int]) -> None:
        """Take the layers and ``turns``, each layer's index of a rotary embedding of the pass; -1: none."""
        self._layers, self._shape = tuple(layers), shape
        self._array = (_Layer * len(layers))()
        self._norms: list[Tensor] = []
        self._experts = [None if layer.routing is None else Experts(layer, shape) for layer in layers]
        for struct, layer, own, experts in zip(self._array, layers, turns, self._experts, strict=True):
            struct.turns = own
            struct.experts = None if experts is None else addressof(experts.struct)
            for name in _NORMS:
                if (weight := getattr(layer, name)) is not None:
                    self._norms.append(weight.detach().float().contiguous())
                    setattr(struct, name, self._norms[-1].data_ptr())
            for name in _PRODUCTS:
                setattr(struct, name, getattr(layer, name).struct)
        of_queries = layers[0].query_norm
        self._struct = shape.struct
        self._struct.heads.whole = of_queries is not None and len(of_queries) != shape.dim
        self._workspace = _Workspace(shape, [layer.routing for layer in layers if layer.routing is not None])

    def place(self, keys: Sequence[Tensor], values: Sequence[Tensor], plans: Sequence[int]) -> None:
        """Set each layer's K and V pools ``[slots, shared, d]``, and its index of an attention plan of the pass."""
        for struct, *pools, plan in zip(self._array, keys, values, plans, strict=True):
            struct.key_pool, struct.value_pool = map(pointer, pools)
            struct.plan = plan

    def run(
        self, states: Tensor, turns: Sequence[Turns], plans: Sequence[AttentionPlan], tapped: Sequence[int] = ()
    ) -> Tensor:
        """Run contiguous states ``[T, H]`` through all layers in place.

        Return the states after the layers ``tapped``, -1 being before the first: ``[T, len(tapped) · H]``.
        """
        structs = (_Plan * len(plans))(*(plan.struct for plan in plans))
        of_turns = (TurnsStruct * len(turns))(*(own.struct for own in turns))
        features = states.new_empty(len(states), len(tapped) * states.shape[1])
        functions().run_layers(
            *(self._array, len(self._layers), byref(self._struct), structs, of_turns, states.data_ptr()),
            *(
                features.data_ptr(),
                (c_int64 * len(tapped))(*tapped),
                len(tapped),
                byref(self._workspace.of(len(states))),
            ),
        )
        return features
