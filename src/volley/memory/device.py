"""Facts about the device, and the memory that a pass takes there."""

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
    """The facts that defaults follow."""

    kind: str
    """As torch names it: cpu, cuda, …"""
    free_bytes: int | None = None
    """Memory that can be allocated now; ``None`` on a CPU, whose memory is shared."""


def usable_device(name: str | torch.device) -> torch.device:
    """The device of that name; ConfigError if this machine cannot use it. ``auto`` is the GPU if there is one, else the CPU."""
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
    """The present facts about ``device``."""
    if device.type != "cuda":
        return Device(device.type)
    give_back(device)
    return Device("cuda", torch.cuda.mem_get_info(device)[0])


def give_back(device: torch.device) -> None:
    """Return to a GPU what nobody refers to any more: engines and models refer to themselves."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def memory_bytes(device: torch.device) -> int:
    """Free memory of a GPU; on a CPU the whole memory of the machine, or of the container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    return min(machine, int(text)) if text.isdigit() else machine


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has done everything it was told to; a CPU has already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sum_in_fp32() -> None:
    """Make a GPU add up the parts of half-precision products in fp32, for the rest of this process.

    By default PyTorch allows sums in bf16 and fp16, and the number of parts of a product depends on its rows.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def leave_out_cudnn_attention() -> None:
    """For the rest of this process. cuDNN plans attention anew for each shape, and most batches of a training have their own."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Bytes of a GPU that ``run`` holds at its peak beyond what is held before."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def reserved_bytes(device: torch.device) -> int:
    """Bytes of a GPU that PyTorch holds; 0 for a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def most_together(device: torch.device) -> int:
    """How many logits are processed together: 4 MiB stay in the caches of a CPU, 128 MiB elsewhere are few launches."""
    return 2**20 if device.type == "cpu" else 2**25
