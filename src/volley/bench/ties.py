"""Detection of greedy answers that part at a tie: two tokens whose logits are equal to within rounding."""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

TIE_UNITS = 2
"""Largest gap of a tie, in units in the last place of the largest logit.

A bf16 logit has 8 significant bits, so the gap of two logits changes by whole units. Between passes of one row and of eight,
measured on the bundled pair, it changed by at most 2 units at all but 3 of 6,331 positions. All answers that parted, volley's and
transformers', did so at a gap of 2 units or less (docs/benchmarks/identity.md).
"""


class Judge(Protocol):
    """Part of ``Engine`` that finding ties needs."""

    def next_logits(self, token_ids: Sequence[int]) -> Tensor: ...


def first_difference(mine: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the index at which two answers part, or ``None``. If one is a prefix of the other, it is the shorter one's
    length."""
    shared = min(len(mine), len(theirs))
    at = next((i for i in range(shared) if mine[i] != theirs[i]), shared)
    return None if at == len(mine) == len(theirs) else at


def unit_in_last_place(value: float, dtype: torch.dtype) -> float:
    """Return the distance between neighbouring numbers of ``dtype`` at ``value``: 0.0625 for bf16 between 8 and 16."""
    tiny = torch.finfo(dtype).tiny
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(value), tiny)))


def tied_logits(
    judge: Judge, token_ids: Sequence[int], dtype: torch.dtype, chosen: Sequence[int] | None = None
) -> tuple[float, float] | None:
    """Return the largest logit after ``token_ids`` and a rival's if at most ``TIE_UNITS`` separate them, else ``None``.

    The rival is the lower one of the ``chosen`` tokens, with which two answers continued; without them it is the second largest
    logit.
    """
    logits = judge.next_logits(token_ids)
    first, second = logits.topk(2).values.tolist()
    rival = second if chosen is None else logits[list(chosen)].min().item()
    return (first, rival) if first - rival <= TIE_UNITS * unit_in_last_place(first, dtype) else None


def is_tie(judge: Judge, prompt: Sequence[int], mine: Sequence[int], theirs: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether two differing answers to ``prompt`` part at a tie of the two tokens chosen there.

    An answer that ends while the other continues has chosen no token, so that is never a tie.
    """
    at = first_difference(mine, theirs)
    assert at is not None, "the answers are equal"
    if at == min(len(mine), len(theirs)):
        return False
    return tied_logits(judge, [*prompt, *theirs[:at]], dtype, (mine[at], theirs[at])) is not None
