"""How a Triton kernel is started: on the device that holds its tensors, be it the current one or not."""

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Run ``kernel`` with a program for every place of ``grid``. Triton itself would start it on the current device."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **constants)


@cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for the interpreter on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
