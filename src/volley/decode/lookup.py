"""Drafts from the text itself: what followed when it last read as it does now (prompt lookup; arXiv 2304.04487).

Code that is edited, documents that are quoted and answers that repeat themselves come by several tokens at once, and it takes
no model. Such a draft knows the text and nothing else: verified by comparing choices it is lossless (``decode/verify.py``).
"""

MOST_FOUND = 31
"""Tokens that are worth verifying at once, at most."""
MOST_AGREED = 16
"""Tokens before them that agree; more say no more."""
_KEY = 3  # tokens that must agree


class Lookup:
    """One text's places, by the tokens before them; it grows with the text."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}
        self._known = _KEY  # places below are entered

    def find(self, token_ids: list[int], most: int) -> tuple[list[int], int]:
        """Up to ``most`` tokens that may follow ``token_ids``, and how many before them agree; ``([], 0)`` if too few do.

        ``token_ids`` begin with those of the last call. What repeats itself is continued beyond its end.
        """
        end = len(token_ids)
        for place in range(self._known, end):
            self._places[tuple(token_ids[place - _KEY : place])] = place
        self._known = max(self._known, end)
        place = self._places.get(tuple(token_ids[-_KEY:]), end)
        if place == end or most < 1:
            return [], 0
        agreed = _KEY
        while agreed < min(MOST_AGREED, place) and token_ids[place - 1 - agreed] == token_ids[end - 1 - agreed]:
            agreed += 1
        following = token_ids[place : place + most]
        return (following * (most // len(following) + 1))[:most], agreed
