"""Account for what one way to draft has gained and lost against plain decoding in wall-clock time, and limit further losses.

A policy decides by estimates of costs and probabilities, and any of them may be wrong for long. The ledger's limit holds in
any case.
"""

from math import inf

_SHARE = 0.01  # share of the time that may be lost
_FIRST, _MOST = 12.0, 60.0  # in longest plain steps: initial budget, and upper bound of the budget
_REMEMBERED = 32  # steps over which the time ratio of plain steps is averaged
_INTERRUPTED = 3.0  # a step that took this many times the expected time was interrupted, and is clipped to it


class Ledger:
    """A budget of seconds. Each step adds 1 % of a plain step's time. A step that drafts also adds its gain: the time in which
    plain decoding would have made its tokens, minus its own time.

    While the budget is negative nothing is drafted in this way. So its total loss is at most 1 % of the time, plus
    :data:`_FIRST` of the longest plain steps so far, one last step, and earlier gains. The budget is wide, because a draft's
    gain is random: a drafter that gains a tenth would soon exhaust a small budget. It counts seconds instead of steps, because
    steps of many requests are longer, and gains of a few requests must not pay for as many of them.
    """

    def __init__(self) -> None:
        self._budget = self._longest = 0.0  # seconds; the longest plain step so far
        self._ratio = 1.0  # actual to expected time of a plain step
        self._since = inf  # steps since the last plain one; inf: none so far, so its time is only an estimate

    @property
    def is_spent(self) -> bool:
        """True if nothing should be drafted in this way now."""
        return self._budget < 0

    def note_change(self, factor: float) -> None:
        """Record that the cost table now expects ``factor`` times as long of a plain step. Measured times have not changed."""
        self._ratio /= factor

    def note_plain(self, seconds: float, expected: float) -> None:
        """Record that a plain step took ``seconds`` instead of ``expected``. It also stands for the drafting steps before it."""
        self._since += 1
        if expected > 0:
            own = min(seconds / expected, _INTERRUPTED * self._ratio)
            self._ratio += (own - self._ratio) * min(1.0, self._since / _REMEMBERED)
            if self._since == inf:  # earlier estimates of plain steps may have allowed too much
                guessed = max(self._longest - self._ratio * expected, 0.0)
                self._longest -= guessed
                self._budget = min(self._budget, max(self._budget - _FIRST * guessed, 0.0))
            self._since = 0.0
        self._add(self._ratio * expected, 0.0)

    def note(self, tokens: float, seconds: float, expected: float, plain: float) -> None:
        """Record that a drafting step made ``tokens`` for each request in ``seconds`` instead of ``expected``.

        A plain step was expected to take ``plain`` seconds.
        """
        self._since += 1
        plain *= self._ratio
        gain = tokens * plain - min(seconds, _INTERRUPTED * self._ratio * expected)
        if self._since == inf:  # no plain step was measured yet
            gain = min(gain, 0.0)
        self._add(plain, gain)

    def _add(self, plain: float, gain: float) -> None:
        """Add ``gain`` seconds of a step; a plain step takes ``plain``."""
        longer = max(plain - self._longest, 0.0)
        self._longest += longer
        self._budget = min(_MOST * self._longest, self._budget + _FIRST * longer + _SHARE * plain + gain)
