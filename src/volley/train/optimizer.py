"""Make optimizers: AdamW, or Muon for the matrices and AdamW for the vectors behind one interface."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from volley import native
from volley.train.options import TrainConfig, filled

WEIGHT_DECAY = 0.01
"""Weight decay of matrices."""


def make_optimizer(config: TrainConfig, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer of the options. Weight decay applies to matrices only."""
    matrices, vectors = ([p for p in parameters if (p.ndim > 1) == wanted] for wanted in (True, False))
    rate = filled(config.learning_rate)
    if config.optimizer == "muon":
        return MuonWithAdamW(matrices, vectors, rate, WEIGHT_DECAY)
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, fused=True)


def product_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype that the device multiplies fastest: bf16 if it has instructions for it, else fp32."""
    return torch.bfloat16 if device.type == "cuda" or native.has_dot_products else torch.float32


class Muon(torch.optim.Optimizer):
    """Nesterov's momentum, made nearly orthogonal by Newton-Schulz steps; updates have AdamW's size (RMS 0.2).

    torch.optim.Muon takes five steps of one polynomial in bf16, which is 40 times as slow as fp32 on a CPU without bf16
    instructions. This optimizer takes three steps of three polynomials over all matrices of one shape at once, in bf16 if the
    machine multiplies it. Each polynomial brings the singular values left by the step before nearest to 1 (Polar Express,
    arXiv 2505.16932). Those above a hundredth of the largest end between 0.73 and 1.27.
    """

    COEFFICIENTS = ((8.0934, -23.6204, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526))
    ABOVE = 1.02
    """Factor by which the largest singular value is overestimated: matmuls round, and the polynomials grow fast beyond 1."""

    def __init__(
        self,
        matrices: Iterable[Tensor],
        lr: float,
        weight_decay: float = 0.0,
        *,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        self.momentum = momentum

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            for shape in sorted({tuple(p.shape) for p in with_gradient}):
                self._update([p for p in with_gradient if p.shape == shape], group)

    def _update(self, same: list[Tensor], group: dict[str, Any]) -> None:
        updates = []
        for p in same:
            assert p.grad is not None
            own = self.state[p]
            if not own:
                own["momentum_buffer"] = torch.zeros_like(p)
            mean = own["momentum_buffer"].lerp_(p.grad, 1 - self.momentum)
            updates.append(torch.lerp(p.grad, mean, self.momentum))
        rate = group["lr"] * 0.2 * math.sqrt(max(same[0].shape))
        for p, update in zip(same, self.orthogonal(torch.stack(updates)), strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=rate)

    def orthogonal(self, x: Tensor) -> Tensor:
        """Return matrices like ``x [matrices, rows, columns]`` with singular values near 1."""
        is_tall = x.shape[1] > x.shape[2]
        x = (x.mT if is_tall else x).to(product_dtype(x.device))
        x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
        for number, (a, b, c) in enumerate(self.COEFFICIENTS):
            gram = x @ x.mT
            if number == 0:  # Σ σ⁴ is its squared norm, so no σ² exceeds the norm
                most = gram.norm(dim=(1, 2), keepdim=True).clamp(min=1e-14) * self.ABOVE**2
                gram, x = gram / most, x / most.sqrt()
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.mT if is_tall else x


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers stepped together. Muon's updates are scaled to AdamW's size, so one learning rate serves both."""

    def __init__(self, matrices: Sequence[Tensor], vectors: Sequence[Tensor], lr: float, weight_decay: float) -> None:
        self.parts: tuple[torch.optim.Optimizer, ...] = (
            Muon(matrices, lr, weight_decay),
            torch.optim.AdamW(vectors, lr=lr, weight_decay=0.0, fused=True),
        )
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "closures are not supported"
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]
