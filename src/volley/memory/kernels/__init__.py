"""Triton kernels for CUDA devices; each has its reference in PyTorch. Importing this package does not import Triton."""

import importlib.util

import torch


def usable(device: torch.device) -> bool:
    """Whether kernels can run on ``device``."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
