"""Drafts from the text itself: what followed an earlier occurrence of its last tokens (prompt lookup; arXiv 2304.04487).

Edited code, quoted documents and repetitive answers gain several tokens at once, without a model. Such a draft depends on the
text alone, so verifying it by comparing choices is lossless (``decode/verify.py``).
"""

from collections.abc import Sequence

MOST_FOUND = 31
"""Most tokens that are worth verifying at once."""
MOST_AGREED = 16
"""Most tokens before a place that are compared; more of them would not tell more."""
KEY = 3
"""Tokens before a place that must agree: fewer hardly predict what follows, more are seldom found."""
CERTAIN = 0.9999
"""The confidence of a token that a grammar forces."""
_SURE = [n / (n + 1) for n in range(MOST_AGREED + MOST_FOUND)]  # confidence of a token with n equal ones before it
_COMPARED = 8  # the last places are compared


class Lookup:
    """Places of one text by the :data:`KEY` tokens before them; it grows with the text."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, ...], int] = {}
        self._before = [0] * KEY  # for each place the last earlier one with the same key, 0 for none

    def find(self, token_ids: list[int], most: int) -> tuple[list[int], int]:
        """Up to ``most`` tokens that may follow ``token_ids``, and how many tokens before them agree; ``([], 0)`` if too few do.

        ``token_ids`` begin with those of the last call. Of the last places the one where most tokens agree is continued, the last
        of equal ones. If the text ends before ``most`` tokens are found, they are repeated.
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
    """The confidence of each of ``count`` copied tokens behind ``agreed`` equal ones: n / (n + 1) after n."""
    return _SURE[agreed : agreed + count]


def right_so_far(found: Sequence[int], token_ids: Sequence[int]) -> list[bool]:
    """Which tokens of ``found`` were right, up to the first wrong one, where ``token_ids`` really follow."""
    marks = [one == other for one, other in zip(found, token_ids, strict=False)]
    return marks[: marks.index(False) + 1] if False in marks else marks
