"""What drafts and copies have gained and lost against plain decoding, by the clock, and how much they may still lose.

A policy decides by estimates, of costs and of chances, and any of them may be wrong for long. The ledger holds whatever they say.
"""

from math import inf

_SHARE = 0.01  # of the time, which may be lost
_FIRST, _MOST = 12.0, 60.0  # of the longest plain steps: what may be lost before anything was gained, and of gains
_REMEMBERED = 32  # steps, about, by which the expected time of a plain one is corrected
_INTERRUPTED = 3.0  # a step that took so many times as long as expected was interrupted, and counts as this long


class Ledger:
    """A budget of seconds. Each step adds 1 % of a plain one's. A step that drafts or copies adds what it gains besides: the time
    in which plain decoding would have made its tokens, less its own.

    While the budget is used up everything is decoded plainly. So what is lost is 1 % of the time, :data:`_FIRST` of the longest
    plain steps so far, one last step, and what was gained before. The budget is wide, because what a draft brings is chance: a
    drafter that gains a tenth would soon use up a small one. It is of seconds and not of steps: the steps of many requests are
    longer, and what a few have gained shall not pay for as many of them.
    """

    def __init__(self) -> None:
        self._budget = self._longest = 0.0  # seconds; the longest is that of a plain step so far
        self._ratio = 1.0  # of a plain step's time to what was expected
        self._since = inf  # steps since the last plain one

    @property
    def is_spent(self) -> bool:
        """Whether nothing should be drafted or copied now."""
        return self._budget < 0

    def note_change(self, factor: float) -> None:
        """The costs now expect ``factor`` times as long of a plain step. What plain steps took has not changed."""
        self._ratio /= factor

    def note_plain(self, seconds: float, expected: float) -> None:
        """A plain step took ``seconds`` where ``expected`` were. It counts for the steps before it, which were none."""
        self._since += 1
        if expected > 0:
            own = min(seconds / expected, _INTERRUPTED * self._ratio)
            self._ratio += (own - self._ratio) * min(1.0, self._since / _REMEMBERED)
            if self._since == inf:  # what was thought of plain steps until now may have allowed too much
                guessed = max(self._longest - self._ratio * expected, 0.0)
                self._longest -= guessed
                self._budget = min(self._budget, max(self._budget - _FIRST * guessed, 0.0))
            self._since = 0.0
        self._add(self._ratio * expected, 0.0)

    def note(self, tokens: float, seconds: float, expected: float, plain: float) -> None:
        """A step that drafted or copied made ``tokens`` for each request in ``seconds``, where ``expected`` were.

        A plain step was expected to take ``plain`` seconds.
        """
        self._since += 1
        plain *= self._ratio
        gain = tokens * plain - min(seconds, _INTERRUPTED * self._ratio * expected)
        if self._since == inf:  # what a plain step takes was never seen
            gain = min(gain, 0.0)
        self._add(plain, gain)

    def _add(self, plain: float, gain: float) -> None:
        """``gain`` seconds by a step, which takes ``plain`` where nothing is drafted."""
        longer = max(plain - self._longest, 0.0)
        self._longest += longer
        self._budget = min(_MOST * self._longest, self._budget + _FIRST * longer + _SHARE * plain + gain)
