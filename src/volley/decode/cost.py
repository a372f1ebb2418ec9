"""What a pass costs on this machine: measured when first asked, refined by every step."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = np.ndarray[Any, np.dtype[np.float64]]

Measure = Callable[[int, int], float]
"""``measure(tokens, requests)``: seconds of one pass over so many tokens, spread over so many requests."""

MeasureRows = Callable[[], tuple[float, float]]
"""Seconds that a row adds to a pass without choosing a token: one of a prompt that is read on the side, and one of padding,
which makes a request as long as the longest.
"""

_QUICK = 0.1  # seconds of a pass that may be timed twice
_NOISE = 0.05  # of what a step takes, relative
_FIRST_LESSON, _LESSON = 0.05, 2.0  # seconds of steps learnt from at once, which costs less than one by one
_REMEMBERED = 0.99  # of what was seen, a step later
_ALONE = 32  # tokens that one request may verify
_BLOCK = 8  # tokens of many requests each
_SIZES = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]


def _free_rows() -> tuple[float, float]:
    return 0.0, 0.0


class PassCost:
    """Seconds of one model's pass: ``speed · table[tokens] + each · requests``.

    The table is linear between sizes that were measured. ``speed``, ``each`` and what rows take that choose no token are fitted
    to what steps really took, by least squares that forget, starting from what was measured: the machine has other work, texts
    grow longer.
    """

    def __init__(self, measure: Measure, measure_rows: MeasureRows = _free_rows) -> None:
        self._measure, self._measure_rows = measure, measure_rows
        self._measured: list[float] = []
        self._table = np.zeros(1)
        self._seconds = [0.0]  # the same for one look at a time, which arrays make dear
        self._speed, self._each = 1.0, 0.0
        self._padding = 1.0  # what a row of padding takes, in units of what was measured
        self._prior: tuple[float, float] | None = None  # each as it was measured, and how far it may be off
        self._squares, self._products = np.zeros((4, 4)), np.zeros(4)
        self._steps: list[tuple[float, ...]] = []  # yet to be learnt from
        self._waiting, self._lesson = 0.0, _FIRST_LESSON  # seconds of these, and how many will do

    def __call__(self, tokens: int, requests: int) -> float:
        """Seconds of a pass over ``tokens`` of ``requests`` requests."""
        self._know(tokens, requests)
        return self._speed * self._seconds[tokens] + self._each * requests

    def upto(self, tokens: int, more: int, requests: int) -> FloatArray:
        """Seconds of passes over ``tokens``, ``tokens + 1``, … ``tokens + more``: ``[more + 1]``."""
        self._know(tokens + more, requests)
        return self._speed * self._table[tokens : tokens + more + 1] + self._each * requests

    def padding(self, rows: FloatArray) -> FloatArray:
        """Seconds that so many rows of padding add to a pass; what one takes is measured when there are any."""
        return self._padding * self._row_costs[1] * rows if rows.any() else rows

    @cached_property
    def _row_costs(self) -> tuple[float, float]:
        return self._measure_rows()

    def _know(self, tokens: int, requests: int) -> None:
        if min(tokens, _ALONE) >= len(self._table):
            self._extend(min(tokens, _ALONE))
        if self._prior is None and (requests > 1 or tokens > _ALONE):
            self._time_requests()
        if tokens >= len(self._table):
            self._extend(tokens)

    def _extend(self, tokens: int) -> None:
        """Measure and tabulate sizes up to ``tokens``, at two times unless that takes long: interruptions only ever add."""
        known = len(self._measured)
        wanted = max(4, min(int(np.searchsorted(_SIZES, tokens)) + 1, len(_SIZES)))
        fresh, found = _SIZES[known:wanted], dict[int, float]()
        for sizes in (fresh, fresh[::-1]):
            for size in sizes:
                if size not in found or found[size] < _QUICK:
                    seconds = self._measure(size, 1 if size <= _ALONE else size // _BLOCK)
                    found[size] = min(seconds, found.get(size, seconds))
            if tokens > _ALONE:
                self._time_requests()
        self._measured += found.values()
        self._tabulate(max(tokens, _SIZES[len(self._measured) - 1]))

    def _time_requests(self) -> None:
        """What each of many requests takes by itself, which large passes are relieved of: the least that was ever seen."""
        each = max(0.0, self._measure(8, 8) - self._seconds[8]) / 8
        if self._prior is not None:
            each = min(each, self._prior[0])
        self._prior = each, 0.3 * each + 0.01 * self._measured[0]
        if not self._squares.any():  # nothing has been learnt yet
            self._each = each

    def _tabulate(self, largest: int) -> None:
        """Seconds of passes as of one request, never less for many tokens than for those that one request may have."""
        sizes, seconds = np.array(_SIZES[: len(self._measured)]), np.array(self._measured)
        if self._prior is not None:
            many = sizes > _ALONE
            relieved = seconds[many] - (sizes[many] // _BLOCK - 1) * self._prior[0]
            seconds[many] = np.maximum(relieved, seconds[~many][-1])
        self._table = _from_below(sizes, seconds, largest)
        self._seconds = self._table.tolist()

    def observe(self, tokens: int, requests: int, seconds: float, read: int = 0, padding: int = 0) -> None:
        """A real pass took ``seconds``; beside the tokens of ``requests`` it had rows of prompts and of padding."""
        if tokens >= len(self._seconds):
            return
        self._steps.append((self._seconds[tokens], requests, read, padding, seconds))
        self._waiting += seconds
        if self._waiting > self._lesson:
            self._lesson = min(2 * self._lesson, _LESSON)
            self._fit()

    def _fit(self) -> None:
        """Ridge regression: before anything is seen speed is 1 ± 0.5, and prompts and padding take what was measured, times
        speed, give or take as much again."""
        steps = np.array(self._steps)
        self._steps.clear()
        self._waiting = 0.0
        seconds, rows = steps[:, 4], steps[:, :4]
        rows[:, 2:] *= self._row_costs if rows[:, 2:].any() else 0.0
        rows[:, 0] += rows[:, 2] + rows[:, 3]
        # A step that took far longer was interrupted; it says little about the next.
        seconds = np.minimum(seconds, 2 * rows[:, :2] @ (self._speed, self._each))
        rows /= _NOISE * seconds[:, None]
        remembered = _REMEMBERED ** len(rows)
        self._squares = remembered * self._squares + rows.T @ rows
        self._products = remembered * self._products + rows.sum(axis=0) / _NOISE
        each, spread = self._prior or (0.0, 1e-9)
        usual, certainty = np.array((1.0, each, 0.0, 0.0)), np.array((0.5, spread, 1.0, 1.0)) ** -2
        speed, each, _, padding = np.linalg.solve(
            self._squares + np.diag(certainty), self._products + certainty * usual
        ).tolist()
        self._speed, self._each, self._padding = max(0.1, speed), max(0.0, each), max(0.0, speed + padding)


def _from_below(sizes: NDArray[np.int64], seconds: FloatArray, largest: int) -> FloatArray:
    """The greatest convex curve below the points that never falls, at 0, 1, … ``largest``.

    Passes get dearer the more there is to compute, ever more evenly; interruptions only ever add time, so a point above its
    neighbours' line was interrupted.
    """
    seconds = np.minimum.accumulate(seconds[::-1])[::-1]
    corners = [0]
    for point in range(1, len(sizes)):
        while len(corners) > 1 and _slope(sizes, seconds, *corners[-2:]) >= _slope(sizes, seconds, corners[-1], point):
            corners.pop()
        corners.append(point)
    last = _slope(sizes, seconds, *corners[-2:])
    every = np.arange(largest + 1)
    beyond = np.maximum(every - sizes[-1], 0) * last
    return np.asarray(np.interp(every, sizes[corners], seconds[corners]) + beyond)


def _slope(sizes: NDArray[np.int64], seconds: FloatArray, first: int, second: int) -> float:
    return float((seconds[second] - seconds[first]) / (sizes[second] - sizes[first]))


class Costs:
    """Both models' passes of one engine."""

    def __init__(self, measure_draft: Measure, measure_target: Measure, measure_rows: MeasureRows = _free_rows) -> None:
        self.draft = PassCost(measure_draft)
        self.target = PassCost(measure_target, measure_rows)
