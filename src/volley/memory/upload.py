"""Copy arrays between host and device. On a GPU copies are asynchronous; the host waits only to read values that come back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNED = 16  # bytes; Triton recompiles a kernel for memory with another alignment


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Return ``array`` as a tensor on ``device``: shared memory on a CPU, one asynchronous copy from pinned memory on a GPU."""
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def upload_indices(values: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """Return ``values`` as int64 on ``device``; a tensor must be there already."""
    return values if isinstance(values, Tensor) else upload(np.array(values, dtype=np.int64), device)


def upload_together(arrays: Sequence[NDArray[np.signedinteger[Any]]], device: torch.device) -> list[Tensor]:
    """Copy several arrays of one type together; the results are views of one tensor, in the arrays' shapes."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    items = _ALIGNED // arrays[0].itemsize
    starts = np.cumsum([0, *(-(-array.size // items) * items for array in arrays)]).tolist()
    host = np.zeros(starts[-1], dtype=arrays[0].dtype)
    for array, start in zip(arrays, starts, strict=False):
        host[start : start + array.size] = array.ravel()
    joined = upload(host, device)
    return [joined[start : start + own.size].view(own.shape) for own, start in zip(arrays, starts, strict=False)]


def refill(memory: Tensor, values: Tensor) -> None:
    """Copy ``values`` from the host to the beginning of ``memory``. The copy is asynchronous; ``values`` may change at once."""
    host = values if memory.device.type == "cpu" else values.pin_memory()
    memory[: len(values)].copy_(host, non_blocking=True)


class Download:
    """Copy of a tensor to the host; on a GPU it is asynchronous, into pinned memory."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._done = values, None
        if values.device.type != "cpu":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._done = torch.cuda.current_stream(values.device).record_event()

    def tolist(self) -> list[Any]:
        """Return the values. The host waits for them, but not for later launches."""
        if self._done is not None:
            self._done.synchronize()
        values: list[Any] = self._values.tolist()
        return values
