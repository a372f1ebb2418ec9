"""Denoise a block in several steps: how many positions each step reveals, and which (AitherOS DFlash; DFlash is the one-step
case)."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from volley.errors import ConfigError, unknown_key

# Weight of a step by its start and end in [0, 1]. Cosine reveals most in the first steps, sqrt most in the last.
SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "cosine": lambda start, _: math.cos(start * math.pi / 2),
    "linear": lambda start, end: end - start,
    "sqrt": lambda start, end: math.sqrt(1 - start) - math.sqrt(1 - end),
}


def reveal_counts(num_positions: int, num_steps: int, schedule: str) -> list[int]:
    """Return the number of positions to reveal in each of ``num_steps`` steps; their sum is ``num_positions``.

    Each step gets its share, rounded down. The rest goes to the steps of largest weight, earliest first. 16 positions in 4
    cosine steps are ``[6, 5, 3, 2]``.
    """
    if schedule not in SCHEDULES:
        raise unknown_key("denoising schedule", schedule, SCHEDULES)
    if num_steps < 1:
        raise ConfigError(f"denoising_steps is {num_steps}; it must be at least 1")
    weights = [SCHEDULES[schedule](step / num_steps, (step + 1) / num_steps) for step in range(num_steps)]
    total = sum(weights)
    counts = [math.floor(num_positions * weight / total + 1e-9) for weight in weights]
    heaviest = sorted(range(num_steps), key=lambda step: -weights[step])
    for step in heaviest[: num_positions - sum(counts)]:
        counts[step] += 1
    return counts


def denoise(
    blocks: list[Tensor],
    num_steps: int,
    schedule: str,
    logits_of: Callable[[list[int]], Tensor],
    choose: Callable[[int, Tensor], Tensor],
    threshold: float | None = None,
) -> Tensor:
    """Fill in the masks of ``blocks``, token ids ``[1 + k]`` of anchor and positions, in place, the most confident first.

    ``logits_of(indices)`` returns the logits ``[Σ k, V]`` of all positions of the given blocks. ``choose(index, logits [k, V])``
    returns a token for each position of one block. Each step reveals as many positions as the schedule says. With a
    ``threshold`` it also reveals those whose most likely token has a higher probability. A full block is skipped. Returns the
    logits of the first step.
    """
    sizes = [len(block) - 1 for block in blocks]
    counts = [reveal_counts(size, num_steps, schedule) for size in sizes]
    masked = [torch.ones(size, dtype=torch.bool) for size in sizes]
    left = list(range(len(blocks)))
    first = logits = logits_of(left)
    sure = math.inf if threshold is None else math.log(threshold)
    for step in range(num_steps):
        if step:
            logits = logits_of(left)
        for index, rows in zip(left, torch.split(logits, [sizes[index] for index in left]), strict=True):
            tokens = choose(index, rows).cpu()
            confidence = rows.float().log_softmax(dim=-1).amax(dim=-1).cpu()
            chosen = reveal(masked[index], confidence, counts[index][step], sure)
            blocks[index][1:][chosen] = tokens[chosen]
            masked[index] &= ~chosen
        left = [index for index in left if bool(masked[index].any())]
        if not left:
            break
    return first


def reveal(masked: Tensor, confidence: Tensor, count: int, sure: float = math.inf) -> Tensor:
    """Return the ``count`` most confident masked positions and all above ``sure``, as a boolean mask ``[k]``.

    ``masked [k]`` is boolean; ``confidence [k]`` is any score of the drafter.
    """
    score = confidence.masked_fill(~masked, -torch.inf)
    chosen = score > sure
    chosen[score.topk(min(count, int(masked.sum()))).indices] = True
    return chosen
