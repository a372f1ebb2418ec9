"""A decoder layer's row operations by PyTorch, by which the Triton kernels are judged."""

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu


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
