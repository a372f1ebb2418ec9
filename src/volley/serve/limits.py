"""How often one API key may ask: a bucket of requests each, refilled at a steady rate."""

import time
from collections.abc import Callable


class RateLimit:
    """At most ``per_minute`` requests at once, and as many again each minute. The event loop alone uses it."""

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._size, self._per_second, self._clock = max(1.0, per_minute), per_minute / 60, clock
        self._left: dict[str, tuple[float, float]] = {}
        """What each key had left, and when."""

    def wait(self, key: str) -> float:
        """Take one request of a key: 0, or the seconds until there is one again."""
        now = self._clock()
        left, then = self._left.get(key, (self._size, now))
        left = min(self._size, left + (now - then) * self._per_second)
        allowed = left >= 1
        self._left[key] = (left - allowed, now)
        return 0.0 if allowed else (1 - left) / self._per_second
