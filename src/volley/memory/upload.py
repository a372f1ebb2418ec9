"""Copies of the host's arrays to a device. On a GPU the host does not wait for them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """``array`` as a tensor on ``device``: on a CPU the same memory, on a GPU one asynchronous copy from pinned memory."""
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def upload_indices(values: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """``values`` as int64 on ``device``; a tensor must be there already."""
    return values if isinstance(values, Tensor) else upload(np.array(values, dtype=np.int64), device)


def upload_together(arrays: Sequence[NDArray[np.signedinteger[Any]]], device: torch.device) -> list[Tensor]:
    """Several arrays of one type in one copy; the results are views of one tensor, in the arrays' shapes."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    joined = upload(np.concatenate([array.ravel() for array in arrays]), device)
    parts = torch.split(joined, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def refill(memory: Tensor, values: Tensor) -> None:
    """Copy ``values`` of the host to the beginning of ``memory``. The host does not wait, and may change them at once."""
    host = values if memory.device.type == "cpu" else values.pin_memory()
    memory[: len(values)].copy_(host, non_blocking=True)
