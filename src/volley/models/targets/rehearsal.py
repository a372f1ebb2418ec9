"""Passes over made-up text, with K/V of their own, which are timed for cost tables."""

import time
from collections.abc import Callable, Sequence

import torch

from volley.memory.batch import RaggedBatch, Segment, made_up_tokens
from volley.memory.device import synchronise
from volley.memory.kv_cache import BlockTable
from volley.memory.kv_store import KVStore, make_store

CONTEXT = 128  # tokens of a short prompt
_PAGE = 16  # tokens of a page: the usual number, because kernels are compiled anew for each
_MOST_RUNS = 8
_LONG = 0.1  # seconds of timing after which no further run is made
_ALIKE = 1.05  # two runs whose times differ by less were not interrupted


def made_up(
    lengths: Sequence[int],
    shapes: list[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    *,
    causal: bool,
    context: int,
) -> tuple[RaggedBatch, KVStore]:
    """A batch of requests with ``lengths`` tokens, each behind ``context`` others, and a store for layers of ``shapes``.

    All have the same pages: what these hold is no matter, and pages of their own may be a hundred MiB.
    """
    table = BlockTable(_PAGE, range(-(-(context + max(lengths)) // _PAGE)))
    segments = [Segment(table, context, length, causal) for length in lengths]
    batch = RaggedBatch(segments, torch.tensor(made_up_tokens(sum(lengths)), device=device))
    return batch, make_store("auto", shapes, len(table.pages) * _PAGE, dtype, device)


def context_of(lengths: Sequence[int], longest: int) -> int:
    """Tokens before made-up segments of such ``lengths``: a short prompt, or what a text of ``longest`` tokens has room for."""
    return min(CONTEXT, max(0, longest - max(lengths)))


def spread(tokens: int, requests: int) -> list[int]:
    """Divide ``tokens`` equally among ``requests``, rounded up."""
    return [-(-tokens // requests)] * requests


@torch.inference_mode()
def fastest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest run; runs are repeated until two were about equally fast, as other work may interrupt some.

    The first run, which may be slow, counts as well. A run ends when ``device`` has finished it: a GPU is still at work when its
    launches return.
    """
    synchronise(device)
    times: list[float] = []
    while len(times) < 2 or (sum(times) < _LONG and times[1] > _ALIKE * times[0] and len(times) < _MOST_RUNS):
        started = time.perf_counter()
        run()
        synchronise(device)
        times = sorted([*times, time.perf_counter() - started])
    return times[0]
