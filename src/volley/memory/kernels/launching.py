"""How a Triton kernel is started, on the device that holds its tensors, and how many operations are started at once."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from threading import Lock
from typing import Any

import torch


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Run ``kernel`` with a program for every place of ``grid``. Triton itself would start it on the current device."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **constants)


def capture(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """``run`` as one launch: a CUDA graph of the operations that it starts, on the memory that they read and write now.

    It runs twice before, which compiles kernels. On a CPU it is ``run`` itself, and so it is, with a warning, where a driver
    or a library refuses the capture.
    """
    if device.type != "cuda":
        return run
    with _CAPTURING, torch.cuda.device(device):
        stream, pool = _graph_memory(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                run()
        except RuntimeError as error:
            warnings.warn(f"no CUDA graph, so a pass is launched operation by operation: {error}", stacklevel=2)
            return run
    return graph.replay


_CAPTURING = Lock()  # a process captures one graph at a time


@cache
def _graph_memory(device: torch.device) -> tuple[Any, Any]:
    """The stream on which graphs of a device are captured, and the memory between their operations, as no two run at once."""
    return torch.cuda.Stream(device), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]


@cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for the interpreter on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def leaves_idle(num_programs: int, device: torch.device) -> bool:
    """Whether so many programs of attention leave processors of a GPU without work."""
    return num_programs < 2 * num_processors(device)
