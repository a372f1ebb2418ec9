"""Contenders of ``llama_cpp.py`` in processes of their own: how they are reached, and what they report."""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path


@dataclass
class Answer:
    """Answers of one contender to one group of prompts."""

    tokens: list[list[int]]
    seconds: float
    """From the request to the last token of the group."""
    decode_seconds: float
    """From the first token to the last, of the slowest prompt."""
    gained: int
    """Tokens after the first of each answer."""
    passes: int
    """Passes of the target that gave them."""


@contextmanager
def connected(
    command: Sequence[str], environment: Mapping[str, str], address: str, log: Path
) -> Iterator[tuple[Connection, int]]:
    """A line to ``address``, from which a new process calls and sends something once it is ready, and that process's id.

    ``None`` on the line tells it to end.
    """
    with Listener(address) as listener, log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        listener._listener._socket.settimeout(1)  # type: ignore[attr-defined]
        try:
            with accepted(listener, process, log) as line:
                while not line.poll(1):
                    check_alive(process, log)
                line.recv()
                yield line, process.pid
                line.send(None)
        finally:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.terminate()


def accepted(listener: Listener, process: subprocess.Popen[bytes], log: Path) -> Connection:
    while True:
        try:
            return listener.accept()
        except TimeoutError:
            check_alive(process, log)


def check_alive(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.poll() is not None:
        raise SystemExit(f"{process.args[0]} ended with {process.returncode}; see {log}")  # type: ignore[index]
