"""Describe a device, and measure the memory that a pass uses there."""

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

import torch

from volley.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """Facts about a device that defaults depend on."""

    type: str
    """Type of the torch device: cpu, cuda, …"""
    free_bytes: int | None = None
    """Memory that can be allocated now; ``None`` on a CPU, whose memory is shared."""


def usable_device(name: str | torch.device) -> torch.device:
    """Return the device of that name; ConfigError if this machine cannot use it. ``auto`` is the GPU if there is one, else the
    CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:  # torch raises either, and lists every device it was ever built for
        reason = shorten(str(error), 80, placeholder=" …")
        raise ConfigError(
            f"device {str(name)!r} cannot be used here ({reason}); use auto, cpu, or one that torch sees"
        ) from None


def find_device(device: torch.device) -> Device:
    """Return the current facts about ``device``."""
    if device.type != "cuda":
        return Device(device.type)
    give_back(device)
    return Device("cuda", torch.cuda.mem_get_info(device)[0])


def give_back(device: torch.device) -> None:
    """Free unused GPU memory. Engines and models have reference cycles, so garbage is collected first."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def memory_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU; on a CPU the whole memory of the machine or container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    return min(machine, int(text)) if text.isdigit() else machine


def free_bytes() -> int | None:
    """Return the memory of this machine that is free, or held by files that can be read again; ``None`` if it does not tell."""
    told = Path("/proc/meminfo")
    lines = told.read_text().splitlines() if told.is_file() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has finished all launched work; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sum_in_fp32() -> None:
    """Make a GPU accumulate half-precision matrix products in fp32, for the rest of this process.

    By default PyTorch allows split sums in bf16 and fp16, and the number of splits depends on the number of rows.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def leave_out_cudnn_attention() -> None:
    """Disable cuDNN attention for the rest of this process. It plans each shape anew, and most training batches have a new
    shape."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Measure the peak GPU memory of ``run``, in bytes beyond what is allocated before."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def reserved_bytes(device: torch.device) -> int:
    """Return the GPU bytes that PyTorch holds; 0 for a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def most_together(device: torch.device) -> int:
    """Return how many logits are processed together: 4 MiB fit the caches of a CPU; elsewhere 128 MiB need few launches."""
    return 2**20 if device.type == "cpu" else 2**25
