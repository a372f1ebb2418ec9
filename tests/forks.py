"""Copies of this process: what is killed, or is one of several, need not import everything anew."""

import faulthandler
import io
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch

FORK = get_context("fork")
SECONDS = 300
"""After which a process says where it stands, and ends."""


class Forked:
    """A process that calls ``run(*arguments)`` with ``variables`` in its environment; what it prints is kept."""

    def __init__(self, run: Callable[..., object], *arguments: Any, **variables: str) -> None:
        reader, writer = os.pipe()
        self.printed = os.fdopen(reader)
        self.process = FORK.Process(target=_call, args=(writer, run, arguments, variables))
        self.process.start()
        os.close(writer)

    def finish(self) -> str:
        """Wait for it to end well; what it printed and nobody has read."""
        with self.printed:
            printed = self.printed.read()
        self.process.join()
        assert self.process.exitcode == 0, printed
        return printed

    def die(self) -> None:
        """Wait for it to be killed; it kills itself where ``DIES_AFTER`` is among its variables."""
        with self.printed:
            printed = self.printed.read()
        self.process.join()
        assert self.process.exitcode == -signal.SIGKILL, printed

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.printed.close()


class _Lines(io.TextIOWrapper):
    """Return the output; with ``DIES_AFTER`` the process is killed as soon as a line begins so."""

    def write(self, text: str) -> int:
        written = super().write(text)
        if (last := os.environ.get("DIES_AFTER")) and text.startswith(last):
            os.kill(os.getpid(), signal.SIGKILL)
        return written


def _call(writer: int, run: Callable[..., object], arguments: tuple[Any, ...], variables: dict[str, str]) -> None:
    for stream in (1, 2):
        os.dup2(writer, stream)
    os.environ.update(variables)
    sys.stdout = sys.stderr = _Lines(os.fdopen(writer, "wb", buffering=0), line_buffering=True, write_through=True)
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=sys.stderr)
    torch.set_num_threads(1)  # a copy has none of the threads that its original works with
    run(*arguments)
