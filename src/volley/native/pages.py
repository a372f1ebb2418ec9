"""What the system is told about pages of memory, and room for weights, which every pass reads from end to end."""

import ctypes
import math
import sys
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

ON_LINUX = sys.platform == "linux"
DONT_NEED = 4
"""MADV_DONTNEED: the pages of a file leave this process, and come again if they are read."""
_HUGE_PAGES = 14  # MADV_HUGEPAGE
_LARGE = 2 * 2**20


@cache
def c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def advise(address: int, size: int, advice: int) -> None:
    """``madvise`` for whole pages, on Linux."""
    c_library().madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)


def in_large_pages(shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
    """Room for a tensor, in pages of 2 MiB as far as it fills such: a processor then looks up fewer addresses while it reads.

    Ordinary pages are 4 KiB. Where the system has no large ones to give, or is not Linux, the room is in these.
    """
    size = math.prod(shape) * dtype.itemsize
    if not ON_LINUX or size < _LARGE:
        return torch.empty(shape, dtype=dtype)
    room = torch.empty(size + _LARGE, dtype=torch.uint8)
    own = room[-room.data_ptr() % _LARGE :][:size]
    advise(own.data_ptr(), size // _LARGE * _LARGE, _HUGE_PAGES)
    return own.view(dtype).view(torch.Size(shape))
