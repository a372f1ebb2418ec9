"""Metrics of recalibration, beside the other metrics of its model."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from volley.recalibrate.reservoir import Reservoir


class Figures:
    """Metrics of drift, candidates, swaps, gains, and the amount kept."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"volley:recalibration_{name}", text, registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"volley:recalibration_{name}", text, registry=registry)

        self.rows = gauge("rows", "Answers that are kept.")
        self.tokens = gauge("tokens", "Tokens that are kept.")
        self.training = gauge("training", "1 while the training process may run, 0 while it is stopped for traffic.")
        self.drift = gauge(
            "drift", "Share of its tau that the drafter has lost since it was chosen, on recent answers."
        )
        self.gain = gauge("gain", "Tau of the drafter over that of the given one, minus 1, on the same recent answers.")
        self.candidates = counter("candidates", "Drafters that were judged.")
        self.swaps = counter("swaps", "Drafters that took over.")
        self.failed = counter("failures", "Trainings and swaps that failed.")
        self.dropped = counter("dropped", "Answers that could not be kept.")
        self.training.set(1)

    def keeps(self, reservoir: Reservoir) -> None:
        self.rows.set(len(reservoir))
        self.tokens.set(reservoir.tokens)

    def judged(self, event: dict[str, Any], tau_then: float | None, *, is_swapped: bool) -> None:
        """Record a verdict. ``tau_then`` is the τ of the serving drafter when it was chosen."""
        self.candidates.inc()
        now = event["tau"] if is_swapped else event["tau_before"]
        if is_swapped:
            self.swaps.inc()
        self.drift.set(0.0 if not tau_then else 1 - now / tau_then)
        if event.get("tau_base"):
            self.gain.set(now / event["tau_base"] - 1)
