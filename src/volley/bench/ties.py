"""Whether greedy answers part because the target itself cannot tell: the two tokens tie to within rounding."""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

TIE_UNITS = 2
"""How many units in the last place of the largest logit still count as a tie.

A bf16 logit has 8 significant bits, so the gap of two logits changes by whole units. Measured on the bundled pair: between passes
of one row and of eight it changed by 0, 1, 2, 3 and 4 units at 4,535, 1,704, 89, 2 and 1 of 6,331 positions. All answers that
parted, volley's and transformers', did so at a gap of 2 units or less (docs/benchmarks/identity.md, benchmarks/ties.py).
"""


class Judge(Protocol):
    """The part of ``Engine`` that finding ties needs."""

    def next_logits(self, token_ids: Sequence[int]) -> Tensor: ...


def first_difference(mine: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Where two answers part, or ``None``: at the end of the shorter one if they agree until there."""
    shared = min(len(mine), len(theirs))
    at = next((i for i in range(shared) if mine[i] != theirs[i]), shared)
    return None if at == len(mine) == len(theirs) else at


def unit_in_last_place(value: float, dtype: torch.dtype) -> float:
    """The distance between neighbouring numbers of ``dtype`` at ``value``: 0.0625 for bf16 between 8 and 16."""
    tiny = torch.finfo(dtype).tiny
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(value), tiny)))


def tied_logits(
    judge: Judge, token_ids: Sequence[int], dtype: torch.dtype, chosen: Sequence[int] | None = None
) -> tuple[float, float] | None:
    """The largest logit after ``token_ids`` and that of a rival if ``TIE_UNITS`` part them at most.

    The rival is the lower one of the ``chosen`` tokens: those that two answers went on with. Without them it is the second
    largest logit.
    """
    logits = judge.next_logits(token_ids)
    first, second = logits.topk(2).values.tolist()
    rival = second if chosen is None else logits[list(chosen)].min().item()
    return (first, rival) if first - rival <= TIE_UNITS * unit_in_last_place(first, dtype) else None


def is_tie(judge: Judge, prompt: Sequence[int], mine: Sequence[int], theirs: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether two differing answers to ``prompt`` part at a tie of the two tokens they choose there.

    An answer that ends where the other goes on has chosen nothing: that is never a tie.
    """
    at = first_difference(mine, theirs)
    assert at is not None, "the answers are equal"
    if at == min(len(mine), len(theirs)):
        return False
    return tied_logits(judge, [*prompt, *theirs[:at]], dtype, (mine[at], theirs[at])) is not None
