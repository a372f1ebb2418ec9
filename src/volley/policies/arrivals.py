"""Bounds the time of a cycle while prompts arrive: a prompt waits for the end of the pass during which it arrives."""

from collections import deque
from collections.abc import Callable
from math import inf

LATER = 0.13
"""Share of the measured time to a first token by which it may be later than with plain decoding: 15 % of its time there."""
SELDOM = 10.0
"""Seconds of decoding since the last prompt after which no further prompt is expected."""
_REMEMBERED = 64  # first tokens
_LATE = 0.95  # the quantile of them that is looked at: the latest may be one of a kind


class Arrivals:
    """Prompts of one engine that arrived while others decoded. Time is counted in seconds of steps that decoded."""

    def __init__(self) -> None:
        self.newcomers: Callable[[], bool] | None = None
        """Tells whether prompts are waiting for the step to end; unverified drafts are dropped for them. ``None``: not known."""
        self._decoded, self._last = 0.0, -inf
        self._waits = deque[float](maxlen=_REMEMBERED)

    def came(self, *, beside: bool = True) -> None:
        """A prompt arrived; ``beside``: while others decode."""
        if beside:
            self._last = self._decoded

    def read(self, seconds: float) -> None:
        """A first token came ``seconds`` after its prompt."""
        self._waits.append(seconds)

    def decoded(self, seconds: float) -> None:
        """A step in which something decoded took ``seconds``."""
        self._decoded += seconds

    @property
    def go_on(self) -> bool:
        """Whether more prompts are expected."""
        return self._decoded - self._last < SELDOM

    def most_seconds(self, plain: float) -> float:
        """The longest that a cycle may take, where one of plain decoding takes ``plain`` seconds.

        A prompt that arrives in a cycle waits for its end. So a first token is later by the time by which cycles are longer than
        plain ones: by at most 15 % of a late one's time, and so is the 99th percentile of all.
        """
        if not self.go_on:
            return inf
        late = sorted(self._waits)[int(_LATE * len(self._waits))] if self._waits else 0.0
        return plain + LATER * late
