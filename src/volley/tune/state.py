"""What a tuning run has done so far, in one file of its folder: a killed run goes on behind its last finished step."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from volley.errors import ConfigError
from volley.files import read_json, write_atomically


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Be the only tuning that works in ``out``, until the block or the process ends."""
    try:
        lock = (out / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written in ({error.strerror}); give another --out") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another volley tune works in {out}; wait for it or stop it, or give another --out"
            ) from None
        yield


class Milestones:
    """``tune.json``: the options of the run, its target's fingerprint, and the outcome of every step that is done."""

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
        """Refuse a target of other weights than the steps before had."""
        if self.target not in (None, fingerprint):
            raise ConfigError(
                f"{self.path.parent} was begun with other weights of the target; restore them to go on, or give another --out"
            )
        self.target = fingerprint

    def begin(self) -> None:
        """Note the options before the first step leaves anything, which a run with others must not go on with."""
        if not self.path.exists():
            self._write()

    def _write(self) -> None:
        written = json.dumps({"options": self.options, "target": self.target, "done": self.done}, indent=1) + "\n"
        write_atomically(self.path, written)
