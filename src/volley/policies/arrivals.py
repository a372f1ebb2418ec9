"""How long a cycle may be while prompts come: a prompt waits for the end of the pass that it comes in."""

from collections import deque
from collections.abc import Callable
from math import inf

LATER = 0.13
"""Of its own time, as it is measured here, that a first token may come later than with plain decoding: 0.15 of its time there."""
SELDOM = 10.0
"""Seconds of decoding after a prompt came; if none came since, the next one is not reckoned with."""
_REMEMBERED = 64  # first tokens
_LATE = 0.95  # the quantile of them that is looked at: the latest may be one of a kind


class Arrivals:
    """The prompts of one engine that came while others decoded, by the clock of decoding: seconds of steps that decoded."""

    def __init__(self) -> None:
        self.newcomers: Callable[[], bool] | None = None
        """Whether prompts wait for this step. Where this is known, drafts are dropped for them, before they are verified."""
        self._decoded, self._last = 0.0, -inf
        self._waits = deque[float](maxlen=_REMEMBERED)

    def came(self, *, beside: bool = True) -> None:
        """A prompt came; ``beside`` says that others decode."""
        if beside:
            self._last = self._decoded

    def read(self, seconds: float) -> None:
        """A prompt's first token came so long after the prompt."""
        self._waits.append(seconds)

    def decoded(self, seconds: float) -> None:
        """A step in which anything decoded took so long."""
        self._decoded += seconds

    @property
    def go_on(self) -> bool:
        """Whether more prompts are to be reckoned with."""
        return self._decoded - self._last < SELDOM

    def most_seconds(self, plain: float) -> float:
        """What a cycle may take where one of plain decoding takes ``plain`` seconds.

        A prompt that comes in a cycle waits for its end, so each first token is later by what cycles are longer than plain
        ones. That is no more than 15 % of a late one's time, and their 99th percentile is not later than that either.
        """
        if not self.go_on:
            return inf
        late = sorted(self._waits)[int(_LATE * len(self._waits))] if self._waits else 0.0
        return plain + LATER * late
