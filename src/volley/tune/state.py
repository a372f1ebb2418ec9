"""Store the progress of a tuning run in one file of its folder. A killed run continues after its last finished step."""

import json
from pathlib import Path
from typing import Any, TextIO

from volley.errors import ConfigError
from volley.files import lock_folder, read_json, write_atomically


def alone_in(out: Path) -> TextIO:
    """Lock ``out`` for this tuning run, until the returned file is closed or the process ends."""
    return lock_folder(out, "another volley tune works", "wait for it or stop it", "give another --out")


class Milestones:
    """Contents of ``tune.json``: options of the run, its target's fingerprint, and the outcome of every finished step."""

    def __init__(self, out: Path, options: dict[str, Any]) -> None:
        self.path = out / "tune.json"
        self.done: dict[str, Any] = {}
        self.target: str | None = None
        self.options: dict[str, Any] = json.loads(json.dumps(options, default=str))
        if self.path.exists():
            saved = read_json(self.path)
            changed = [name for name, value in self.options.items() if saved["options"].get(name) != value]
            if changed:
                raise ConfigError(
                    f"{out} holds a tuning with other values of {', '.join(changed)}; give the same to go on, or another --out"
                )
            self.done, self.target = saved["done"], saved.get("target")

    def __contains__(self, step: str) -> bool:
        return step in self.done

    def __getitem__(self, step: str) -> Any:
        return self.done[step]

    def __setitem__(self, step: str, outcome: Any) -> None:
        self.done[step] = outcome
        self._write()

    def check_target(self, fingerprint: str) -> None:
        """Refuse a target whose weights differ from those of the earlier steps."""
        if self.target not in (None, fingerprint):
            raise ConfigError(
                f"{self.path.parent} was begun with other weights of the target; restore them to go on, or give another --out"
            )
        self.target = fingerprint

    def begin(self) -> None:
        """Save the options before the first step writes files, which a run with other options must not use."""
        if not self.path.exists():
            self._write()

    def _write(self) -> None:
        written = json.dumps({"options": self.options, "target": self.target, "done": self.done}, indent=1) + "\n"
        write_atomically(self.path, written)
