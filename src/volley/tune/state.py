"""What a tuning run has done so far, in one file of its folder: a killed run goes on behind its last finished step."""

import json
from pathlib import Path
from typing import Any

from volley.errors import ConfigError
from volley.files import read_json, write_atomically


class Milestones:
    """``tune.json``: the options of the run, and the outcome of every step that is done."""

    def __init__(self, out: Path, options: dict[str, Any]) -> None:
        self.path = out / "tune.json"
        self.done: dict[str, Any] = {}
        self.options: dict[str, Any] = json.loads(json.dumps(options, default=str))
        if self.path.exists():
            saved = read_json(self.path)
            changed = [name for name, value in self.options.items() if saved["options"].get(name) != value]
            if changed:
                raise ConfigError(
                    f"{out} holds a tuning with other values of {', '.join(changed)}; give the same to go on, or another --out"
                )
            self.done = saved["done"]

    def __contains__(self, step: str) -> bool:
        return step in self.done

    def __getitem__(self, step: str) -> Any:
        return self.done[step]

    def __setitem__(self, step: str, outcome: Any) -> None:
        self.done[step] = outcome
        self._write()

    def begin(self) -> None:
        """Note the options before the first step leaves anything, which a run with others must not go on with."""
        if not self.path.exists():
            self._write()

    def _write(self) -> None:
        write_atomically(self.path, json.dumps({"options": self.options, "done": self.done}, indent=1) + "\n")
