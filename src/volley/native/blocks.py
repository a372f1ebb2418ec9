"""Blocks of GGUF files in C: decoded, or turned into codes. The references are the package ``gguf`` and its numbers rounded."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from volley.native.codes import FINE, Codes, Weights
from volley.native.library import functions, is_built

SIZES = {
    "Q4_0": (32, 18),
    "Q5_0": (32, 22),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""Numbers and bytes of a block, of the types that C reads, by the numbers that it gives them."""
DTYPES = (torch.float32, torch.bfloat16)


def reads(kind: str) -> bool:
    """Whether C reads blocks of a type."""
    return is_built and kind in SIZES


def decode(kind: str, blocks: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    """The numbers ``[..., in]`` of ``blocks [..., bytes]``, in one of :data:`DTYPES`."""
    assert dtype in DTYPES, f"nothing is decoded to {dtype}"
    numbers = torch.empty(_shape(kind, blocks, 1), dtype=dtype)
    places = (numbers.data_ptr(), None) if dtype == torch.float32 else (None, numbers.data_ptr())
    functions().decode_blocks(*_of(kind, blocks), *places)
    return numbers


def recode(kind: str, blocks: NDArray[np.uint8], to: Weights) -> Codes:
    """Codes ``[rows, in]`` of ``blocks [rows, bytes]``: their own; int8 of K types, which have no single scale for 32 numbers."""
    codes = torch.empty(_shape(kind, blocks, 1), dtype=torch.int8)
    scales = torch.empty(_shape(kind, blocks, FINE), dtype=torch.float16)
    functions().recode_blocks(*_of(kind, blocks), codes.data_ptr(), scales.data_ptr())
    return Codes(to, codes, scales)


def _shape(kind: str, blocks: NDArray[np.uint8], group: int) -> tuple[int, ...]:
    """Of numbers in groups of so many."""
    numbers, size = SIZES[kind]
    assert blocks.shape[-1] % size == 0, f"{blocks.shape[-1]} bytes are no blocks of {size}"
    return (*blocks.shape[:-1], blocks.shape[-1] // size * numbers // group)


def _of(kind: str, blocks: NDArray[np.uint8]) -> tuple[int, int, int]:
    """A type's number, and where how many of its blocks are."""
    assert blocks.flags.c_contiguous
    return list(SIZES).index(kind), int(blocks.ctypes.data), blocks.nbytes // SIZES[kind][1]
