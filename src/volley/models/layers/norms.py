"""RMS norms of transformers' families, recognised by trying them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class NormStyle(NamedTuple):
    """Way in which a norm applies its weight."""

    offset: float
    """Number added to the weight before multiplication."""
    rounds: bool
    """True if the normed input is rounded to its dtype before multiplication, too."""

    def scale(self, weight: Tensor) -> Tensor:
        """Return the factors: ``weight`` itself, or its sum with the offset in fp32."""
        return weight.detach() if not self.offset else weight.detach().float() + self.offset

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute the norm with PyTorch's operations."""
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        normed = normed.to(x.dtype).float() if self.rounds else normed
        return (normed * self.scale(weight).float()).to(x.dtype)


STYLES = (NormStyle(0.0, rounds=True), NormStyle(0.0, rounds=False), NormStyle(1.0, rounds=False))
"""Styles of Llama, OLMo 2 and Gemma."""


def eps_of(norm: Any) -> float | None:
    """Return the number that a norm adds to the mean of squares."""
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return eps if isinstance(eps, float) else None


@torch.no_grad()
def style_of(norms: Sequence[nn.Module]) -> NormStyle | None:
    """Return the style closest to all ``norms``; ``None`` if one of them has none of these styles."""
    errors = [0.0] * len(STYLES)
    for norm in norms:
        weight, eps = getattr(norm, "weight", None), eps_of(norm)
        if not isinstance(weight, Tensor) or eps is None or weight.dim() != 1 or weight.is_meta:
            return None
        probe = torch.linspace(-2, 3, 4 * len(weight), dtype=weight.dtype, device=weight.device).view(4, -1)
        expected = norm(probe).float()
        for place, style in enumerate(STYLES):
            error = (style(probe, weight, eps).float() - expected).norm() / expected.norm().clamp_min(1e-30)
            errors[place] = max(errors[place], float(error))
    best = min(range(len(STYLES)), key=errors.__getitem__)
    return STYLES[best] if norms and errors[best] <= 2**-7 else None
