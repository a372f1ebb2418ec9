"""Draft for requests under constraints: token by token, after one pass of the block drafter."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from volley.decode.constrained import Following, columns, grow_constrained, walk_constrained
from volley.decode.rules import Constraint
from volley.decode.work import Shape, Work, Works
from volley.models.drafters.heads import BoundHead
from volley.proposers.choose import Head, sizes_of


def draft_constrained(works: Works, head: Head, hidden: Tensor, logits: Tensor, *, with_confidence: bool) -> None:
    """Draft from the final states ``hidden [Σ k, H]`` and ``logits [Σ k, V]`` of the positions of ``works``.

    Without a head that must run after each token, a GPU's logits are read once and the host goes on alone.
    """
    sizes = sizes_of(works)
    states, rows = torch.split(hidden, sizes), torch.split(logits, sizes)
    near = _read_rows(list(zip(works, rows, strict=True))) if head is None else rows
    for work, *own in zip(works, states, near, strict=True):
        following = _following(head, *own)
        if work.spec.shape is Shape.TREE:
            work.proposal = grow_constrained(following, work)
        else:
            work.proposal = walk_constrained(following, work, logits.device, with_confidence=with_confidence)


def _read_rows(each: Sequence[tuple[Work[Any], Tensor]]) -> list[Tensor]:
    """Return the rows ``[k, V]`` of each work, copied to the host together if no rule of the work runs on the device."""
    near = [all(isinstance(rule, Constraint) for rule in work.request.rules) for work, _ in each]
    moved = [rows for (_, rows), is_near in zip(each, near, strict=True) if is_near]
    if not moved or moved[0].device.type == "cpu":
        return [rows for _, rows in each]
    copies = iter(torch.split(torch.cat(moved).cpu(), [len(rows) for rows in moved]))
    return [next(copies) if is_near else rows for (_, rows), is_near in zip(each, near, strict=True)]


def _following(head: Head, hidden: Tensor, logits: Tensor) -> Following:
    """Return the logits of one block's positions given the token before each, from ``hidden [k, H]`` and ``logits [k, V]``."""
    size = logits.shape[-1]
    if head is None:
        return Following(lambda position, _, among: columns(logits[position : position + 1], among), size, False)
    after = head.transitions(hidden, logits, [len(hidden)])
    best = head.chooser(hidden, logits) if isinstance(head, BoundHead) else None
    return Following(lambda position, token, among: after([position], [token], among), size, not head.pairwise, best)
