"""Apply a decoder layer's row operations between its linear layers, fused: in PyTorch here, in Triton on a GPU."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from volley.memory import kernels


class AddNorm(Protocol):
    def __call__(self, states: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return ``states + update`` and its RMS norm, both ``[T, H]``; without an update the states are returned unchanged."""


class NormAndTurn(Protocol):
    def __call__(
        self, rows: Tensor, norms: tuple[Tensor, Tensor] | None, cos: Tensor, sin: Tensor, heads: int, eps: float
    ) -> None:
        """Norm queries and keys by weights ``[d]``, if there are any, and apply the rotary embedding; in place.

        ``rows [T, heads + 2 · shared, d]`` are ``heads`` queries, then ``shared`` keys and as many values. ``cos`` and
        ``sin``: ``[T, d]``.
        """


class GatedSilu(Protocol):
    def __call__(self, rows: Tensor) -> Tensor:
        """Return ``silu(gate) · up`` ``[T, I]`` for ``rows [T, 2 · I]``, gates first."""


class RowOperations(NamedTuple):
    add_norm: AddNorm
    norm_and_turn: NormAndTurn
    gated_silu: GatedSilu


def add_norm(states: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    states = states if update is None else states + update
    return states, rms_norm(states, weight.shape, weight, eps)


def norm_and_turn(
    rows: Tensor, norms: tuple[Tensor, Tensor] | None, cos: Tensor, sin: Tensor, heads: int, eps: float
) -> None:
    shared = (rows.shape[1] - heads) // 2
    for part, which in ((rows[:, :heads], 0), (rows[:, heads : heads + shared], 1)):
        x = part.float()
        if norms is not None:
            x = rms_norm(x, x.shape[-1:], norms[which].float(), eps)
        left, right = x.chunk(2, dim=-1)
        part.copy_(x * cos.float()[:, None] + torch.cat((-right, left), dim=-1) * sin.float()[:, None])


def gated_silu(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return silu(gate) * up


REFERENCE = RowOperations(add_norm, norm_and_turn, gated_silu)


def row_operations(device: torch.device) -> RowOperations:
    """Return the fastest row operations on ``device``."""
    if not kernels.usable(device):
        return REFERENCE
    from volley.memory.kernels import rows

    return RowOperations(rows.add_norm, rows.norm_and_turn, rows.gated_silu)
