"""Bounded store of served token ids: one file per request, written atomically.

A file's name, ``NUMBER.SECONDS.CLIENT.TOKENS.ANSWER.PART.json``, holds everything that decides whether it is kept, so neither
start nor cleaning reads a prompt. ``ANSWER`` is the number of answer tokens. ``PART`` is ``train`` or ``held``, by a keyed hash
of the prompt: equal prompts are in one part, and no client can choose it. Clients are keyed hashes too. Only the owner may read
the files made here; the permissions of an existing folder are kept.
"""

import hashlib
import hmac
import json
import os
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from volley.errors import ConfigError
from volley.files import lock_folder, make_folder, read_json, write_atomically

HELD_OUT = 0.2
"""Share of the prompts that are never trained on."""
AHEAD_SECONDS = 86_400
"""Seconds in the future from which an answer's time must stem from a wrong clock."""


@dataclass(frozen=True)
class Entry:
    """Contents of a row's file name."""

    number: int
    seconds: int
    client: str
    tokens: int
    held_out: bool
    answer: int | None = None
    """Number of answer tokens; ``None`` in older names without it."""

    @property
    def name(self) -> str:
        answer = "" if self.answer is None else f".{self.answer}"
        part = "held" if self.held_out else "train"
        return f"{self.number:012d}.{self.seconds}.{self.client}.{self.tokens}{answer}.{part}.json"

    @property
    def answer_tokens(self) -> int:
        return self.tokens if self.answer is None else self.answer

    @classmethod
    def of(cls, name: str) -> "Entry | None":
        """Return the entry of a file name, ``None`` for any other file."""
        parts = name.split(".")
        if len(parts) not in (6, 7) or parts[-1] != "json":
            return None
        number, seconds, client, *counts, part, _ = parts
        if not all(text.isdigit() for text in (number, seconds, *counts)):
            return None
        return cls(int(number), int(seconds), client, int(counts[0]), part == "held", *map(int, counts[1:]))


@dataclass(frozen=True)
class ServedRow:
    """Served answer: the token ids of prompt and response, and the sampling temperature."""

    entry: Entry
    prompt: list[int]
    response: list[int]
    temperature: float


class Reservoir:
    """Store in ``folder/rows``. One process writes (:meth:`lock`); others may read and erase."""

    def __init__(
        self,
        folder: Path,
        *,
        most_tokens: int = 1_000_000,
        most_days: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder, self.rows_folder = folder, folder / "rows"
        self.most_tokens, self.most_seconds, self._clock = most_tokens, most_days * 86400, clock
        self._lock: IO[str] | None = None
        self._facts: dict[str, Any] = {}
        self._entries: list[Entry] = []
        """Entries ordered by number, which is the order of arrival."""
        self._erased_at: int | None = None
        self._next = 0

    # -- opening ---------------------------------------------------------------------------------------------------
    def open(self, target: str) -> None:
        """Begin to write for the target with this fingerprint. Raises ConfigError if the folder does not allow it."""
        try:
            self._open(target)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"{self.folder} cannot be used ({error.strerror}); give a folder of the user who runs the server"
            ) from None

    def _open(self, target: str) -> None:
        for path in (self.folder, self.rows_folder, self.folder / "rounds"):
            if not path.exists():
                make_folder(path)
                path.chmod(0o700)
        self.lock()
        _remove_unfinished(self.folder)
        path = self.folder / "reservoir.json"
        if not path.exists():
            write_atomically(path, json.dumps({"target": target, "key": secrets.token_hex(16)}) + "\n")
            path.chmod(0o600)
        self._facts = read_json(path)
        if self._facts.get("target") != target:
            self.close()
            raise ConfigError(
                f"{self.folder} holds what another target has served; give another folder, or erase this one: "
                f"volley reservoir erase {self.folder} --all"
            )
        self._read_names()
        self.clean()

    def lock(self) -> None:
        """Lock the store for writing until :meth:`close` or the end of the process."""
        self._lock = lock_folder(self.folder, "another server recalibrates", "stop it", "give another folder")

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _read_names(self) -> None:
        self._erased_at = erased_at(self.folder)  # read first, so that a later erasure is noticed
        self._entries = entries(self.folder)
        self._next = max(self._next, _erased_next(self.folder), _next(self._entries))

    # -- writing ---------------------------------------------------------------------------------------------------
    @property
    def tokens(self) -> int:
        return sum(entry.tokens for entry in self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, client: str, prompt: Sequence[int], response: Sequence[int], temperature: float) -> Entry:
        """Write one answer, then remove old or excess ones. Raises ConfigError if the disk refuses it."""
        assert self._lock is not None, "open() comes first"
        if erased_at(self.folder) != self._erased_at:
            self._read_names()
        entry = Entry(
            self._next,
            int(self._clock()),
            self._digest("client", client.encode())[:8],
            len(prompt) + len(response),
            self._is_held_out(prompt),
            len(response),
        )
        row = {"prompt_token_ids": list(prompt), "response_token_ids": list(response), "temperature": temperature}
        write_atomically(self.rows_folder / entry.name, json.dumps(row) + "\n")
        self._next += 1
        self._entries.append(entry)
        self.clean()
        return entry

    def _is_held_out(self, prompt: Sequence[int]) -> bool:
        digest = self._digest("prompt", json.dumps(list(prompt)).encode())
        return int(digest[:8], 16) < HELD_OUT * 16**8

    def _digest(self, what: str, data: bytes) -> str:
        return hmac.new(f"{what}/{self._facts['key']}".encode(), data, hashlib.sha256).hexdigest()

    def clean(self) -> None:
        """Remove answers that are too old or exceed the limit."""
        now = self._clock()
        kept = range(int(now - self.most_seconds), int(now + AHEAD_SECONDS))
        gone = {entry.number for entry in self._entries if entry.seconds not in kept}
        if not gone and self.tokens <= self.most_tokens:
            return
        held: dict[str, int] = defaultdict(int)
        for entry in self._entries:
            held[entry.client] += entry.tokens * (entry.number not in gone)
        while sum(held.values()) > self.most_tokens and len(gone) < len(self._entries) - 1:
            client = max(held, key=held.__getitem__)
            first = next(e for e in self._entries if e.client == client and e.number not in gone)
            gone.add(first.number)
            held[client] -= first.tokens
        for entry in self._entries:
            if entry.number in gone:
                (self.rows_folder / entry.name).unlink(missing_ok=True)
        end, self._entries = _next(self._entries), [entry for entry in self._entries if entry.number not in gone]
        if not self._entries:
            write_atomically(self.folder / "erased", f"{end}\n")


