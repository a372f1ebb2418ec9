"""Save and load the state of a run, from which a killed run continues to the same weights, bit for bit."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from volley.errors import CheckpointError, ConfigError
from volley.files import absolute, replaced
from volley.train.options import PATH_OPTIONS, REPORTING_OPTIONS, TrainConfig
from volley.train.parallel import Ranks

NAME = "checkpoint.pt"


@dataclass
class Position:
    """Position of a run. The order of the data and the anchors depend only on seed, epoch and document."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """Number of batches of this epoch that are done."""
    seconds: float = 0.0
    tokens: int = 0
    blocks: int = 0
    best_tau: float = 0.0
    """Best real τ of all evaluations; ``keep_best`` keeps its drafter."""
    worse: int = 0
    """Number of evaluations in a row that were clearly below it."""
    evaluation: float = 0.0
    """Seconds of the last evaluation. A run ends with one, within its minutes."""


class SavedRun:
    """File in ``config.out`` from which a killed run continues. ``facts`` are digests that must be equal then."""

    def __init__(
        self,
        config: TrainConfig,
        facts: Mapping[str, str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
    ) -> None:
        self.path = Path(config.out) / NAME
        self.options = describe(config)
        self.facts = facts
        self.model = model
        self.optimizer = optimizer
        self.ranks = ranks

    def restore(self) -> Position | None:
        """Load weights and optimizer. Return the position of that run, or ``None`` if there is no file."""
        state = load_state(self.path)
        if self.ranks.first:
            for leftover in self.path.parent.glob(f".{NAME}.*"):  # from a process that was killed while it wrote
                leftover.unlink(missing_ok=True)
        if not self.ranks.all_see(-1 if state is None else state["position"]["step"]):
            raise ConfigError(
                f"not every process sees the same {self.path}; put --out on a file system that all nodes share"
            )
        if state is None:
            return None
        check_same_run(self.path, state, self.options, self.facts)
        self.model.load_state_dict(state["training"]["model"])
        self.optimizer.load_state_dict(state["training"]["optimizer"])
        return Position(**state["position"])

    def save(self, position: Position) -> None:
        """Write the file on the first process."""
        if self.ranks.first:
            training = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            state = {"options": self.options, "facts": dict(self.facts), "position": asdict(position)}
            save_state(self.path, {**state, "training": training})


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write the file atomically: a killed process leaves the old state or the new one."""
    with replaced(path) as temporary:
        try:
            torch.save(dict(state), temporary)
        except RuntimeError as error:  # torch.save's error for a full disk
            raise OSError(str(error)) from None


def load_state(path: Path) -> dict[str, Any] | None:
    """Return the saved state, or ``None`` if there is none."""
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({error}); remove it to start over") from None
    return state


def describe(config: TrainConfig) -> dict[str, Any]:
    """Return the options as JSON values."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(config).items()}


def check_same_run(path: Path, saved: Mapping[str, Any], options: Mapping[str, Any], facts: Mapping[str, str]) -> None:
    """Refuse to continue a run whose options, target or data have changed."""
    for key, value in options.items():
        before = saved["options"].get(key)
        is_same = absolute(before) == absolute(value) if key in PATH_OPTIONS else before == value
        if key not in REPORTING_OPTIONS and key != "out" and not is_same:
            raise ConfigError(
                f"{path} was written with {key} = {before!r}, this run has {value!r}; "
                "give the same value to go on, or another --out to start over"
            )
    for key, value in facts.items():
        if saved["facts"].get(key) != value:
            raise ConfigError(f"{path} was written with another {key}; restore it to go on, or give another --out")
