"""Count of the cycles that a drafter would have needed for served answers: it drafts at every position of each.

At temperature 0 a draft token is accepted if it equals the served token. Above, the served token x of a position that a cycle
reached came from the draft with probability min(1, q(x) / p(x)), where p and q are the target's and the drafter's distributions.
That is token-by-token speculative sampling, given the answer. Block verification, which the engine uses, accepts slightly more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from volley.doctor.acceptance import draft_logits, draft_states, kept_at_least, target_logits
from volley.models.drafters.drafter import Drafter
from volley.models.targets.taps import Taps
from volley.recalibrate.reservoir import ServedRow
from volley.train.features import FrozenTarget
from volley.train.step import BlockForward

MOST_TOKENS = 256
"""Maximum tokens of an answer that are replayed."""
ANCHORS = 64
"""Number of blocks computed at once."""


@dataclass(frozen=True)
class Replayed:
    """Replay of one answer: its tokens after the first, and the cycles that each drafter needs for them."""

    row: ServedRow
    tokens: int
    cycles: tuple[float, ...]


@torch.no_grad()
def replay(drafters: Sequence[Drafter], target: FrozenTarget, rows: Sequence[ServedRow]) -> list[Replayed]:
    """Replay ``rows`` with ``drafters``, which all tap the same layers. Rows with fewer than two response tokens are skipped."""
    forwards = [BlockForward(drafter, "grouped") for drafter in drafters]
    found = []
    with Taps(target.model, drafters[0].config.target_layer_ids) as tapped:
        for row in rows:
            start = len(row.prompt)
            end = start + min(len(row.response), MOST_TOKENS)
            if end - start < 2:
                continue
            ids = torch.tensor([(row.prompt + row.response)[:end]], device=target.device)
            hidden = target.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
            features = tapped.take()
            wanted = _confidences(hidden[start : end - 1], target, ids[0, start + 1 :], row.temperature)
            cycles = [
                kept_at_least(_chances(forward, target, ids, features, start, wanted, row.temperature))[0]
                for forward in forwards
            ]
            found.append(Replayed(row, end - 1 - start, tuple(cycles)))
    return found


def _confidences(hidden: Tensor, target: FrozenTarget, served: Tensor, temperature: float) -> Tensor | None:
    """Return the target's log-probabilities ``[n]`` of ``served [n]``, each after one of ``hidden [n, H]``; ``None`` if
    greedy."""
    if temperature == 0:
        return None
    return (target_logits(target, hidden) / temperature).log_softmax(-1).gather(1, served[:, None])[:, 0]


def _chances(
    forward: BlockForward,
    target: FrozenTarget,
    ids: Tensor,
    features: Tensor,
    start: int,
    wanted: Tensor | None,
    temperature: float,
) -> Tensor:
    """Return the probability ``[n, B − 1]`` that each draft token is accepted if all before it are, for an anchor at each
    position.

    ``wanted`` is the target's log-probability of each served token after the first.
    """
    drafter, end = forward.drafter, ids.shape[1]
    size, parts = drafter.config.block_size, []
    for first in range(start, end - 1, ANCHORS):
        anchors = list(range(first, min(first + ANCHORS, end - 1)))
        states, blocks = draft_states(forward, target, ids, features, anchors)
        logits = draft_logits(drafter, target, states)
        labels, valid = blocks.labels[0], blocks.valid[0]
        if wanted is None:
            kept = (logits.argmax(-1).view(labels.shape) == labels).float()
        else:
            after = torch.arange(first - start, first - start + len(anchors), device=ids.device)[:, None]
            after = (after + torch.arange(size - 1, device=ids.device)).clamp(max=len(wanted) - 1)
            drawn = (logits.float() / temperature).log_softmax(-1).gather(1, labels.flatten()[:, None])
            kept = (drawn.view(labels.shape) - wanted[after]).clamp(max=0).exp()
        parts.append((kept * valid).cpu())
    return torch.cat(parts)
