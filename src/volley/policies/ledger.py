"""What drafts and copies have gained and lost against plain decoding, by the clock, and how much they may still lose.

A policy decides by estimates, of costs and of chances, and any of them may be wrong for long. The ledger holds whatever they say.
"""

_SHARE = 0.01  # of the time, which may be lost
_MOST = (
    12.0  # plain steps that may be lost at once, and a first look at a drafter takes several; gains add up to no more
)
_REMEMBERED = 32  # plain steps, about, by which the expected time of one is corrected
_INTERRUPTED = 3.0  # a step that took so many times as long as expected was interrupted, and counts as this long


class Ledger:
    """A budget, in plain steps. Each step adds 1 % of one to it. A step that drafts or copies adds what it gains besides: its
    tokens for each request, which plain decoding would have made in as many steps, less its own time.

    While the budget is used up everything is decoded plainly. So all that is ever lost is 1 % of the time, and what :data:`_MOST`
    and one last step may lose.
    """

    def __init__(self) -> None:
        self._budget = _MOST
        self._ratio = 1.0  # of a plain step's time to what was expected

    @property
    def is_spent(self) -> bool:
        """Whether nothing should be drafted or copied now."""
        return self._budget < 0

    def note_plain(self, seconds: float, expected: float) -> None:
        """A plain step took ``seconds`` where ``expected`` were."""
        if expected > 0:
            self._ratio += (min(seconds / expected, _INTERRUPTED * self._ratio) - self._ratio) / _REMEMBERED
        self._budget = min(_MOST, self._budget + _SHARE)

    def note(self, tokens: float, seconds: float, expected: float, plain: float) -> None:
        """A step that drafted or copied made ``tokens`` for each request in ``seconds``, where ``expected`` were.

        A plain step was expected to take ``plain`` seconds.
        """
        own = min(seconds, _INTERRUPTED * self._ratio * expected) / max(self._ratio * plain, 1e-9)
        self._budget = min(_MOST, self._budget + _SHARE + tokens - own)
