"""Estimate the seconds of passes on this machine: measured when first needed, corrected by later steps."""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np

from volley.policies.arrivals import Arrivals
from volley.policies.ledger import Ledger

FloatArray = np.ndarray[Any, np.dtype[np.float64]]

Measure = Callable[[int, int], float]
"""Call ``measure(tokens, requests)`` for the seconds of one pass over ``tokens``, spread over ``requests``."""

PassSize = tuple[int, int]
"""Tokens and requests of a pass."""

_SIZES = [1, 8, 32, 128, 512]  # tokens of the passes that are timed; few, because answers wait during that
_FIRST = 2  # tokens up to which passes are timed at once
_BEYOND = 2  # the table is extrapolated to this many times its largest size before a larger one is timed
_SHARE = 8  # tokens per request in such a pass; one request with all of them would read far more keys
MOST_TIMED = _SHARE
"""Most tokens of one request in a pass that is timed."""
_BENT = 1.15  # a pass that took this many times the linear interpolation of two others was interrupted
_FAR = 1e6  # tokens up to which the table is extrapolated
_STEPS = 64  # number of last plain steps, and of last others, to which the weights are fitted
_REFIT = 8  # steps from one fit to the next; a fit takes half a millisecond
_NOISE = 0.15  # relative noise of a step's time: other work, padding, sampling, text lengths
_SHORT = 0.25  # seconds; passes that probably take longer are not timed in advance
_AHEAD = 1.0  # seconds of timing in advance after which no further pass is timed
_INTERRUPTED = 3.0  # a step that took this many times the expected time was interrupted, and is clipped to it
_LEAST = np.array((0.1, 0.0, 0.0, 0.0))  # lower bounds of speed, fixed, each, reading


