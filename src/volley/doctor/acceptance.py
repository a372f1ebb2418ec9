"""What a drafter would gain on known answers: every position is drafted from, and the cycles of decoding are walked through.

Where the answers are the target's own greedy ones, this is the τ that decoding has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from volley.models.drafter import Drafter
from volley.models.taps import Taps
from volley.train.anchors import build_blocks
from volley.train.documents import Document, pad
from volley.train.features import FrozenTarget
from volley.train.step import BlockForward

MOST_ANCHORS = 128
UNLIKELY = -20.0
"""Log-probability of tokens that a reduced vocabulary does not have."""


@dataclass
class Walk:
    """Tokens gained from every position of each document's answer, bonus included."""

    gained: list[list[int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """The drafter's mean cross-entropy of the block at each position: it moves before τ does."""

    def cycles(self, block_size: int | None = None) -> list[int]:
        """What the cycles of decoding gain, with blocks of at most ``block_size``, anchor included."""
        found = []
        for row in self.gained:
            at = 0
            while at < len(row):
                found.append(row[at] if block_size is None else min(row[at], block_size))
                at += found[-1]
        return found

    def tau_with(self, block_size: int | None) -> float:
        cycles = self.cycles(block_size)
        return sum(cycles) / max(1, len(cycles))

    @property
    def tau(self) -> float:
        return self.tau_with(None)

    @property
    def loss(self) -> float:
        """The mean of ``losses``."""
        return sum(self.losses) / max(1, len(self.losses))


@torch.no_grad()
def walk(
    drafter: Drafter,
    target: FrozenTarget,
    documents: Sequence[Document],
    *,
    taps: Sequence[int] | None = None,
    mask: int | None = None,
    logits: Callable[[Tensor], Tensor] | None = None,
) -> Walk:
    """``taps`` and ``mask`` replace the drafter's own; ``logits`` its way from states ``[T, H]`` to logits ``[T, V]``."""
    config, forward = drafter.config, BlockForward(drafter, "grouped")
    mask = config.mask_token_id if mask is None else mask

    def head(states: Tensor) -> Tensor:
        return with_bias(states, target.head) @ target.head.t()

    result = Walk()
    with Taps(target.model, config.target_layer_ids if taps is None else taps) as tapped:
        for document in documents:
            start, end = document.response_start, len(document)
            anchors = list(range(start, min(end - 1, start + MOST_ANCHORS)))
            ids = pad([document])
            target.model.get_decoder()(input_ids=ids, use_cache=False)
            features = tapped.take()
            blocks = build_blocks(ids, [end], [anchors], config.block_size, mask)
            tokens = blocks.token_ids.flatten()
            before = torch.cat([blocks.token_ids[..., :1], blocks.token_ids[..., :1], blocks.labels[..., :-1]], dim=-1)
            states = forward(
                features,
                blocks.anchors,
                drafter.embed(tokens, target.embed),
                blocks.positions.flatten(),
                target.embed(before.flatten()) if drafter.head is not None else None,
            )
            rows = states.view(len(anchors), config.block_size, -1)[:, 1:].flatten(0, 1)
            found = (logits or (lambda states: drafter.logits(states, head)))(rows)
            valid, labels = blocks.valid[0], blocks.labels[0].flatten()
            of_label = found.float().log_softmax(-1)[torch.arange(len(labels)), labels].clamp(min=UNLIKELY)
            sums = (of_label.view(valid.shape) * valid).sum(-1) / valid.sum(-1)
            result.losses += (-sums).tolist()
            right = (found.argmax(-1).view(len(anchors), -1) == blocks.labels[0]) & blocks.valid[0]
            gained = (right.long().cumprod(-1).sum(-1) + 1).tolist()
            result.gained.append([min(gain, end - 1 - anchor) for gain, anchor in zip(gained, anchors, strict=True)])
    return result


def with_bias(states: Tensor, head: Tensor) -> Tensor:
    """A head with a bias has it as its last column."""
    return states if head.shape[1] == states.shape[1] else torch.nn.functional.pad(states, (0, 1), value=1.0)
