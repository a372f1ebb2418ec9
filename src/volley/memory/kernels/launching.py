"""Launch Triton kernels on the device that holds their tensors, and capture many operations as one launch."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache
from threading import Lock
from typing import Any
from weakref import WeakSet

import torch


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Run ``kernel`` with a program for every point of ``grid``. Triton itself would launch it on the current device."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **constants)


def capture(run: Callable[[], object], device: torch.device) -> Callable[[], object] | None:
    """Capture ``run`` as one launch: a CUDA graph of its operations, on the memory that they read and write now.

    It runs twice before, which compiles kernels. On a CPU the result is ``run`` itself. The result is ``None``, with a
    warning, if a driver or a library refuses the capture, or memory is short.
    """
    if device.type != "cuda":
        return run
    with _CAPTURING, torch.cuda.device(device):
        stream, (pool, graphs) = _capturing_stream(device), _graph_memory(device)
        before, graph = torch.cuda.current_stream(device), torch.cuda.CUDAGraph()
        stream.wait_stream(before)
        try:
            with torch.cuda.stream(stream):
                for _ in range(2):
                    run()
            before.wait_stream(stream)
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                run()
        except RuntimeError as error:
            _leave(before, pool)
            before.wait_stream(stream)
            warnings.warn(f"no CUDA graph, so a pass is launched operation by operation: {error}", stacklevel=2)
            return None
    graphs.add(graph)
    return graph.replay


def _leave(stream: Any, pool: Any) -> None:
    """Return to ``stream`` and to memory outside ``pool``: PyTorch stays in both if the end of a capture raises."""
    torch.cuda.set_stream(stream)
    with suppress(RuntimeError, AttributeError):  # it had left already, or cannot capture at all
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)


SYNCHRONISED = "synchronizing CUDA operation"
"""Text of PyTorch's warning when the host waits."""


def waits(run: Callable[[], object], device: torch.device) -> bool:
    """Return True if the host waits for ``device`` within ``run``: only then can its operations depend on what the device
    computes.

    It runs once before, which compiles kernels.
    """
    run()
    before = torch.cuda.get_sync_debug_mode()
    with torch.cuda.device(device), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return any(SYNCHRONISED in str(own.message) for own in found)


_CAPTURING = Lock()  # a process captures one graph at a time


_pools: dict[torch.device, tuple[Any, WeakSet[Any]]] = {}  # memory pool of each device, with its graphs


@cache
def _capturing_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _graph_memory(device: torch.device) -> tuple[Any, WeakSet[Any]]:
    """Return the memory pool that all graphs of a device share, as no two run at once, and these graphs.

    PyTorch captures nothing into a pool whose graphs are all gone; the next graph gets another pool.
    """
    if device not in _pools or not _pools[device][1]:
        _pools[device] = torch.cuda.graph_pool_handle(), WeakSet()
    return _pools[device]


@cache
def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 for the interpreter on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def leaves_idle(num_programs: int, device: torch.device) -> bool:
    """Return True if ``num_programs`` programs of attention leave processors of a GPU idle."""
    return num_programs < 2 * num_processors(device)
