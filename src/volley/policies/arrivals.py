"""Bound the time of a cycle while prompts arrive, because a prompt waits for the end of the current pass."""

from collections import deque
from collections.abc import Callable
from math import inf

LATER = 0.13
"""Allowed delay of a first token, as a share of the measured time to first token: 15 % of that of plain decoding."""
SELDOM = 10.0
"""Seconds of decoding since the last prompt after which no further prompt is expected."""
_REMEMBERED = 64  # number of first tokens
_LATE = 0.95  # quantile of first-token times that is used; the slowest may be an outlier


class Arrivals:
    """Arrival times of prompts while others decoded. The clock counts only seconds of steps that decoded."""

    def __init__(self) -> None:
        self.newcomers: Callable[[], bool] | None = None
        """Returns True if prompts wait for the step to end; unverified drafts are then dropped. ``None``: not known."""
        self._decoded, self._last = 0.0, -inf
        self._waits = deque[float](maxlen=_REMEMBERED)

    def came(self, *, beside: bool = True) -> None:
        """Record the arrival of a prompt; ``beside``: while others decode."""
        if beside:
            self._last = self._decoded

    def read(self, seconds: float) -> None:
        """Record that a first token came ``seconds`` after its prompt."""
        self._waits.append(seconds)

    def decoded(self, seconds: float) -> None:
        """Record that a step in which something decoded took ``seconds``."""
        self._decoded += seconds

    @property
    def go_on(self) -> bool:
        """True if more prompts are expected."""
        return self._decoded - self._last < SELDOM

    def most_seconds(self, plain: float) -> float:
        """Return the longest allowed time of a cycle, if a cycle of plain decoding takes ``plain`` seconds.

        A prompt that arrives in a cycle waits for its end. So its first token is delayed by the time by which cycles are
        longer than plain ones. The bound limits that delay to 15 % of a late first token's time, and so also the 99th
        percentile.
        """
        if not self.go_on:
            return inf
        late = sorted(self._waits)[int(_LATE * len(self._waits))] if self._waits else 0.0
        return plain + LATER * late
