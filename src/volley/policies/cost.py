"""What a pass costs on this machine: measured when it is first needed, corrected by the steps that follow."""

from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np

from volley.policies.arrivals import Arrivals

FloatArray = np.ndarray[Any, np.dtype[np.float64]]

Measure = Callable[[int, int], float]
"""``measure(tokens, requests)``: seconds of one pass over so many tokens, spread over so many requests."""

Pass = tuple[int, int]
"""Tokens and requests."""

_SIZES = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]  # tokens of the passes that are timed
_SHARE = 8  # tokens of each request in such a pass; one request with all of them would see far more keys
MOST_TIMED = max(-(-size // max(1, size // _SHARE)) for size in _SIZES)
"""Tokens of one request, at most, in a pass that is timed."""
_FAR = 1e6  # tokens; up to here the table goes on as between the last two sizes
_STEPS = 128  # that the correction is fitted to: the last four reviews' cycles
_NOISE = 0.15  # of a step's time, relative: other work, padding, sampling, the length of texts
_INTERRUPTED = 3.0  # times what was expected; a step that took longer was interrupted, and counts as this


class PassCost:
    """Seconds of one model's pass: ``speed · table[tokens] + each · (requests - 1) + reading · prompt tokens``.

    The table is measured, with a request for every 8 tokens. ``speed``, ``each`` and ``reading`` are fitted to the last steps,
    since the machine has other work, texts grow longer, and prompts are read on the side.
    """

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._timed: dict[int, float] = {}
        self._table = np.zeros((2, 1))  # tokens and seconds
        self._weights, self._prior, self._doubt = np.zeros((3, 3))  # of speed, each, reading
        self._steps: deque[tuple[int, int, int, float]] = deque(maxlen=_STEPS)
        self._is_fitted = True

    def __call__(self, tokens: int, requests: int) -> float:
        """Seconds of a pass over ``tokens`` of ``requests`` requests; larger than any that was timed, it is timed first."""
        self.time(tokens)
        return float(self.expected(np.array(tokens), requests))

    def expected(self, tokens: FloatArray, requests: FloatArray | int) -> FloatArray:
        """The same for many passes, without timing any. Those beyond the sizes timed take at least so long."""
        if not self._is_fitted:
            self._fit()
        speed, each, _ = self._weights
        return np.asarray(speed * np.interp(tokens, *self._table) + each * (requests - 1))

    def observe(self, tokens: int, requests: int, seconds: float, read: int = 0) -> None:
        """A step took ``seconds``; besides ``tokens`` of ``requests`` it read so many tokens of prompts."""
        if tokens in range(1 + max(self._timed, default=0)):
            self._steps.append((tokens, requests, read, seconds))
            self._is_fitted = False

    def time(self, tokens: float) -> bool:
        """Extend the table to ``tokens``, and whether that was needed; at two moments, since interruptions only add time."""
        fresh = [s for s in _SIZES[: max(4, int(np.searchsorted(_SIZES, tokens)) + 1)] if s not in self._timed]
        for size in fresh + fresh[::-1]:
            self._timed[size] = min(self._timed.get(size, inf), self._measure(size, max(1, size // _SHARE)))
        if fresh:
            sizes, seconds = _from_below(self._timed)
            slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
            self._table = np.array([[*sizes, _FAR], [*seconds, seconds[-1] + slope * (_FAR - sizes[-1])]])
            # By itself a request takes some 2 % of a plain pass. A token that is read chooses none, which is half of its work.
            self._prior = self._weights = np.array((1.0, 0.02 * seconds[0], slope / 2))
            self._doubt = np.array((0.5, 0.02 * seconds[0] + 1e-9, slope / 2 + 1e-9))
            self._is_fitted = not self._steps
        return bool(fresh)

    def _fit(self) -> None:
        """Ridge regression of the steps' relative errors, towards the weights that were assumed at first."""
        tokens, requests, read, seconds = np.array(self._steps).T
        parts = np.array((np.interp(tokens, *self._table), requests - 1, read))
        expected = np.maximum(self._weights @ parts, 1e-9)  # a proposer may say that it takes no time
        parts /= _NOISE * np.minimum(seconds, _INTERRUPTED * expected)
        certainty = self._doubt**-2
        products = parts.sum(axis=1) / _NOISE + certainty * self._prior
        weights = np.linalg.solve(parts @ parts.T + np.diag(certainty), products)
        self._weights, self._is_fitted = np.maximum(weights, (0.1, 0.0, 0.0)), True


def _from_below(timed: dict[int, float]) -> tuple[FloatArray, FloatArray]:
    """Sizes, and the greatest convex curve below their times that never falls.

    Passes get dearer ever more evenly, so one above the line between two others was interrupted.
    """
    sizes, seconds = np.array(sorted(timed), dtype=float), np.array([timed[size] for size in sorted(timed)])
    seconds = np.minimum.accumulate(seconds[::-1])[::-1]
    for first in range(len(sizes)):
        for last in range(first + 2, len(sizes)):
            ends, inside = [first, last], slice(first + 1, last)
            seconds[inside] = np.minimum(seconds[inside], np.interp(sizes[inside], sizes[ends], seconds[ends]))
    return sizes, seconds


class Costs:
    """Both models' passes of one engine, and how long its prompts let a cycle be."""

    drafts_late = False
    """Whether the host has to wait for the device where it reads a draft before that is verified."""

    def __init__(self, measure_draft: Measure, measure_target: Measure, arrivals: Arrivals | None = None) -> None:
        self.draft, self.target = PassCost(measure_draft), PassCost(measure_target)
        self.arrivals = arrivals or Arrivals()

    def waiting(self, drafting: FloatArray, passing: FloatArray) -> FloatArray:
        """How long a prompt waits at most that comes in a cycle which drafts and passes for so many seconds.

        One that comes during the draft waits for its end only, where drafts are dropped for it.
        """
        if self.arrivals.newcomers is None or self.drafts_late:
            return drafting + passing
        longer: FloatArray = np.maximum(drafting, passing)
        return longer

    def shares(self, drafted: Pass, verified: Pass, seconds: float) -> tuple[float, float]:
        """What of a cycle's ``seconds`` each model had, by what was expected of them: the host did not wait in between."""
        drafting = float(self.draft.expected(np.array(drafted[0]), drafted[1]))
        passing = float(self.target.expected(np.array(verified[0]), verified[1]))
        share = drafting / max(drafting + passing, 1e-9)
        return seconds * share, seconds * (1 - share)
