"""Processes of one divided target, as torchrun starts them, forked from a server that has imported everything once."""

import atexit
import os
import socket
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.models.targets.test_sharded", "volley.cli", "volley.cli.console"])


class Ended(NamedTuple):
    result: Any
    """Return the result of rank 0's work, or its exception."""
    exit_codes: list[int | None]


def run_ranks(work: Callable[..., Any], *args: Any, world: int = 2, seconds: float = 600) -> Ended:
    """Do ``work(*args)`` in ``world`` processes; each has ``seconds`` to end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    receiver, sender = CONTEXT.Pipe(duplex=False)
    ranks = [CONTEXT.Process(target=_rank, args=(rank, world, port, sender, work, args)) for rank in range(world)]
    for process in ranks:
        process.start()
    sender.close()
    try:
        result = receiver.recv() if receiver.poll(seconds) else TimeoutError(f"nothing came in {seconds} s")
    except EOFError:
        result = None
    for process in ranks:
        process.join(seconds)
        process.kill()
    receiver.close()
    return Ended(result, [process.exitcode for process in ranks])


def _rank(
    rank: int, world: int, port: int, sender: Connection, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in own.items()})
    try:
        result = work(*args)
    except Exception as error:
        if rank == 0:
            sender.send(error)
        raise
    finally:
        atexit._run_exitfuncs()  # as at the end of a process that was not forked
    if rank == 0:
        sender.send(result)
