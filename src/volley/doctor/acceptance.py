"""Acceptance of a drafter on known answers: it drafts at every position, and decoding cycles are simulated.

Greedy decoding accepts a draft token that equals the answer's. At a temperature, speculative sampling accepts one with
probability Σ min(p, q) of the target's and the drafter's distributions there. If the answers are the target's own at that
temperature, the result is the τ of decoding. Block verification, which the engine uses, accepts slightly more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from volley.models.drafters.drafter import Drafter
from volley.models.targets.taps import Taps
from volley.train.anchors import Blocks, build_blocks
from volley.train.documents import Document, pad
from volley.train.features import FrozenTarget
from volley.train.losses import with_bias
from volley.train.step import BlockForward

MOST_ANCHORS = 128
AT_ONCE = 64
"""Blocks computed at once."""
UNLIKELY = -20.0
"""Log-probability of tokens missing from a reduced vocabulary."""


@dataclass
class Walk:
    """Acceptance at every position of each document's answer."""

    chances: list[Tensor] = field(default_factory=list)
    """Tensor ``[n, B − 1]`` per document: probability that each draft token is accepted if all before it are; 0 behind the
    answer's end."""
    losses: list[float] = field(default_factory=list)
    """Mean cross-entropy of the drafter's block at each position. It reacts to errors earlier than τ."""

    def kept(self, block_size: int | None = None) -> list[float]:
        """Return the expected number of cycles that accept at least k draft tokens, k = 0 … B − 1, with blocks of at most
        ``block_size``."""
        most = None if block_size is None else block_size - 1
        each = [kept_at_least(chances[:, :most]) for chances in self.chances]
        return [sum(column) for column in zip(*each, strict=True)]

    @property
    def tokens(self) -> int:
        """Number of answer tokens without each answer's first."""
        return sum(map(len, self.chances))

    def tau_with(self, block_size: int | None) -> float:
        return self.tokens / self.kept(block_size)[0] if self.tokens else 0.0

    @property
    def tau(self) -> float:
        return self.tau_with(None)

    @property
    def acceptance(self) -> list[float]:
        """Return the share of cycles that accept at least k draft tokens, k = 1 … B − 1."""
        cycles, *more = self.kept()
        return [count / max(cycles, 1e-9) for count in more]

    @property
    def loss(self) -> float:
        """Mean of ``losses``."""
        return sum(self.losses) / max(1, len(self.losses))


def kept_at_least(chances: Tensor) -> list[float]:
    """Return the expected number of cycles for n tokens that accept at least k drafts, k = 0 … B − 1; for k = 0 it is all cycles.

    ``chances [n, B − 1]``: a cycle at token i accepts drafts one after the other with probabilities ``chances[i]``, and yields
    the accepted ones and a bonus token.
    """
    rows = chances.tolist()
    begins = [1.0, *[0.0] * len(rows)]
    """Probability that a cycle begins at each token."""
    found = [0.0] * (chances.shape[1] + 1)
    for index, row in enumerate(rows):
        reached = begins[index]
        for kept, chance in enumerate([*row, 0.0]):
            found[kept] += reached
            begins[min(index + kept + 1, len(rows))] += reached * (1 - chance)
            reached *= chance
    return found


@torch.no_grad()
def walk(
    drafter: Drafter,
    target: FrozenTarget,
    documents: Sequence[Document],
    *,
    temperature: float = 0.0,
    taps: Sequence[int] | None = None,
    mask: int | None = None,
    logits: Callable[[Tensor], Tensor] | None = None,
) -> Walk:
    """Return the acceptance at every position. ``taps`` and ``mask`` replace the drafter's own; ``logits`` replaces its map
    from states ``[T, H]`` to logits ``[T, V]``."""
    forward, result = BlockForward(drafter, "grouped"), Walk()
    with Taps(target.model, drafter.config.target_layer_ids if taps is None else taps) as tapped:
        for document in documents:
            text = read(tapped, target, document)
            chances, losses = acceptance(forward, target, text, temperature, mask=mask, logits=logits)
            result.chances.append(chances)
            result.losses += losses
    return result


class ReadText(NamedTuple):
    """Text ``ids [1, T]`` whose answer begins at ``start``, with the target's features ``[1, T, taps · H]`` and final states
    ``hidden [T, H]``."""

    ids: Tensor
    start: int
    features: Tensor
    hidden: Tensor


