"""Advice to the system about pages of memory, and memory for weights, which every pass reads from end to end."""

import ctypes
import math
import sys
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

ON_LINUX = sys.platform == "linux"
DONT_NEED = 4
"""MADV_DONTNEED: drop the pages of a file from this process; a later access reads them again."""
_HUGE_PAGES = 14  # MADV_HUGEPAGE
_LARGE = 2 * 2**20


@cache
def c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def advise(address: int, size: int, advice: int) -> None:
    """Call ``madvise`` for whole pages, on Linux."""
    c_library().madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)


def in_large_pages(shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
    """Allocate a tensor in pages of 2 MiB, as far as it fills them, so that reading it needs fewer address lookups.

    If the system has no large pages, or is not Linux, the tensor is in ordinary pages of 4 KiB.
    """
    size = math.prod(shape) * dtype.itemsize
    if not ON_LINUX or size < _LARGE:
        return torch.empty(shape, dtype=dtype)
    buffer = torch.empty(size + _LARGE, dtype=torch.uint8)
    own = buffer[-buffer.data_ptr() % _LARGE :][:size]
    advise(own.data_ptr(), size // _LARGE * _LARGE, _HUGE_PAGES)
    return own.view(dtype).view(torch.Size(shape))
