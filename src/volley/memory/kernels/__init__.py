"""Provide Triton kernels for CUDA devices; each has its reference in PyTorch. Importing this package does not import Triton."""

import importlib.util

import torch

from volley import native
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
