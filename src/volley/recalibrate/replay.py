"""Count of the cycles that a drafter would have needed for served answers: it drafts at every position of each.

It is the walk of :mod:`volley.doctor.acceptance`. Block verification, which the engine uses, accepts slightly more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from volley.doctor.acceptance import acceptance, kept_at_least, read
from volley.models.drafters.drafter import Drafter
from volley.models.targets.taps import Taps
from volley.recalibrate.reservoir import ServedRow
from volley.train.documents import Document
from volley.train.features import FrozenTarget
from volley.train.step import BlockForward

MOST_TOKENS = 256
"""Maximum tokens of an answer that are replayed."""


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
            ids = torch.tensor((row.prompt + row.response)[: start + MOST_TOKENS], dtype=torch.int32)
            tokens = len(ids) - 1 - start
            if tokens < 1:
                continue
            text = read(tapped, target, Document(ids, start))
            chances = (acceptance(each, target, text, row.temperature, most=MOST_TOKENS)[0] for each in forwards)
            found.append(Replayed(row, tokens, tuple(kept_at_least(own)[0] for own in chances)))
    return found