class PassCost:
    """Seconds of one model's part of a cycle: ``speed · table[tokens] + fixed + each · (requests - 1) + reading · read``.

    The table is measured with one request for every 8 tokens, in consecutive passes. ``fixed`` and ``each`` are the extra time
    of a cycle, for the first request and for each other one: host work, and weights that left the caches. All four weights are
    fitted to the last steps, because the machine may have other load, texts grow longer, and prompts are read in the same
    passes.
    """

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._timed: dict[int, float] = {}
        self._table = np.zeros((2, 1))  # tokens and seconds
        self._points = [[0.0, _FAR], [0.0, 0.0]]  # the table as lists
        self._weights, self._prior, self._doubt = np.zeros((3, 4))  # each for speed, fixed, each, reading
        # Steps of one token a request, and others: rare drafts would be forgotten among plain steps.
        self._steps: list[deque[tuple[int, int, int, float]]] = [deque(maxlen=_STEPS), deque(maxlen=_STEPS)]
        self._unfitted = 0  # steps since the last fit

    def __call__(self, tokens: int, requests: int) -> float:
        """Return the seconds of a pass over ``tokens`` of ``requests`` requests. A pass larger than all timed ones is timed
        first."""
        self.time(tokens)
        return float(self.expected(np.array(tokens), requests))

    @property
    def num_timed(self) -> int:
        """Number of sizes that were timed so far."""
        return len(self._timed)

    def expected(self, tokens: FloatArray, requests: FloatArray | int) -> FloatArray:
        """Return the seconds of many passes without timing any. Beyond the timed sizes the result is a cautious guess."""
        if self._unfitted >= min(_REFIT, max(1, sum(map(len, self._steps)) - _REFIT)):
            self._fit()
        speed, fixed, each, _ = self._weights
        return np.asarray(speed * np.interp(tokens, *self._table) + fixed + each * (requests - 1))

    def rough(self, tokens: int, requests: int) -> float:
        """Return the seconds of one pass from the last fitted weights, which is a hundred times as fast as fitting them again."""
        sizes, seconds = self._points
        after = min(max(bisect_left(sizes, tokens), 1), len(sizes) - 1)
        slope = (seconds[after] - seconds[after - 1]) / (sizes[after] - sizes[after - 1])
        speed, fixed, each, _ = self._weights.tolist()
        passing = seconds[after - 1] + slope * (tokens - sizes[after - 1])
        return float(speed * passing + fixed + each * (requests - 1))

    def observe(self, tokens: int, requests: int, seconds: float, read: int = 0) -> None:
        """Learn from a step of ``seconds``, which decoded ``tokens`` of ``requests`` and read ``read`` tokens of prompts."""
        if tokens in range(1 + _BEYOND * max(self._timed, default=0)):
            self._steps[tokens > requests].append((tokens, requests, read, seconds))
            self._unfitted += 1

    def time(self, tokens: float) -> bool:
        """Extend the table to ``tokens``; return True if that was needed."""
        reach = bisect_left(_SIZES, max(tokens / _BEYOND, _FIRST)) + 1
        fresh = [size for size in _SIZES[:reach] if size not in self._timed]
        for size in fresh + fresh[::-1]:  # the faster of two runs counts
            if not self._is_likely(size):
                self._timed[size] = min(self._timed.get(size, inf), self._measure(size, max(1, size // _SHARE)))
        if fresh:
            sizes, seconds = _uninterrupted(self._timed)
            slope = ((seconds[-1] - seconds[:-1]) / (sizes[-1] - sizes[:-1])).min()
            self._table = np.array([[*sizes, _FAR], [*seconds, seconds[-1] + slope * (_FAR - sizes[-1])]])
            self._points = self._table.tolist()
            # Prior: a request adds 2 % of a plain pass, and a prompt token half of what a decoded token adds. Extra time is
            # attributed to single steps rather than to all passes, because large passes would look too expensive otherwise.
            self._prior = self._weights = np.array((1.0, 0.0, 0.02 * seconds[0], slope / 2))
            self._doubt = np.array((0.25, seconds[0], 0.05 * seconds[0], slope / 2)) + 1e-9
            self._unfitted = _REFIT if any(self._steps) else 0
        return bool(fresh)

    def _is_likely(self, size: int) -> bool:
        """Return True if ``size`` was timed, at no more than two smaller sizes suggest: it need not be timed again."""
        smaller = [other for other in _SIZES if other < size]
        if size not in self._timed or len(smaller) < 2:
            return False
        first, last = smaller[-2:]
        slope = (self._timed[last] - self._timed[first]) / (last - first)
        return self._timed[size] <= _BENT * (self._timed[last] + slope * (size - last))

    def rehearse(self, most: int) -> None:
        """Time passes of up to ``most`` tokens in advance, so that no step waits for it. Passes that probably take long are
        skipped."""
        end = time.perf_counter() + _AHEAD
        for size in _SIZES:
            longest = max(self._timed.values(), default=0.0)
            if size > most or 4 * longest > _SHORT or time.perf_counter() > end:  # the next size is four times as large
                return
            self.time(size)

    def measured_by(self, measure: Measure) -> None:
        """Time with ``measure`` from now on. The passes are equal, so learnt values stay."""
        self._measure = measure

    def _fit(self) -> None:
        """Fit the weights by ridge regression of the steps' relative errors, towards the prior weights."""
        tokens, requests, read, seconds = np.array([*self._steps[False], *self._steps[True]]).T
        parts = np.array((np.interp(tokens, *self._table), np.ones(len(tokens)), requests - 1, read))
        expected = np.maximum(self._weights @ parts, 1e-9)  # a proposer may report no time at all
        parts /= _NOISE * np.minimum(seconds, _INTERRUPTED * expected)
        certainty = self._doubt**-2
        squares = parts @ parts.T + np.diag(certainty)
        products = parts.sum(axis=1) / _NOISE + certainty * self._prior
        weights, free = _LEAST.copy(), np.ones(len(_LEAST), dtype=bool)
        while free.any():  # a weight below its bound is fixed there, and the others are fitted again
            found = np.linalg.solve(squares[free][:, free], (products - squares[:, ~free] @ weights[~free])[free])
            if (found >= _LEAST[free]).all():
                weights[free] = found
                break
            free[free] = found >= _LEAST[free]
        self._weights, self._unfitted = weights, 0


def _uninterrupted(timed: dict[int, float]) -> tuple[FloatArray, FloatArray]:
    """Return sizes and times without interruptions: no time exceeds that of a larger size, or is far above a line between two
    others.

    Times are nearly linear in tokens. They are not convex, because kernels lay out small passes differently from large ones.
    """
    sizes, seconds = np.array(sorted(timed), dtype=float), np.array([timed[size] for size in sorted(timed)])
    seconds = np.minimum.accumulate(seconds[::-1])[::-1]
    for first in range(len(sizes)):
        for last in range(first + 2, len(sizes)):
            ends, inside = [first, last], slice(first + 1, last)
            line = np.interp(sizes[inside], sizes[ends], seconds[ends])
            seconds[inside] = np.minimum(seconds[inside], _BENT * line)
    return sizes, np.maximum.accumulate(seconds)


class Costs:
    """Costs of one engine: passes of drafter and target, and the time limit that arriving prompts set on a cycle."""

    drafts_on_device = False
    """True if drafts stay on the device until they are verified. Reading one earlier makes the host wait."""

    def __init__(
        self,
        measure_draft: Measure,
        measure_target: Measure,
        arrivals: Arrivals | None = None,
    ) -> None:
        self.draft, self.target = PassCost(measure_draft), PassCost(measure_target)
        self.arrivals = arrivals or Arrivals()
        self.ledger, self.lookup_ledger = self._ledgers = Ledger(), Ledger()  # of the drafter, and of prompt lookup
        self._plain = 0, 0.0  # requests of the last plain step, and its last expected seconds

    def rehearse(self, most: int) -> None:
        """Time passes of up to ``most`` tokens, as :meth:`PassCost.rehearse` does."""
        for cost in (self.draft, self.target):
            cost.rehearse(most)

    def waiting(self, drafting: FloatArray, passing: FloatArray) -> FloatArray:
        """Return the longest wait of a prompt that arrives in a cycle of ``drafting`` and then ``passing`` seconds.

        If drafts are dropped for prompts, a prompt that arrives during drafting waits only for the end of drafting.
        """
        if self.arrivals.newcomers is None or self.drafts_on_device:
            return drafting + passing
        longer: FloatArray = np.maximum(drafting, passing)
        return longer

    def shares(self, drafted: PassSize, verified: PassSize, seconds: float) -> tuple[float, float]:
        """Split the ``seconds`` of a cycle between both models as expected, because the host did not wait between their
        passes."""
        drafting = float(self.draft.expected(np.array(drafted[0]), drafted[1]))
        passing = float(self.target.expected(np.array(verified[0]), verified[1]))
        share = drafting / max(drafting + passing, 1e-9)
        return seconds * share, seconds * (1 - share)

    def learn(
        self, drafted: PassSize, verified: PassSize, seconds: tuple[float, float], *, made: int, read: int = 0
    ) -> None:
        """Learn from a cycle that took ``seconds`` for drafting and for the rest, and generated ``made`` tokens.

        The target's pass ``verified`` tokens, anchors included, and read ``read`` tokens of prompts.
        """
        drafting, passing = seconds
        self.target.observe(*verified, passing, read)
        if drafted[1]:
            self.draft.observe(*drafted, drafting)
        tokens, requests = verified
        if read:  # the time of reading prompts is known too roughly
            return
        plain = self.target.rough(requests, requests)
        last, before = self._plain
        now = self.target.rough(last, last) if before else 0.0
        if now:
            for ledger in self._ledgers:
                ledger.note_change(now / before)
            self._plain = last, now
        if not drafted[1] and tokens == requests:
            self._plain = requests, plain
            for ledger in self._ledgers:
                ledger.note_plain(passing, plain)
        else:
            expected = self.target.rough(*verified) + (self.draft.rough(*drafted) if drafted[1] else 0.0)
            ledger = self.ledger if drafted[1] else self.lookup_ledger
            ledger.note(made / requests, drafting + passing, expected, plain)
