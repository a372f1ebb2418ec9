"""Draft by prompt lookup: propose what followed an earlier occurrence of the last tokens (n-gram; arXiv 2304.04487).

Edited code, quoted documents and repetitive answers gain several tokens at once, without a model. Such a draft depends on the
text alone, so verifying it by comparing choices is lossless (``decode/verify.py``).
"""

from collections.abc import Sequence

MOST_LOOKUP_TOKENS = 31
"""Most tokens that are worth verifying at once."""
MOST_AGREED = 16
"""Most tokens before a match that are compared; more do not improve the prediction."""
KEY = 3
"""Length of the n-gram that must match: a shorter one hardly predicts what follows, a longer one is seldom found."""
CERTAIN = 0.9999
"""Confidence of a token that a grammar forces."""
_SURE = [n / (n + 1) for n in range(MOST_AGREED + MOST_LOOKUP_TOKENS)]  # confidence of a token after n matching ones
_COMPARED = 8  # number of recent matches that are compared


class Lookup:
    """Index of one text: its positions by the :data:`KEY` tokens before them. It grows with the text."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, ...], int] = {}
        self._before = [0] * KEY  # for each position, the previous one with the same key; 0 for none

    def find(self, token_ids: list[int], most: int) -> tuple[list[int], int]:
        """Return up to ``most`` tokens that may follow ``token_ids``, and how many tokens before them match; ``([], 0)`` if
        too few do.

        ``token_ids`` must begin with those of the last call. Among the recent matches the longest one is continued, the most
        recent of equal ones. If the text ends before ``most`` tokens are found, they are repeated.
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


def match_confidence(agreed: int, count: int) -> list[float]:
    """Return the confidence of each of ``count`` lookup tokens after ``agreed`` matching ones: n / (n + 1) after n."""
    return _SURE[agreed : agreed + count]


def right_so_far(proposed: Sequence[int], token_ids: Sequence[int]) -> list[bool]:
    """Return which of the tokens ``proposed`` were right, up to the first wrong one, given that ``token_ids`` follow."""
    marks = [one == other for one, other in zip(proposed, token_ids, strict=False)]
    return marks[: marks.index(False) + 1] if False in marks else marks
