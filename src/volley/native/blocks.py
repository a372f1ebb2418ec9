"""Blocks of GGUF files, decoded or laid out in C. The reference is the package ``gguf``."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from volley.library import functions, is_built
from volley.weights import NUMBERS, PACK, STORED

BYTES = {
    "Q8_0": 34,
    "Q5_0": 22,
    "Q4_0": 18,
    "Q5_1": 24,
    "Q4_1": 20,
    "IQ4_NL": 18,
    "MXFP4": 17,
    "Q6_K": 210,
    "Q5_K": 176,
    "Q4_K": 144,
    "Q3_K": 110,
    "Q2_K": 84,
    "IQ4_XS": 136,
}
"""Bytes of a block of 32 or 256 numbers, for the types that C reads."""
DTYPES = (torch.float32, torch.bfloat16)


def reads(kind: str) -> bool:
    """Return whether C reads blocks of a type."""
    return is_built and kind in STORED


def decode(kind: str, blocks: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    """Decode ``blocks [..., bytes]`` to numbers ``[..., in]``, in one of :data:`DTYPES`."""
    assert dtype in DTYPES, f"blocks cannot be decoded to {dtype}"
    numbers = torch.empty(*blocks.shape[:-1], _inputs(kind, blocks), dtype=dtype)
    places = (numbers.data_ptr(), None) if dtype == torch.float32 else (None, numbers.data_ptr())
    functions().decode_blocks(*_of(kind, blocks), *places)
    return numbers


def lay_out(kind: str, blocks: NDArray[np.uint8], codes: Tensor, scales: Tensor) -> None:
    """Pack ``blocks [rows, bytes]`` into the ``codes`` and ``scales`` of a :class:`~volley.native.codes.LaidOut`."""
    assert codes.is_contiguous()
    assert scales.is_contiguous()
    assert codes.shape[1] * PACK == _inputs(kind, blocks), f"{codes.shape[1]} packs are not for {blocks.shape[1]} bytes"
    number, address, count = _of(kind, blocks)
    functions().lay_out_blocks(number, address, len(blocks), count // len(blocks), codes.data_ptr(), scales.data_ptr())


def _inputs(kind: str, blocks: NDArray[np.uint8]) -> int:
    size = BYTES[kind]
    assert blocks.shape[-1] % size == 0, f"{blocks.shape[-1]} bytes are no blocks of {size}"
    return int(blocks.shape[-1]) // size * STORED[kind].scaled_inputs


def _of(kind: str, blocks: NDArray[np.uint8]) -> tuple[int, int, int]:
    """Return a type's number, and the address and number of its blocks."""
    assert blocks.flags.c_contiguous
    return NUMBERS[kind], int(blocks.ctypes.data), blocks.nbytes // BYTES[kind]
