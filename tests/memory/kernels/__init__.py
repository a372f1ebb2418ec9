"""Tests of the Triton kernels: compiled on a GPU, elsewhere in Triton's interpreter; skipped without Triton."""

import os

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytest.importorskip("triton")
if DEVICE.type == "cpu" and "TRITON_INTERPRET" not in os.environ:
    pytest.skip("the driver of a GPU is here, but PyTorch cannot use it", allow_module_level=True)
