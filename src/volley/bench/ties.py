"""Whether greedy answers part because the target itself cannot tell: its two largest logits tie to within rounding."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Judge(Protocol):
    """The part of ``Engine`` that finding ties needs."""

    def next_logits(self, token_ids: Sequence[int]) -> Tensor: ...


def first_difference(mine: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Where two answers part, or ``None``: at the end of the shorter one if they agree until there."""
    shared = min(len(mine), len(theirs))
    at = next((i for i in range(shared) if mine[i] != theirs[i]), shared)
    return None if at == len(mine) == len(theirs) else at


def tied_logits(judge: Judge, token_ids: Sequence[int], dtype: torch.dtype) -> tuple[float, float] | None:
    """The target's two largest logits after ``token_ids`` if no more than two units in the last place of ``dtype`` part them."""
    first, second = judge.next_logits(token_ids).topk(2).values.tolist()
    tied = first - second <= 2 * torch.finfo(dtype).eps * max(abs(first), abs(second))
    return (first, second) if tied else None
