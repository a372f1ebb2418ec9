"""Report on a run: lines on the terminal, ``log.jsonl`` and ``training_report.json`` in its folder."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from volley.files import appending, write_atomically
from volley.train.losses import accepted_prefix
from volley.train.state import Position
from volley.train.step import Slots


class Reporter:
    """Prints and writes on the first process only."""

    def __init__(self, out: Path, speaks: bool) -> None:
        self.out = out
        self.speaks = speaks
        self.losses: list[float] = []
        """Losses of the steps since the last line on progress."""
        self._last = (time.monotonic(), Position())

    def say(self, line: str) -> None:
        if self.speaks:
            print(line, flush=True)

    def start(self, position: Position) -> None:
        """Begin or continue at ``position``. Lines that a killed run logged after its last checkpoint are dropped, because
        their steps run again."""
        self._last = (time.monotonic(), Position(**asdict(position)))
        path = self.out / "log.jsonl"
        if self.speaks and path.exists():
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if _step(line) <= position.step]
            write_atomically(path, "".join(line + "\n" for line in lines))

    def record(self, kind: str, position: Position, values: dict[str, Any]) -> None:
        """Append a line to the log."""
        if self.speaks:
            path = self.out / "log.jsonl"
            with appending(path), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, "step": position.step, **values}) + "\n")

    def first_step(self, position: Position, fraction: float, seconds: float) -> None:
        """Print how long the run may take, long before the first progress line."""
        self.say(f"a step takes some {seconds:.1f} s: {_left(position, fraction)}")

    def progress(self, position: Position, fraction: float, slots: Slots) -> None:
        """Print a line about the steps since the last line; ``fraction`` of the run is done.

        The loss is the mean over these steps. The other numbers are from ``slots`` of the last step.
        """
        loss = sum(self.losses) / len(self.losses)
        self.losses = []
        mean, right = accepted_prefix(slots.correct, slots.valid)
        tau, accuracy = float(mean), right.tolist()
        now, (before, last) = time.monotonic(), self._last
        self._last = (now, Position(**asdict(position)))
        seconds = max(now - before, 1e-9)
        speed = {name: (getattr(position, name) - getattr(last, name)) / seconds for name in ("tokens", "blocks")}
        by_slot = " ".join(f"{value:.2f}" for value in accuracy)
        self.say(
            f"step {position.step} epoch {position.epoch + 1} {fraction:.1%} loss {loss:.4f} τ {tau:.3f} accuracy {by_slot} | "
            f"{speed['tokens']:.0f} tokens/s {speed['blocks']:.0f} blocks/s, {_left(position, fraction)}"
        )
        values: dict[str, Any] = {"loss": loss, "cross_entropy": slots.mean_cross_entropy, "tau": tau}
        values["accuracy"] = [round(value, 4) for value in accuracy]
        values |= {
            "seconds": position.seconds,
            "tokens_per_second": speed["tokens"],
            "blocks_per_second": speed["blocks"],
        }
        self.record("train", position, values)

    def evaluation(self, position: Position, values: dict[str, Any], facts: dict[str, Any]) -> None:
        """Print the results on held-out rows, log them, and write the report."""
        parts = [f"loss {values['loss']:.4f} τ {values['tau']:.3f} (teacher-forced)"] if "tau" in values else []
        parts += [f"draft window {values['draft_window']}"] if "draft_window" in values else []
        parts += [f"real τ {values['decoded']['tau']:.3f}"] if "decoded" in values else []
        self.say(f"step {position.step} held out: {', '.join(parts) or 'nothing is held out'}")
        self.record("eval", position, values)
        if self.speaks:
            report = {**facts, "position": asdict(position), "held_out": values}
            write_atomically(self.out / "training_report.json", json.dumps(report, indent=2) + "\n")


def _step(line: str) -> float:
    """Return the step of a log line; infinity for a line that a kill cut short."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _left(position: Position, fraction: float) -> str:
    """Describe the minutes left, if the run continues at its mean speed."""
    return f"{position.seconds * (1 - fraction) / max(fraction, 1e-9) / 60:.1f} min left"
