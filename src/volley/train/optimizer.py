"""The optimizers: AdamW, or Muon for the matrices with AdamW for the vectors behind the interface of one optimizer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from volley.train.options import TrainConfig


def make_optimizer(config: TrainConfig, parameters: Sequence[nn.Parameter], sharded: bool) -> torch.optim.Optimizer:
    """The optimizer that the options ask for; weight decay applies to matrices only."""
    matrices, vectors = ([p for p in parameters if (p.ndim > 1) == wanted] for wanted in (True, False))
    if config.optimizer == "muon":
        return MuonWithAdamW(matrices, vectors, config.learning_rate, config.weight_decay)
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=not sharded)


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers stepped together. Muon's updates are scaled to AdamW's size, so one learning rate serves both."""

    def __init__(self, matrices: Sequence[Tensor], vectors: Sequence[Tensor], lr: float, weight_decay: float) -> None:
        self.parts: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
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
