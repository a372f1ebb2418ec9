"""Rate limits per API key: one token bucket each, refilled at a constant rate."""

import time
from collections.abc import Callable


class RateLimit:
    """Limit of ``per_minute`` requests in a burst and per minute. Only the event loop uses it."""

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._size, self._per_second, self._clock = max(1.0, per_minute), per_minute / 60, clock
        self._left: dict[str, tuple[float, float]] = {}
        """Requests left for each key, and the time of that count."""

    def wait(self, key: str) -> float:
        """Take one request from a key's bucket. Return 0, or the seconds until one is available."""
        now = self._clock()
        left, then = self._left.get(key, (self._size, now))
        left = min(self._size, left + (now - then) * self._per_second)
        allowed = left >= 1
        self._left[key] = (left - allowed, now)
        return 0.0 if allowed else (1 - left) / self._per_second
