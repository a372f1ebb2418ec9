"""Copies of this process: what is killed, or is one of several, need not import everything anew."""

import faulthandler
import os
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

    def kill_after(self, line_start: str) -> None:
        """SIGKILL it as soon as it prints a line that begins so."""
        for line in self.printed:
            if line.startswith(line_start):
                break
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.printed.close()


def _call(writer: int, run: Callable[..., object], arguments: tuple[Any, ...], variables: dict[str, str]) -> None:
    for stream in (1, 2):
        os.dup2(writer, stream)
    sys.stdout = sys.stderr = os.fdopen(writer, "w", buffering=1)
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=sys.stderr)
    os.environ.update(variables)
    torch.set_num_threads(1)  # a copy has none of the threads that its original works with
    run(*arguments)
