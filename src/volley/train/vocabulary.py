"""Choose the tokens that a drafter drafts, and those whose logits enter its loss: all, or the frequent ones if that is faster.

A cycle reads the target's weights to verify, and its head once more to draft. Most rows of a large head are of very rare tokens.
Drafting N of V tokens does not read the other rows, but a position whose token is not among the N is never accepted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from volley.models.checkpoints.checkpoint import Checkpoint
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.export import TargetEnds, with_vocabulary
from volley.train.documents import Document, response_counts
from volley.train.features import FrozenTarget

SMALLEST = 8192
"""Smallest size to try. Sizes are powers of two; a smaller head is cheap beside the rest of a cycle."""
ACCEPTED = 0.8
"""Assumed acceptance probability of a position whose token is in the vocabulary: τ = 1 / (1 − 0.8) = 5."""
PAYS = 1.03
"""Least speedup for which the vocabulary is reduced."""
LOOKED_AT, DRAWN, LARGE = 1024, 512, 4096
"""Number of frequent tokens in a step's loss, number of other tokens drawn for it, and the smallest vocabulary for that."""


def coverage(counts: Tensor, others: Tensor, size: int) -> float:
    """Return the share of the tokens counted in ``others [V]`` that are among the ``size`` most frequent of ``counts [V]``."""
    kept = counts.argsort(descending=True, stable=True)[:size]
    return float(others[kept].sum() / others.sum().clamp(min=1))


def expected_speed(covered: float, weights: int, drafted_rows: int, width: int) -> float:
    """Return the tokens per weight that a cycle reads: ``weights`` of the target, and ``drafted_rows`` of its head [V, width]."""
    return 1 / (1 - ACCEPTED * covered) / (weights + drafted_rows * width)


def choose_vocabulary(documents: Sequence[Document], vocab_size: int, width: int, weights: int) -> int | None:
    """Return the size of the draft vocabulary with the highest expected speed; ``None`` for all tokens.

    ``weights`` is the number of weights that a pass of the target reads, ``width`` the length of a row of its head. Coverage is
    measured by cross-validation: tokens are chosen by one half of the responses and counted in the other. So few responses,
    which say little about rare tokens, keep all tokens.
    """
    halves = [response_counts(documents[part::2], vocab_size) for part in (0, 1)]
    best, most = None, PAYS * expected_speed(1.0, weights, vocab_size, width)
    size = SMALLEST
    while size < vocab_size:
        covered = min(coverage(first, second, size) for first, second in (halves, halves[::-1]))
        speed = expected_speed(covered, weights, size, width)
        if speed > most:
            best, most = size, speed
        size *= 2
    return best


@dataclass(frozen=True)
class Vocabulary:
    """The ``size`` most frequent tokens by ``counts [V]``, and the head whose rows draft them."""

    size: int
    counts: Tensor
    ends: TargetEnds

    def reduce(self, drafter: Drafter) -> Drafter:
        """Return a copy of ``drafter`` that drafts only these tokens."""
        checkpoint = Checkpoint(drafter.config, drafter.state_dict())
        reduced = with_vocabulary(checkpoint, self.ends, self.counts.tolist(), self.size)
        copy = Drafter(reduced.config)
        copy.load_state_dict(reduced.tensors)
        return copy


class LossTokens:
    """Tokens in the loss of a step: the frequent ones, the step's labels, and a sample of the others.

    Each sampled token stands for its share of the others, by a bias on its logit (importance sampling). So the softmax's
    denominator is right on average. On a CPU the whole head would take a quarter of a step at a vocabulary of 8,192.
    """

    def __init__(self, counts: Tensor) -> None:
        """Choose the frequent tokens by ``counts [V]`` in the responses."""
        order = counts.argsort(descending=True, stable=True)
        self.frequent, others = order[:LOOKED_AT], order[LOOKED_AT:]
        self.others = others[torch.randperm(len(others), generator=torch.Generator().manual_seed(0))]

    def __call__(self, head: Tensor, labels: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return rows ``[n, width + 1]`` of ``head``, whose last column is a bias, and the index of each of the ``labels``.

        The sample depends only on the labels, so a resumed run draws the same.
        """
        is_sure = torch.zeros(len(head), dtype=torch.bool)
        is_sure[self.frequent] = is_sure[labels] = True
        sure, drawn = is_sure.nonzero()[:, 0], self.others.roll(-int(labels.sum()))[:DRAWN]
        drawn = drawn[~is_sure[drawn]]
        rows = head[torch.cat([sure, drawn])]
        if rows.shape[1] == width:
            rows = torch.nn.functional.pad(rows, (0, 1))
        rows[len(sure) :, -1] += math.log((len(head) - len(sure)) / max(1, len(drawn)))
        return rows, (is_sure.cumsum(0) - 1)[labels]


def loss_tokens(documents: Sequence[Document], target: FrozenTarget) -> LossTokens | None:
    """Return the tokens in a training's loss. ``None`` for all: if they are few, on a GPU, or if logits are capped."""
    if target.vocab_size < LARGE or target.device.type != "cpu" or target.softcap is not None:
        return None
    return LossTokens(response_counts(documents, target.vocab_size))
