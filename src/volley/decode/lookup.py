"""Drafts from the text itself: what followed when it last read as it does now (prompt lookup; arXiv 2304.04487).

Code that is edited, documents that are quoted and answers that repeat themselves come by several tokens at once, and it takes
no model. Such a draft knows the text and nothing else: verified by comparing choices it is lossless (``decode/verify.py``).
"""

from collections.abc import Sequence

MOST_FOUND = 31
"""Tokens that are worth verifying at once, at most."""
MOST_AGREED = 16
"""Tokens before them that agree; more say no more."""
KEY = 3
"""Tokens that must agree before a place counts: fewer hardly tell what follows, more are seldom found."""
CERTAIN = 0.9999
"""How sure a token is that a grammar forces."""
_SURE = [n / (n + 1) for n in range(MOST_AGREED + MOST_FOUND)]  # of a token of which n before it agree
_COMPARED = 8  # places that are looked at, the last ones


class Lookup:
    """One text's places, by the tokens before them; it grows with the text."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, ...], int] = {}
        self._before = [0] * KEY  # the place before each that has the same tokens before it, 0 for none

    def find(self, token_ids: list[int], most: int) -> tuple[list[int], int]:
        """Up to ``most`` tokens that may follow ``token_ids``, and how many before them agree; ``([], 0)`` if too few do.

        ``token_ids`` begin with those of the last call. Of the last places the one that agrees furthest is continued, of equal
        ones the last; what repeats itself beyond the end of the text.
        """
        end = len(token_ids)
        for place in range(len(self._before), end):
            key = tuple(token_ids[place - KEY : place])
            self._before.append(self._last.get(key, 0))
            self._last[key] = place
        place = self._last.get(tuple(token_ids[-KEY:]), 0)
        best = agreed = compared = 0
        while place and compared < _COMPARED and agreed < MOST_AGREED:
            count = KEY
            while count < min(MOST_AGREED, place) and token_ids[place - 1 - count] == token_ids[end - 1 - count]:
                count += 1
            if count > agreed:
                best, agreed = place, count
            place, compared = self._before[place], compared + 1
        if not agreed or most < 1:
            return [], 0
        following = token_ids[best : best + most]
        return (following * (most // len(following) + 1))[:most], agreed


def found_confidence(agreed: int, count: int) -> list[float]:
    """How sure a copy is of each of ``count`` tokens that follow ``agreed`` equal ones: n / (n + 1) after n."""
    return _SURE[agreed : agreed + count]


def right_so_far(found: Sequence[int], token_ids: Sequence[int]) -> list[bool]:
    """Of tokens ``found``, up to the first that is wrong, which were right, where ``token_ids`` really follow."""
    marks = [one == other for one, other in zip(found, token_ids, strict=False)]
    return marks[: marks.index(False) + 1] if False in marks else marks