# -- reading and erasing, from any process -----------------------------------------------------------------------------
def entries(folder: Path) -> list[Entry]:
    """Return the entries of the reservoir in ``folder``, oldest first, without opening a file."""
    rows = folder / "rows"
    names = os.listdir(rows) if rows.is_dir() else []
    return sorted((entry for entry in map(Entry.of, names) if entry is not None), key=lambda entry: entry.number)


def read(folder: Path, chosen: Sequence[Entry]) -> Iterator[ServedRow]:
    """Yield the rows of ``chosen``; rows removed in the meantime are skipped."""
    for entry in chosen:
        try:
            row = json.loads((folder / "rows" / entry.name).read_text())
        except (OSError, ValueError):
            continue
        yield ServedRow(entry, row["prompt_token_ids"], row["response_token_ids"], float(row["temperature"]))


def erase(folder: Path) -> int:
    """Remove every row and every copy that a training made. Return the number of rows.

    Trained drafters stay. A server may keep writing to the folder. The erasure mark is written after the rows are removed, so
    that a reader that finds it has read none of them. It is written before the copies are removed, so that a process that made
    one sees the mark or loses the copy.
    """
    check_reservoir(folder)
    found = entries(folder)
    number = max(_next(found), _erased_next(folder))
    for entry in found:
        (folder / "rows" / entry.name).unlink(missing_ok=True)
    _remove_unfinished(folder)
    write_atomically(folder / "erased", f"{number}\n")
    for copy in folder.glob("rounds/*/*.jsonl*"):
        copy.unlink(missing_ok=True)
    return len(found)


def _remove_unfinished(folder: Path) -> None:
    """Remove files that a killed process left unfinished."""
    for leftover in (folder / "rows").glob(".*"):
        leftover.unlink(missing_ok=True)


def forget(folder: Path) -> int:
    """Run :func:`erase`, and remove the trained drafters and the record of which one serves. No server may run."""
    check_reservoir(folder)
    holder = Reservoir(folder)
    holder.lock()
    try:
        count = erase(folder)
        shutil.rmtree(folder / "rounds", ignore_errors=True)
        for name in ("state.json", "reservoir.json", "erased"):
            (folder / name).unlink(missing_ok=True)
    finally:
        holder.close()
    return count


def check_reservoir(folder: Path) -> None:
    """Refuse a folder in which no server has kept anything."""
    try:
        is_found = (folder / "reservoir.json").is_file()
        entries(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be read ({error.strerror}); run this as the user who runs the server"
        ) from None
    if not is_found:
        raise ConfigError(f"{folder} is no reservoir; give the folder that `volley serve --recalibrate` was given")


def _next(found: Sequence[Entry]) -> int:
    """Return the number of the answer after those ``found``, which are in order."""
    return found[-1].number + 1 if found else 0


def _erased_next(folder: Path) -> int:
    """Return the number after the last erased answer, because trained drafters refer to answers by number."""
    try:
        return int((folder / "erased").read_text())
    except (OSError, ValueError):
        return 0


def erased_at(folder: Path) -> int | None:
    """Return the time of the last erasure, ``None`` if never. If it changes, rows read before must not be used."""
    try:
        return (folder / "erased").stat().st_mtime_ns
    except OSError:
        return None
