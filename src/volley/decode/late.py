"""Drafts that stay on the device until the target's choices are read, so that the host waits once a step and not twice.

Their tokens go from the drafter's choice into the target's pass without the host, which prepares that pass meanwhile. Until they
are read, ``Proposal.token_ids`` are zeros. Drafts that a rule, a tree or a cut by confidences needs before are read at once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from volley.decode.sampling import best_tokens
from volley.decode.work import Work
from volley.types import Late, Proposal


def late_proposals(works: Sequence[Work[Any]], tokens: Tensor, confidence: Tensor | None) -> None:
    """Give each work its part of ``tokens [Σ k]`` and of ``confidence [Σ k]``, which the host has not read."""
    start = 0
    for work in works:
        part = slice(start, start := start + work.ask.positions)
        late = Late(tokens[part], None if confidence is None else confidence[part])
        work.proposal = Proposal([0] * work.ask.positions, late=late)


def read_choices(logits: Tensor, works: Sequence[Work[Any]]) -> list[int]:
    """The most likely token of each row of ``logits [R, V]``; late drafts of ``works`` are read in the same copy."""
    late = [work.proposal for work in works if work.proposal.late is not None]
    if not late:
        return best_tokens(logits)
    parts = [own for proposal in late for own in _parts(proposal)]
    values = torch.cat([logits.argmax(dim=-1), *parts]).tolist()
    choices, at = values[: len(logits)], len(logits)
    for proposal in late:
        assert proposal.late is not None
        size = len(proposal.token_ids)
        proposal.token_ids, at = values[at : at + size], at + size
        if proposal.late.confidence is not None:
            bits, at = np.array(values[at : at + size], dtype=np.int64), at + size
            proposal.confidence = bits.view(np.float64).tolist()
        proposal.late = None
    return choices


def _parts(proposal: Proposal) -> list[Tensor]:
    """Integers ``[k]`` each: the tokens, and the bits of the confidences."""
    assert proposal.late is not None
    sure = proposal.late.confidence
    return [proposal.late.token_ids, *([] if sure is None else [sure.view(torch.int64)])]
