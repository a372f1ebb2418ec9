"""Draw anchors, and build their blocks with the label of each slot."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def draw_anchors(start: int, length: int, count: int, seed: str) -> list[int]:
    """Draw ``count`` distinct anchors, ascending, in a response at positions ``[start, length)``.

    The last position is never an anchor, because no token follows it. The draw depends only on ``seed``.
    """
    candidates = range(start, length - 1)
    if len(candidates) <= count:
        return list(candidates)
    return sorted(random.Random(seed).sample(candidates, count))


def draw_reveals(count: int, block_size: int, share: float, seed: str) -> Tensor:
    """Draw the slots ``[count, B − 1]`` that hold their true token: a random number of slots in a ``share`` of the blocks.

    At least one slot of a block is predicted. The draw depends only on ``seed``.
    """
    generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(63))
    order = torch.rand(count, block_size - 1, generator=generator).argsort(-1)
    numbers = torch.randint(1, max(2, block_size - 1), (count,), generator=generator)
    chosen = torch.rand(count, generator=generator) < share
    return order < torch.where(chosen, numbers, 0)[:, None]


@dataclass(frozen=True)
class Blocks:
    """Blocks of one step, ``A`` for each of ``D`` documents; missing ones have weight 0.

    ``anchors [D, A]``; ``token_ids`` and ``positions`` ``[D, A, B]`` are the drafter's input. ``labels [D, A, B − 1]`` are the
    tokens to predict in slots 1 … B−1. ``valid`` marks the slots that are inside the response and not ``revealed``.
    """

    anchors: Tensor
    token_ids: Tensor
    positions: Tensor
    labels: Tensor
    valid: Tensor
    revealed: Tensor

    @property
    def block_size(self) -> int:
        return self.token_ids.shape[2]


def build_blocks(
    token_ids: Tensor,
    lengths: Sequence[int],
    anchors: Sequence[Sequence[int]],
    block_size: int,
    mask_token_id: int,
    reveals: Sequence[Tensor] | None = None,
) -> Blocks:
    """Build the blocks at ``anchors`` of right-padded documents ``token_ids [D, S]`` of ``lengths``.

    ``reveals`` marks for each document the slots that hold their true token; ``None``: no slot does.
    """
    width = max(len(row) for row in anchors)
    device = token_ids.device
    table = torch.tensor([[*row, *([-1] * (width - len(row)))] for row in anchors], device=device)
    real = table >= 0
    table = table.clamp(min=0)
    positions = table[..., None] + torch.arange(block_size, device=device)
    inside = (positions < torch.tensor(lengths, device=device)[:, None, None]) & real[..., None]
    tokens = token_ids.gather(1, positions.clamp(max=token_ids.shape[1] - 1).flatten(1)).view(positions.shape)
    inputs = torch.full_like(tokens, mask_token_id)
    inputs[..., 0] = tokens[..., 0]
    valid, revealed = inside[..., 1:], torch.zeros_like(inside[..., 1:])
    for document, own in enumerate(reveals or ()):
        revealed[document, : len(own)] = own
    revealed &= valid
    inputs[..., 1:] = torch.where(revealed, tokens[..., 1:], inputs[..., 1:])
    return Blocks(table, inputs, positions, tokens[..., 1:], valid & ~revealed, revealed)
