"""Options by which a server tunes its drafter to its traffic."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from volley.errors import check_fields, names_unknown_fields, unknown_key


@names_unknown_fields
@dataclass(frozen=True, kw_only=True)
class RecalibrateConfig:
    """Options of recalibration, which is off without a folder."""

    recalibrate: Path | None = None
    """Keep the drafter tuned to the traffic: folder for the served token ids and for the drafters trained on them."""
    recalibrate_requests: Literal["all", "asked"] = "asked"
    """Requests to keep: only those with "recalibrate": true, or all except those with false."""
    reservoir_tokens: int = 1_000_000
    """Maximum tokens in the folder; the client with the most tokens loses its oldest."""
    reservoir_days: float = 30.0
    """Maximum days that a request is kept."""
    recalibrate_tokens: int = 4000
    """Tokens of newly served answers that start a round, which trains a candidate."""
    recalibrate_steps: int = 600
    """Maximum training steps of a candidate; few answers are passed ten times."""
    recalibrate_learning_rate: float | None = None
    """Peak learning rate of a candidate; by default half of volley tune's initial one."""
    recalibrate_nice: int = 19
    """Nice value of the training process: 19 takes only CPU time that no other process wants, 0 competes with them."""
    recalibrate_idle: float = 1.0
    """Seconds without a request after which training continues."""

    def __post_init__(self) -> None:
        if self.recalibrate_requests not in ("all", "asked"):
            raise unknown_key("value of recalibrate_requests,", self.recalibrate_requests, ("all", "asked"))
        check_fields(self, *self._checks())

    def _checks(self) -> Iterable[tuple[str, bool, str]]:
        rate = self.recalibrate_learning_rate
        yield "recalibrate_learning_rate", rate is None or rate > 0, "more than 0, or left out"
        yield "recalibrate_nice", 0 <= self.recalibrate_nice <= 19, "between 0 and 19"
        yield "recalibrate_idle", self.recalibrate_idle >= 0, "0 or more"
        room = f"at least recalibrate_tokens, {self.recalibrate_tokens}, or no round is ever due"
        yield "reservoir_tokens", self.reservoir_tokens >= self.recalibrate_tokens, room
        for name in ("reservoir_tokens", "reservoir_days", "recalibrate_tokens", "recalibrate_steps"):
            yield name, getattr(self, name) > 0, "more than 0"
