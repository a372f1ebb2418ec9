"""Which tokens a drafter drafts, and which its loss looks at: all of its target's, or the frequent ones where that pays.

A cycle reads the target's weights once to verify and its head once more to draft; most rows of a large head are of tokens that
hardly ever come. Drafting N of V tokens saves the rest, and loses the draft positions whose token is not among the N.
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
"""Smallest size to try. Sizes are powers of two; below this one a head is small beside everything else."""
ACCEPTED = 0.8
"""The chance of a draft position, if the token is in the vocabulary, that the rule reckons with: τ = 1 / (1 − 0.8) = 5."""
PAYS = 1.03
"""How many times faster a cycle's tokens must become."""
LOOKED_AT, DRAWN, LARGE = 1024, 512, 4096
"""Frequent tokens that a step's loss looks at, others beside them, and the smallest vocabulary where that saves something."""


def coverage(counts: Tensor, others: Tensor, size: int) -> float:
    """The share of the tokens counted in ``others [V]`` that are among the ``size`` most frequent of ``counts [V]``."""
    kept = counts.argsort(descending=True, stable=True)[:size]
    return float(others[kept].sum() / others.sum().clamp(min=1))


def expected_speed(covered: float, weights: int, drafted_rows: int, width: int) -> float:
    """Tokens for each weight that a cycle reads: ``weights`` of the target and ``drafted_rows`` of a head of that ``width``."""
    return 1 / (1 - ACCEPTED * covered) / (weights + drafted_rows * width)


def choose_vocabulary(documents: Sequence[Document], vocab_size: int, width: int, weights: int) -> int | None:
    """The number of drafted tokens that promises most speed; ``None`` for all.

    ``weights`` is the number of weights that a pass of the target reads, ``width`` the length of a row of its head. What N tokens
    cover is judged on responses other than those that chose them: on each half by the other, so that few responses, which
    say little about rare tokens, keep all.
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
    """The ``size`` tokens that ``counts [V]`` has most of, and the head whose rows draft them."""

    size: int
    counts: Tensor
    ends: TargetEnds

    def reduce(self, drafter: Drafter) -> Drafter:
        """A copy of ``drafter`` that drafts these tokens alone."""
        checkpoint = Checkpoint(drafter.config, drafter.state_dict())
        reduced = with_vocabulary(checkpoint, self.ends, self.counts.tolist(), self.size)
        copy = Drafter(reduced.config)
        copy.load_state_dict(reduced.tensors)
        return copy


class LossTokens:
    """The tokens that the loss of a step looks at: the frequent ones, the step's labels, and a few of the others.

    Each of the few stands for its share of all others, by a bias on its logit (importance sampling), so that the sum under the
    softmax is right on average. On a CPU the whole head would take a quarter of a step at a vocabulary of 8,192.
    """

    def __init__(self, counts: Tensor) -> None:
        """``counts [V]``: how often each token stands in the responses."""
        order = counts.argsort(descending=True, stable=True)
        self.frequent, others = order[:LOOKED_AT], order[LOOKED_AT:]
        self.others = others[torch.randperm(len(others), generator=torch.Generator().manual_seed(0))]

    def __call__(self, head: Tensor, labels: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Rows ``[n, width + 1]`` of the ``head``, whose last column is a bias, and where each of the ``labels`` is in them.

        Which others are drawn depends on the labels alone, so that a resumed run draws the same.
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
    """Return the tokens that a training's loss looks at; ``None`` for all: if they are few, on a GPU, or if logits are capped."""
    if target.vocab_size < LARGE or target.device.type != "cpu" or target.softcap is not None:
        return None
    return LossTokens(response_counts(documents, target.vocab_size))
