"""A budget for reasoning: after so many tokens of reasoning the only allowed token is the one that closes it.

It is a token rule, so speculation changes nothing: the path of each row tells how far reasoning is.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from volley.decode.rules import TokenRule

_FORCE = 1e4
"""Subtracted from the logits of all other tokens. A grammar that forbids the forced token can still choose among them."""


class _Place(NamedTuple):
    """The state of an answer: whether reasoning is open or over, its tokens, and how many tokens of the next marker were read."""

    is_open: bool
    is_over: bool
    used: int
    matched: int


class ThinkingBudget(TokenRule):
    """The budget of one request. Markers of several tokens are written token by token."""

    title = "thinking_token_budget"

    def __init__(self, opens: Sequence[int], closes: Sequence[int], budget: int, *, is_open: bool) -> None:
        """``opens`` and ``closes`` are the tokens of the markers; with ``is_open`` the prompt has opened reasoning already."""
        self.opens, self.closes, self.budget = list(opens), list(closes), budget
        self._place = _Place(is_open, False, 0, 0)

    def take(self, token_id: int) -> None:
        self._place = self._after(self._place, token_id)

    def apply(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        forced = {}
        for row, path in enumerate(paths):
            place = self._place
            for token in path:
                place = self._after(place, token)
            if place.is_open and place.used >= self.budget:
                forced[row] = self.closes[place.matched]
        if not forced:
            return logits
        rows = torch.tensor(list(forced), device=logits.device)
        tokens = torch.tensor(list(forced.values()), device=logits.device)
        kept = logits[rows, tokens].nan_to_num(neginf=0.0)
        lowered = torch.zeros(len(logits), 1, device=logits.device).index_fill_(0, rows, _FORCE)
        logits = logits - lowered
        logits[rows, tokens] = kept
        return logits

    def _after(self, place: _Place, token: int) -> _Place:
        if place.is_over:
            return place
        marker = self.closes if place.is_open else self.opens
        matched = place.matched + 1 if token == marker[place.matched] else int(token == marker[0])
        if matched == len(marker):
            return _Place(not place.is_open, place.is_open, 0, 0)
        return place._replace(used=place.used + place.is_open, matched=matched)