def read(tapped: Taps, target: FrozenTarget, document: Document) -> ReadText:
    """Run the target over a text, once for all drafters that tap the same layers."""
    ids = pad([document]).to(target.device)
    hidden = target.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
    return ReadText(ids, document.response_start, tapped.take(), hidden)


def acceptance(
    forward: BlockForward,
    target: FrozenTarget,
    text: ReadText,
    temperature: float,
    *,
    most: int = MOST_ANCHORS,
    mask: int | None = None,
    logits: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, list[float]]:
    """Return a :class:`Walk`'s chances ``[n, B − 1]`` at the first ``most`` positions of the answer, and its losses ``[n]``."""
    end = text.ids.shape[1]
    last, parts, losses = min(end - 1, text.start + most), list[Tensor](), list[float]()
    known = target_logits(target, text.hidden[text.start : end - 1]) if temperature else None
    for first in range(text.start, last, AT_ONCE):
        anchors = list(range(first, min(first + AT_ONCE, last)))
        states, blocks = draft_states(forward, target, text.ids, text.features, anchors, mask)
        found = draft_logits(forward.drafter, target, states) if logits is None else logits(states)
        labels, valid = blocks.labels[0], blocks.valid[0]
        of_label = found.float().log_softmax(-1).gather(1, labels.flatten()[:, None]).clamp(min=UNLIKELY)
        losses += (-(of_label.view(valid.shape) * valid).sum(-1) / valid.sum(-1)).tolist()
        slots = found.view(*labels.shape, -1)
        if known is None:
            kept = (slots.argmax(-1) == labels).float()
        else:
            kept = _overlap(slots, known[first - text.start :][: len(anchors) + labels.shape[1]], temperature)
        parts.append((kept * valid).cpu())
    return torch.cat(parts), losses


def draft_states(
    forward: BlockForward,
    target: FrozenTarget,
    ids: Tensor,
    features: Tensor,
    anchors: list[int],
    mask: int | None = None,
) -> tuple[Tensor, Blocks]:
    """Return the drafter's states ``[n · (B − 1), H]`` for blocks at ``anchors [n]`` of a text ``ids [1, T]``, and the blocks.

    ``features [1, T, taps · H]`` are the target's; ``mask`` replaces the drafter's mask token.
    """
    drafter, size = forward.drafter, forward.drafter.config.block_size
    mask = drafter.config.mask_token_id if mask is None else mask
    blocks = build_blocks(ids, [ids.shape[1]], [anchors], size, mask)
    before = torch.cat([blocks.token_ids[..., :1], blocks.token_ids[..., :1], blocks.labels[..., :-1]], dim=-1)
    states = forward(
        features,
        blocks.anchors,
        drafter.embed(blocks.token_ids.flatten(), target.embed),
        blocks.positions.flatten(),
        target.embed(before.flatten()) if drafter.head is not None else None,
    )
    return states.view(len(anchors), size, -1)[:, 1:].flatten(0, 1), blocks


def draft_logits(drafter: Drafter, target: FrozenTarget, states: Tensor) -> Tensor:
    """Return the drafter's logits ``[T, V]`` of its states ``[T, H]``."""
    return drafter.logits(states, lambda own: with_bias(own, target.head) @ target.head.t())


def target_logits(target: FrozenTarget, hidden: Tensor) -> Tensor:
    """Return fp32 logits ``[n, V]`` of final states ``[n, H]``."""
    logits = (with_bias(hidden, target.head) @ target.head.t()).float()
    return logits if target.softcap is None else target.softcap * torch.tanh(logits / target.softcap)


def _overlap(drafted: Tensor, known: Tensor, temperature: float) -> Tensor:
    """Return Σ min(p, q) ``[n, B − 1]``: draft position k of block i, ``drafted[i, k]``, is compared with ``known[i + k]``."""
    p, slots = (known / temperature).softmax(-1), []
    for slot in range(drafted.shape[1]):
        q = (drafted[: max(0, len(p) - slot), slot].float() / temperature).softmax(-1)
        shares = torch.minimum(q, p[slot : slot + len(q)]).sum(-1)
        slots.append(torch.nn.functional.pad(shares, (0, len(drafted) - len(shares))))
    return torch.stack(slots, dim=1)
