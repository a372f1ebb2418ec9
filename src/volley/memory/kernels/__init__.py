"""Provide Triton kernels for CUDA devices; each has its reference in PyTorch. Importing this package does not import Triton."""

import importlib.util
from typing import Literal

import torch

from volley import native
from volley.errors import ConfigError
from volley.memory.attention import Attention, paged_attention
from volley.memory.native_attention import native_attention


def usable(device: torch.device) -> bool:
    """Return True if kernels can run on ``device``."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def attention_for(device: torch.device) -> Attention:
    """Return the fastest attention on ``device``."""
    if usable(device):
        from volley.memory.kernels.attention import ragged_attention

        return ragged_attention
    return native_attention if native.available else paged_attention


def attention_named(name: Literal["torch", "native", "triton"], device: torch.device) -> Attention:
    """Return the attention of PyTorch's operations, of the C kernel or of the Triton kernel. Raise ConfigError if it does not
    run on ``device``."""
    if name == "torch":
        return paged_attention
    fastest = attention_for(device)
    if (name == "native") != (fastest is native_attention) or fastest is paged_attention:
        needed = "a CPU with AVX2" if name == "native" else "an NVIDIA GPU and the package triton"
        raise ConfigError(f"draft_attention {name!r} needs {needed}, and the device is {device}; use target or torch")
    return fastest
