"""Passes over made-up text with their own K/V, which are timed for cost tables."""

import time
from collections.abc import Callable, Sequence

import torch

from volley.memory.batch import RaggedBatch, Segment, made_up_tokens
from volley.memory.device import synchronise
from volley.memory.kv_cache import BlockTable
from volley.memory.kv_store import KVStore, make_store

CONTEXT = 128  # tokens of a short prompt
_PAGE = 16  # tokens of a page: the default, because each size compiles its own kernels
_MOST_RUNS = 8
_LONG = 0.02  # seconds after which timing ends
_ALIKE = 1.05  # two runs whose ratio is below this were not interrupted


def made_up(
    lengths: Sequence[int],
    shapes: list[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    *,
    causal: bool,
    context: int,
) -> tuple[RaggedBatch, KVStore]:
    """Make a batch of requests with ``lengths`` tokens, each after ``context`` others, and a store for layers of ``shapes``.

    All requests share the same pages, because their content does not matter and separate pages may take a hundred MiB.
    """
    table = BlockTable(_PAGE, range(-(-(context + max(lengths)) // _PAGE)))
    segments = [Segment(table, context, length, causal) for length in lengths]
    batch = RaggedBatch(segments, torch.tensor(made_up_tokens(sum(lengths)), device=device))
    return batch, make_store("auto", shapes, len(table.pages) * _PAGE, dtype, device)


def context_of(lengths: Sequence[int], longest: int) -> int:
    """Return the number of tokens before segments of ``lengths``: a short prompt, or less if ``longest`` limits it."""
    return min(CONTEXT, max(0, longest - max(lengths)))


def spread(tokens: int, requests: int) -> list[int]:
    """Divide ``tokens`` equally among ``requests``, rounded up."""
    return [-(-tokens // requests)] * requests


@torch.inference_mode()
def fastest(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest run; runs are repeated until two are about equally fast, as others may be interrupted.

    The first run counts, though it may be slow. A run of 20 ms is not repeated. A run ends when ``device`` has
    finished it, not when its launches return.
    """
    synchronise(device)
    times: list[float] = []
    while sum(times) < _LONG and len(times) < _MOST_RUNS and (len(times) < 2 or times[1] > _ALIKE * times[0]):
        started = time.perf_counter()
        run()
        synchronise(device)
        times = sorted([*times, time.perf_counter() - started])
    return times[0]
