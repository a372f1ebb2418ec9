"""Experts of a decoder layer as matmuls, and their router, recognised by trying."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, silu

from volley import native
from volley.models.layers.host_memory import MappedFiles, StackedRows
from volley.models.layers.products import StoredCodes, inputs_of
from volley.native import GELU, SILU, Activation, Product, Weights
from volley.native.decoder import Routing
from volley.weights import BLOCK

WEIGHTS = ("gate_up_proj", "down_proj")
StoredExperts = Mapping[str, Callable[[], StoredCodes]]
"""Readers of the stored codes of experts, stacked, by the names in :data:`WEIGHTS`; those that are missing are rounded."""


class GatedExperts(NamedTuple):
    """Weights of transformers' gated experts, and their activation."""

    experts: Any
    activation: Activation

    @classmethod
    def of(cls, experts: nn.Module) -> Self | None:
        """Recognise experts; ``None`` if they compute something else."""
        own: Any = experts
        if not getattr(own, "has_gate", False) or own._is_expert_parallel or "forward" in vars(own):
            return None
        activation = _activation(own)
        return None if activation is None else cls(own, activation)

    @property
    def number(self) -> int:
        return len(self.experts.down_proj)

    @property
    def inner(self) -> int:
        size: int = self.experts.down_proj.shape[1 if self.experts.is_transposed else 2]
        return size

    @property
    def hidden(self) -> int:
        size: int = self.experts.down_proj.shape[2 if self.experts.is_transposed else 1]
        return size

    def rows(self, name: str) -> list[Tensor]:
        """Return the weights of all experts, ``[out, in]`` each, gate before up."""
        weight = self.experts.get_parameter(name).detach()
        matrices = weight.transpose(1, 2) if self.experts.is_transposed else weight
        if name == WEIGHTS[0] and not self.experts.is_concatenated:
            return [half for matrix in matrices for half in (matrix[::2], matrix[1::2])]
        return list(matrices)

    def bias(self, name: str) -> Tensor | None:
        """Return the biases of all experts, in the order of :meth:`rows`."""
        if not self.experts.has_bias:
            return None
        bias: Tensor = self.experts.get_parameter(f"{name}_bias").detach()
        if name == WEIGHTS[0] and not self.experts.is_concatenated:
            bias = bias.view(len(bias), -1, 2).transpose(1, 2)
        return bias.reshape(-1)

    def stored(self, name: str) -> StoredCodes:
        """Return the stored codes of all experts, in the order of :meth:`rows`; empty if the weights are not stored in codes."""
        found: StoredExperts = getattr(self.experts, "stored_experts", {})
        return found[name]() if name in found else []

    def fits(self, weights: Weights) -> bool:
        """Return whether the kernels support the experts' sizes, each expert being a part of one weight."""
        alike = all(native.fits(self.rows(name)[0], weights, inputs_of(self.stored(name))) for name in WEIGHTS)
        return alike and not any(size % BLOCK for size in (2 * self.inner, self.hidden))

    def product(self, name: str, weights: Weights, files: MappedFiles | None) -> Product:
        """Copy the weights of all experts."""
        own_files = None if self.experts.is_transposed else files
        return Product(StackedRows(self.rows(name), own_files), self.bias(name), weights, self.stored(name))


class RoutedMLP(NamedTuple):
    """Router with a softmax, and gated experts."""

    router: Any
    experts: GatedExperts
    is_normed: bool
    """True if the weights of a token's experts sum to 1."""

    @classmethod
    @torch.no_grad()
    def of(cls, router: nn.Module, experts: nn.Module) -> Self | None:
        """Recognise a router and its experts; ``None`` if they compute something else."""
        own = GatedExperts.of(experts)
        weight = getattr(router, "weight", None)
        if own is None or not hasattr(router, "top_k") or not isinstance(weight, Tensor) or weight.is_meta:
            return None
        if weight.dtype != own.experts.down_proj.dtype:
            return None
        x = torch.randn(6, weight.shape[1], generator=torch.Generator().manual_seed(1)).to(weight)
        chosen = router(x)
        if not isinstance(chosen, tuple) or len(chosen) != 3:
            return None
        _, weights, ids = chosen
        order = ids.argsort(dim=-1)
        for is_normed in (True, False):
            found = cls(router, own, is_normed)
            own_ids, own_weights = found.choose(x)
            own_order = own_ids.argsort(dim=-1)
            alike = torch.equal(own_ids.gather(-1, own_order), ids.gather(-1, order))
            wanted = weights.gather(-1, order).float()
            if alike and torch.allclose(own_weights.gather(-1, own_order).float(), wanted, rtol=2**-6, atol=1e-6):
                return found
        return None

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of normed states ``[T, H]`` and their weights, ``[T, chosen]``."""
        scores = linear(x, self.router.weight, getattr(self.router, "bias", None)).float().softmax(dim=-1)
        weights, ids = scores.topk(self.router.top_k, dim=-1)
        if self.is_normed:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return ids, weights.to(x.dtype)

    def fits(self, weights: Weights) -> bool:
        """Return whether the kernels support the sizes of experts and router."""
        return self.experts.fits(weights) and native.fits(self.router.weight, "bf16")

    def products(self, weights: Weights, files: MappedFiles | None) -> tuple[Product, Product, Routing[Product]]:
        """Copy the weights of all experts and of the router, which stays bf16."""
        bias = getattr(self.router, "bias", None)
        scores = Product(self.router.weight.detach(), None if bias is None else bias.detach(), "bf16")
        routing = Routing(scores, len(self.router.weight), self.router.top_k, self.is_normed)
        gate_up, down = (self.experts.product(name, weights, files) for name in WEIGHTS)
        return gate_up, down, routing


def made_up_experts(experts: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a map that replaces experts in a trial: other inputs with other signs for each, weighted and summed."""
    chance, is_transposed = torch.Generator().manual_seed(2), experts.is_transposed
    count, hidden = len(experts.down_proj), experts.down_proj.shape[2 if is_transposed else 1]
    places = torch.randint(hidden, (count, hidden), generator=chance)
    signs = 2 * torch.randint(2, (count, hidden), generator=chance) - 1

    def mix(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        found = x[:, None].expand(*ids.shape, hidden).gather(2, places[ids]) * signs[ids]
        return (found * weights[..., None].float()).sum(dim=1).to(x.dtype)

    return mix


def _clamped(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def _activation(experts: Any) -> Activation | None:
    """Return the activation of experts, if the kernels have it."""
    x = torch.linspace(-9, 9, 64).view(2, 32).to(experts.down_proj.dtype)
    gate, up = x.chunk(2, dim=-1) if experts.is_concatenated else (x[:, ::2], x[:, 1::2])
    choices: dict[Activation, Callable[[], Tensor]] = {
        SILU: lambda: silu(gate) * up,
        GELU: lambda: gelu(gate, approximate="tanh") * up,
    }
    if hasattr(experts, "alpha") and hasattr(experts, "limit"):
        own = Activation("clamped", float(experts.alpha), float(experts.limit))
        choices[own] = lambda: _clamped(gate, up, own.alpha, own.limit)
    expected = experts._apply_gate(x).float()
    alike = (name for name, make in choices.items() if torch.allclose(make().float(), expected, rtol=2**-6, atol=1e-6))
    return next(alike, None)
