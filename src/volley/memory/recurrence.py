"""Compute the linear recurrence of recurrent layers, for runs of tokens that may be trees.

One form covers gated delta nets (Yang et al. 2024), their variant with a decay per channel (Kimi Delta Attention) and Mamba-2,
whose B, C and dt·x are keys, queries and values. A state ``S [keys, values]`` of each head follows

    S ← e^g S;   S ← S + k ⊗ u  with  u = beta (v − Sᵀ k), or u = v without beta;   o = Sᵀ q

A run of T tokens is computed at once. A token's G is the sum of g over its ancestors and itself, and ``D_ij = e^(G_i − G_j)``
if j is an ancestor of i or i itself, else 0. Then ``u = (I + strict part of diag(beta)(k kᵀ ∘ D))⁻¹ diag(beta)(v − e^G k S)``
and ``o = e^G q S + (q kᵀ ∘ D) u``. In a chain the ancestors are all earlier tokens. A token's u depends only on its ancestors,
so the state after any token follows from u, k and G. No token is computed again when a draft is cut.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import threshold

_ROWS = 16  # queries whose decays are held at once if every channel has its own decay
_LEAST = 1e-22
"""Threshold below which factors become 0, because products with denormal numbers are up to ten times slower on a CPU."""


class Run(NamedTuple):
    """Inputs of the recurrence for N runs of T tokens, in fp32 with heads first; padding tokens are all zeros."""

    queries: Tensor
    """Queries ``[N, heads, T, keys]``."""
    keys: Tensor
    """Keys ``[N, heads, T, keys]``."""
    values: Tensor
    """Values ``[N, heads, T, values]``."""
    decays: Tensor
    """Log-decays g ≤ 0: ``[N, heads, T, keys]``, or ``[N, heads, T, 1]`` if all channels of a head share them."""
    betas: Tensor | None
    """Betas ``[N, heads, T, 1]``; ``None``: nothing is subtracted (Mamba-2)."""

    def map(self, change: Callable[[Tensor], Tensor]) -> "Run":
        """Apply one change to every part."""
        betas = None if self.betas is None else change(self.betas)
        return Run(change(self.queries), change(self.keys), change(self.values), change(self.decays), betas)


class Trace(NamedTuple):
    """Intermediate values of N runs from which, with the states before them, the states after any token follow."""

    keys: Tensor
    updates: Tensor
    """Updates u ``[N, heads, T, values]``."""
    totals: Tensor
    """Cumulative log-decays G, as wide as the decays."""


def scan(run: Run, states: Tensor, ancestors: Tensor) -> tuple[Tensor, Trace]:
    """Return outputs ``[N, heads, T, values]`` after ``states [N, heads, keys, values]``, and the trace.

    ``ancestors [N or 1, T, T]`` (boolean) says if token j is an ancestor of token i, or i itself.
    """
    length = run.keys.shape[2]
    totals = run.decays if length == 1 else ancestors[:, None].to(run.decays.dtype) @ run.decays
    decay = _factors(totals)
    updates = run.values
    if run.betas is not None:
        updates = run.betas * (updates - (run.keys * decay) @ states)
        if length > 1:
            system = run.betas * _products(run.keys, run.keys, totals, ancestors)  # its diagonal is taken as 1
            updates = torch.linalg.solve_triangular(system, updates, upper=False, unitriangular=True)
    mixed = _products(run.queries, run.keys, totals, ancestors) @ updates
    return (run.queries * decay) @ states + mixed, Trace(run.keys, updates, totals)


def _products(left: Tensor, keys: Tensor, totals: Tensor, ancestors: Tensor) -> Tensor:
    """Return ``left kᵀ ∘ D``: ``[N, heads, T, T]``."""
    if keys.shape[2] == 1:
        return (left * keys).sum(dim=-1, keepdim=True)
    outside = ~ancestors[:, None]
    if totals.shape[-1] == 1:
        differences = totals - totals.transpose(-1, -2)
        return (left @ keys.transpose(-1, -2)) * _factors(differences.masked_fill(outside, -torch.inf))
    rows = []
    for start in range(0, keys.shape[2], _ROWS):
        own = slice(start, start + _ROWS)
        differences = totals[:, :, own, None] - totals[:, :, None]
        decays = _factors(differences.masked_fill(outside[:, :, own, :, None], -torch.inf))
        rows.append(torch.einsum("nhic,nhjc,nhijc->nhij", left[:, :, own], keys, decays))
    return torch.cat(rows, dim=2)


def _factors(logarithms: Tensor) -> Tensor:
    return threshold(logarithms.exp(), _LEAST, 0.0)


class Advance(NamedTuple):
    """Function from the states before N runs to those after them: ``factors · S + keysᵀ updates``."""

    factors: Tensor
    """Decay factors ``[N, heads, keys or 1, 1]``."""
    keys: Tensor
    """Keys ``[N, heads, T, keys]``, zero for tokens that are no ancestors of the last one."""
    updates: Tensor

    def __call__(self, states: Tensor) -> Tensor:
        return self.factors * states + self.keys.transpose(-1, -2) @ self.updates


def advance(trace: Trace, ancestors: Tensor, rows: Tensor) -> Advance:
    """Return the function from the states before each run to those after its token ``rows [N]``."""
    index = torch.arange(len(rows), device=rows.device)
    last = trace.totals[index, :, rows][:, :, None]
    inside = ancestors.expand(len(rows), -1, -1)[index, rows][:, None, :, None]
    decays = _factors((last - trace.totals).masked_fill(~inside, -torch.inf))
    return Advance(_factors(last).transpose(-1, -2), trace.keys * decays, trace.updates)
