"""State of recalibration in one file, written by the server alone: the serving drafter, the former ones, and their origins."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from volley.errors import CheckpointError
from volley.files import read_json, write_atomically

BASE = "base"
"""Folder of the copy of the drafter that the server was given."""


@dataclass(frozen=True)
class Standing:
    """Drafter that serves or served; ``folder`` lies in the reservoir's."""

    folder: str = BASE
    kind: str = BASE
    trained_until: int = -1
    """Number of the last answer that its training could see."""
    tau: float | None = None
    """τ on recent traffic when it was chosen."""


@dataclass(frozen=True)
class Learnt:
    """Contents of ``state.json``."""

    base: str
    """Fingerprint of the drafter that the server was given."""
    current: Standing = Standing()
    previous: Standing | None = None
    seen_round: int = 0
    """Last round whose verdict was applied."""
    swaps: int = 0
    roll_backs: int = 0

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        path = folder / "state.json"
        if not path.exists():
            return None
        raw = read_json(path)
        try:
            raw["current"] = Standing(**raw["current"])
            raw["previous"] = None if raw["previous"] is None else Standing(**raw["previous"])
            return cls(**raw)
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} is of another version of volley ({error}); serve with that one, give another folder, or erase what was "
                f"learnt: volley reservoir erase {folder} --all"
            ) from None

    def save(self, folder: Path) -> None:
        write_atomically(folder / "state.json", json.dumps(asdict(self), indent=1) + "\n")

    def swapped(self, chosen: Standing, number: int) -> Self:
        """Return the state with ``chosen`` serving, by the verdict of round ``number``."""
        goes_back = chosen.folder == BASE or (self.previous is not None and chosen.folder == self.previous.folder)
        return replace(
            self,
            current=chosen,
            previous=self.current,
            seen_round=max(number, self.seen_round),
            swaps=self.swaps + 1,
            roll_backs=self.roll_backs + goes_back,
        )

    @property
    def in_use(self) -> set[str]:
        """Return the folders that must stay."""
        return {BASE, self.current.folder, *([] if self.previous is None else [self.previous.folder])}
