"""Limit reasoning: after a number of reasoning tokens, the only allowed token is the one that ends reasoning.

The budget is a token rule, so speculation does not change output: the path of each row tells how many tokens were used.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from volley.decode.rules import TokenRule

_FORCE = 1e4
"""Amount subtracted from the logits of all other tokens. A grammar that forbids the forced token can still choose among them."""


class _Place(NamedTuple):
    """State of an answer: whether reasoning is open or over, its number of tokens, and how much of the next marker was read.

    ``matched`` counts tokens of the marker as it is forced; ``text`` is the end of the text, which may spell it with other
    tokens.
    """

    is_open: bool
    is_over: bool
    used: int
    matched: int
    text: str = ""


class Spelt(NamedTuple):
    """Markers as text, which any tokens may spell."""

    opens: str
    closes: str
    spell: Callable[[int], str]
    """Function from a token to its text."""
    at_start: bool
    """True if reasoning opens only at the beginning of an answer."""


class ThinkingBudget(TokenRule):
    """Reasoning budget of one request. Markers of several tokens are forced token by token."""

    title = "thinking_token_budget"

    def __init__(
        self, opens: Sequence[int], closes: Sequence[int], budget: int, *, is_open: bool, spelt: Spelt | None = None
    ) -> None:
        """Limit reasoning to ``budget`` tokens. ``opens`` and ``closes`` are the tokens of the markers; with ``is_open`` the
        prompt has opened reasoning already.

        With ``spelt`` a marker is also found in the text, whatever its tokens are.
        """
        self.opens, self.closes, self.budget, self.spelt = list(opens), list(closes), budget, spelt
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
        is_whole, text = matched == len(marker), ""
        if self.spelt is not None:
            mark = self.spelt.closes if place.is_open else self.spelt.opens
            text = place.text + self.spelt.spell(token)
            if self.spelt.at_start and not place.is_open:
                text = text.lstrip()
                is_whole = text.startswith(mark)
                if not is_whole and not mark.startswith(text):
                    return place._replace(is_over=True)  # the answer has begun without reasoning
            else:
                is_whole = is_whole or mark in text
                text = text[max(0, len(text) - len(mark) + 1) :]
        if is_whole:
            return _Place(not place.is_open, place.is_open, 0, 0)
        return place._replace(used=place.used + place.is_open, matched=matched, text=text)
