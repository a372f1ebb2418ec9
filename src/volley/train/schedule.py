"""Track the position of a run: its next batch, its progress, and the learning rate at that progress."""

import time
from collections.abc import Sequence

from volley.train.documents import plan_epoch
from volley.train.options import TrainConfig, filled
from volley.train.parallel import Ranks
from volley.train.state import Position

DEFAULT_EPOCHS = 6
"""Epochs of a run without another bound (DFlash §4.2)."""


WARMUP = 0.04
"""Share of a run over which the learning rate rises."""


def learning_rate_scale(progress: float, warmup: float = WARMUP) -> float:
    """Return the share of the peak rate at ``progress`` in [0, 1]: a linear rise from a hundredth, then a line to zero."""
    return max(progress / warmup, 0.01) if progress < warmup else (1 - progress) / (1 - warmup)


class Schedule:
    """Batches of a run in their order; ``position`` counts those that are done."""

    def __init__(self, config: TrainConfig, lengths: Sequence[int], ranks: Ranks) -> None:
        self.config = config
        self.lengths = lengths
        self.ranks = ranks
        self.go_on(Position())

    def go_on(self, position: Position) -> None:
        """Continue at ``position``."""
        self.position = position
        self._plan()

    def _plan(self) -> None:
        config = self.config
        self.batches = plan_epoch(self.lengths, filled(config.tokens_per_batch), config.seed, self.position.epoch)

    @property
    def batch(self) -> list[int]:
        """Return the document indices of the next step."""
        return self.batches[self.position.batch]

    def advance(self) -> None:
        """Count the current batch as done."""
        at = self.position
        at.step, at.batch = at.step + 1, at.batch + 1
        if at.batch == len(self.batches):
            at.epoch, at.batch = at.epoch + 1, 0
            self._plan()

    def progress(self) -> float:
        """Return the progress of the run by its nearest bound; 1 is the end. Every process must call this."""
        config, at = self.config, self.position
        fractions, epochs = [0.0], config.epochs
        if epochs is None and config.max_steps is None and config.max_minutes is None:
            epochs = DEFAULT_EPOCHS
        if epochs is not None:
            fractions.append((at.epoch + at.batch / len(self.batches)) / epochs)
        if config.max_steps is not None:
            fractions.append(at.step / config.max_steps)
        if config.max_minutes is not None:
            fractions.append(self.ranks.from_first(at.seconds / max(60 * config.max_minutes - at.evaluation, 1e-9)))
        return min(1.0, max(fractions))


class Interval:
    """Timer of an action that is due every ``steps`` steps, or ``minutes`` minutes after the last time."""

    def __init__(self, steps: int | None, minutes: float | None, ranks: Ranks) -> None:
        self.steps = steps
        self.minutes = minutes
        self.ranks = ranks
        self.restart()

    def restart(self) -> None:
        """Restart the minutes."""
        self.last = time.monotonic()

    def due(self, step: int) -> bool:
        """Return whether it is due after ``step`` steps. Every process must call this."""
        if self.steps is not None and step % self.steps == 0:
            return True
        return self.minutes is not None and self.ranks.any(time.monotonic() - self.last > 60 * self.minutes)
