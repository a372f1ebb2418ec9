"""Llama-like and Qwen-like decoder layers in at most twelve operations on a GPU, attention included.

Projections of one input are one matrix, and the layer's own weights are views of it, so memory holds each weight once.
``memory/kernels/rows.py`` has the operations between the matmuls.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from volley.models.layers.fused import Cosines, LayerForward, Recognised, layer_weights, layers_with_rotary, recognise
from volley.native.decoder import LayerShape


@dataclass(frozen=True, slots=True)
class Matrix:
    """Merged weight and bias of several layers; the layers' own become views of them."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, layers: Sequence[nn.Linear]) -> Self:
        together: list[Tensor | None] = []
        for name in ("weight", "bias"):
            parts = [getattr(layer, name) for layer in layers]
            if parts[0] is None:
                together.append(None)
                continue
            whole = torch.cat([part.detach() for part in parts])
            for layer, view in zip(layers, torch.split(whole, [len(part) for part in parts]), strict=True):
                setattr(layer, name, nn.Parameter(view, requires_grad=False))
            together.append(whole)
        weight, bias = together
        assert weight is not None
        return cls(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def add_to(self, states: Tensor, x: Tensor) -> Tensor:
        states.addmm_(x, self.weight.T)
        return states if self.bias is None else states.add_(self.bias)


def row_operations() -> Any:
    """Return the Triton kernels of a layer's norms, rotation and activation."""
    from volley.memory.kernels import rows  # it imports Triton

    return rows


class MergedWeights:
    """Weights of one layer, and its computation before and after attention."""

    def __init__(self, layer: Any, shape: LayerShape) -> None:
        self.shape, self.weights = shape, layer_weights(layer, Matrix.of)
        before, behind = self.weights.before_attention, self.weights.before_mlp
        assert before is not None
        assert behind is not None
        self.first_norm, self.second_norm = before, behind
        self.rows = row_operations()

    def before(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return queries, keys and values ``[T, heads + 2 · shared, d]`` of states ``[T, H]``; ``cos``, ``sin``: ``[T, d]``."""
        of, size = self.weights, self.shape
        _, normed = self.rows.add_norm(states, None, self.first_norm, size.eps)
        rows = of.project(normed).view(len(states), -1, size.dim)
        self.rows.norm_and_turn(rows, of.norms, cos, sin, size.heads, size.eps)
        return rows

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Split rows into queries ``[T, heads, d]``, keys and values ``[T, shared, d]``."""
        size = self.shape
        return rows.split_with_sizes([size.heads, size.shared, size.shared], dim=1)

    def after(self, states: Tensor, mixed: Tensor) -> Tensor:
        """Return the states ``[T, H]`` after the layer, from the states before it and attention's output ``[T, heads · d]``."""
        of = self.weights
        states, normed = self.rows.add_norm(states, of.output(mixed), self.second_norm, self.shape.eps)
        return of.down.add_to(states, self.rows.gated_silu(of.gate_up(normed)))


class MergedLayer(LayerForward):
    """Forward of one of transformers' decoder layers with merged projections."""

    def __init__(self, layer: nn.Module, seen: Recognised) -> None:
        super().__init__(layer, seen, seen.rotaries[0])
        self.merged = MergedWeights(layer, self.shape)

    @classmethod
    def of(cls, layer: nn.Module, rotary: nn.Module) -> Self | None:
        """Merge a layer's projections; ``None`` if a trial shows another result."""
        seen = recognise(layer, rotary)
        if seen is None or not seen.is_llamas(layer):
            return None
        own = cls(layer, seen)
        return own if own.computes(seen) else None

    def before(self, states: Tensor, turns: Cosines | None) -> Tensor:
        assert turns is not None
        return self.merged.before(states, *turns)

    def after(self, states: Tensor, mixed: Tensor) -> Tensor:
        return self.merged.after(states, mixed)


def merge_layers(model: Any) -> int:
    """Replace the forward of every layer that can be merged; return their number."""
    found = [(layer, MergedLayer.of(layer, rotary)) for layer, rotary in layers_with_rotary(model)]
    for layer, merged in found:
        if merged is not None:
            layer.forward = merged
    return sum(merged is not None for _, merged in found)
