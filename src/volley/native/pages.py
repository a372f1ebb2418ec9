"""Memory for weights, which every pass reads from end to end."""

import ctypes
import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

_LARGE = 2 * 2**20
_HUGE_PAGES = 14  # MADV_HUGEPAGE


def in_large_pages(shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
    """Room for a tensor, in pages of 2 MiB as far as it fills such: a processor then looks up fewer addresses while it reads.

    Ordinary pages are 4 KiB. Where the system has no large ones to give, or is not Linux, the room is in these.
    """
    size = math.prod(shape) * dtype.itemsize
    if sys.platform != "linux" or size < _LARGE:
        return torch.empty(shape, dtype=dtype)
    room = torch.empty(size + _LARGE, dtype=torch.uint8)
    own = room[-room.data_ptr() % _LARGE :][:size]
    ctypes.CDLL(None).madvise(ctypes.c_void_p(own.data_ptr()), ctypes.c_size_t(size // _LARGE * _LARGE), _HUGE_PAGES)
    return own.view(dtype).view(torch.Size(shape))
