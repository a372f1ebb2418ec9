"""Experts as grouped matmuls on a CPU, in half of transformers' operations.

transformers' function also serves expert parallelism, biases and other layouts. Here the activation runs over contiguous rows,
``index_select`` replaces the slower general indexing, and one operation scatters the rows back.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, grouped_mm

from volley import native
from volley.native import BLOCK


def group_experts(module: nn.Module) -> bool:
    """Replace the forward of transformers' experts by :class:`GroupedExperts`, if it supports them."""
    if not hasattr(module, "gate_up_proj") or not hasattr(module, "has_gate"):
        return False
    own: Any = module
    weights = own.gate_up_proj, own.down_proj
    is_plain = own.has_gate and not (own.has_bias or own.is_transposed or own._is_expert_parallel)
    is_usual = type(own)._apply_gate.__name__ == "_default_apply_gate"
    fits = all(w.device.type == "cpu" and w.dtype in (torch.float32, torch.bfloat16) for w in weights)
    if not (is_plain and is_usual and fits and own.config._experts_implementation == "grouped_mm"):
        return False
    module.forward = GroupedExperts(own)
    return True


def is_gelu(function: Any) -> bool:
    """Return whether ``function`` is GELU in its tanh form, for which there is a kernel."""
    x = torch.linspace(-3, 3, 7)
    return torch.equal(function(x), gelu(x, approximate="tanh"))


class CodedExperts:
    """Forward of experts whose weights are codes: rows of ``gate_up [E · 2 · I, H]`` and ``down [E · H, I]``."""

    def __init__(self, experts: Any, gate_up: native.Product, down: native.Product) -> None:
        inner, width = gate_up.outputs // len(experts.down_proj), down.outputs // len(experts.down_proj)
        self.gate_up, self.down, self.gate = gate_up, down, experts._apply_gate
        self.parts = [
            (gate_up.part(i * inner, i * inner + inner), down.part(i * width, i * width + width))
            for i in range(len(experts.down_proj))
        ]

    @staticmethod
    def serves(experts: Any) -> bool:
        """Return whether experts have a gate, no biases, and sizes of whole blocks, as :class:`GroupedExperts` needs."""
        down = experts.down_proj
        is_plain = getattr(experts, "has_gate", False) and not (experts.has_bias or experts.is_transposed)
        return bool(is_plain and not experts._is_expert_parallel and not any(size % BLOCK for size in down.shape[1:]))

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return ``[T, H]`` for states ``[T, H]`` and each token's experts and their weights ``[T, k]``."""
        found = hidden_states.new_empty(*top_k_index.shape, hidden_states.shape[1])
        for expert in set(top_k_index.flatten().tolist()):
            gate_up, down = self.parts[expert]
            rows, places = (top_k_index == expert).nonzero(as_tuple=True)
            found[rows, places] = down(self.gate(gate_up(hidden_states.index_select(0, rows))))
        return (found * top_k_weights[..., None]).sum(dim=1).to(hidden_states.dtype)


class GroupedExperts:
    """Forward of experts with the weights ``gate_up_proj [E, 2 · I, H]`` and ``down_proj [E, H, I]``."""

    def __init__(self, experts: Any) -> None:
        self.gate_up: Tensor = experts.gate_up_proj.detach().transpose(-2, -1)
        self.down: Tensor = experts.down_proj.detach().transpose(-2, -1)
        self.active: nn.Module = experts.act_fn
        self.has_kernel = native.is_built and is_gelu(experts.act_fn)
        self.numbers = torch.arange(len(self.down))

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return ``[T, H]`` for states ``[T, H]`` and each token's experts and their weights ``[T, k]``."""
        chosen, order = top_k_index.reshape(-1).sort()
        ends = torch.searchsorted(chosen, self.numbers, right=True, out_int32=True)
        rows = hidden_states.index_select(0, order // top_k_index.shape[1])
        found = grouped_mm(self._gate(grouped_mm(rows, self.gate_up, offs=ends)), self.down, offs=ends)
        found = found * top_k_weights.reshape(-1).index_select(0, order)[:, None]
        placed = torch.empty_like(found).index_copy_(0, order, found)
        return placed.view(*top_k_index.shape, hidden_states.shape[-1]).sum(dim=1).to(hidden_states.dtype)

    def _gate(self, both: Tensor) -> Tensor:
        if self.has_kernel and both.dtype == torch.float32:
            return native.gated_gelu(both)
        gate, up = both.chunk(2, dim=-1)
        active: Tensor = self.active(gate.contiguous())
        return active * up
