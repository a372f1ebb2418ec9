"""What a pass costs on this machine: measured when first asked, refined by every step."""

from collections.abc import Callable
from typing import Any

import numpy as np

FloatArray = np.ndarray[Any, np.dtype[np.float64]]

Measure = Callable[[int, int], float]
"""``measure(tokens, requests)``: seconds of one pass over so many tokens, spread over so many requests."""

_SIZES = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]


class PassCost:
    """Seconds of one model's pass: ``speed · table[tokens] + each · requests``.

    The table is linear between the sizes that were measured. ``speed`` and ``each`` are fitted to what steps really took, by
    least squares that forget, starting from what was measured: the machine has other work, texts grow longer.
    """

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._measured: list[float] = []
        self._table = np.zeros(1)
        self._speed, self._each = 1.0, 0.0
        self._prior: tuple[float, float] | None = None  # each as it was measured, and how far it may be off
        self._sums = np.zeros(5)

    def __call__(self, tokens: int, requests: int) -> float:
        """Seconds of a pass over ``tokens`` of ``requests`` requests."""
        return float(self.upto(tokens, 0, requests)[0])

    def upto(self, tokens: int, more: int, requests: int) -> FloatArray:
        """Seconds of passes over ``tokens``, ``tokens + 1``, … ``tokens + more``: ``[more + 1]``."""
        self._extend(tokens + more)
        if self._prior is None and requests > 1:
            self._each = max(0.0, self._measure(8, 8) - float(self._table[8])) / 8
            self._prior = self._each, 0.3 * self._each + 0.01 * self._measured[0]
        return self._speed * self._table[tokens : tokens + more + 1] + self._each * requests

    def _extend(self, tokens: int) -> None:
        """Measure and tabulate sizes up to ``tokens``."""
        if tokens < len(self._table):
            return
        while len(self._measured) < 4 or (
            _SIZES[len(self._measured) - 1] < tokens and len(self._measured) < len(_SIZES)
        ):
            self._measured.append(self._measure(_SIZES[len(self._measured)], 1))
        sizes = np.array(_SIZES[: len(self._measured)])
        # Interruptions only ever add time: a pass that seems slower than a larger one is as fast as that at least.
        seconds = np.minimum.accumulate(self._measured[::-1])[::-1]
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        every = np.arange(max(tokens, sizes[-1]) + 1)
        self._table = np.interp(every, sizes, seconds) + np.maximum(every - sizes[-1], 0) * slope

    def observe(self, tokens: int, requests: int, seconds: float) -> None:
        """A real pass took ``seconds``."""
        if tokens >= len(self._table):
            return
        # A step that took far longer was interrupted; it says little about the next.
        seconds = min(seconds, 2 * self(tokens, requests))
        # Ridge regression of relative errors of about 10 %; before anything is seen, speed is 1 ± 0.5.
        x, y = (10 * part / seconds for part in (float(self._table[tokens]), requests))
        new = np.array([x * x, x * y, y * y, 10 * x, 10 * y])
        self._sums = 0.98 * self._sums + new
        each, spread = self._prior or (0.0, 1e-9)
        prior = np.array([4.0, 0.0, spread**-2, 4.0, each * spread**-2])
        xx, xy, yy, x1, y1 = (self._sums + prior).tolist()
        determinant = xx * yy - xy * xy
        self._speed = max(0.1, (yy * x1 - xy * y1) / determinant)
        self._each = max(0.0, (xx * y1 - xy * x1) / determinant)


class Costs:
    """Both models' passes of one engine."""

    def __init__(self, measure_draft: Measure, measure_target: Measure) -> None:
        self.draft = PassCost(measure_draft)
        self.target = PassCost(measure_target)
