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


def decode(kind: str, blocks: NDArray[np.uint8], out: Tensor) -> None:
    """Write the numbers of ``blocks [rows, bytes]`` to ``out [rows, in]``, in one of :data:`DTYPES`."""
    assert out.is_contiguous()
    assert out.dtype in DTYPES, f"nothing is decoded to {out.dtype}"
    places = (out.data_ptr(), None) if out.dtype == torch.float32 else (None, out.data_ptr())
    functions().decode_blocks(*_of(kind, blocks, out.numel()), *places)


def recode(kind: str, blocks: NDArray[np.uint8], inputs: int, to: Weights) -> Codes:
    """Codes ``[rows, in]`` of ``blocks [rows, bytes]``: their own; int8 of K types, which have no single scale for 32 numbers."""
    codes = torch.empty(len(blocks), inputs, dtype=torch.int8)
    scales = torch.empty(len(blocks), inputs // FINE, dtype=torch.float16)
    functions().recode_blocks(*_of(kind, blocks, codes.numel()), codes.data_ptr(), scales.data_ptr())
    return Codes(to, codes, scales)


def _of(kind: str, blocks: NDArray[np.uint8], numbers: int) -> tuple[int, int, int]:
    """A type's number, and where how many of its blocks are."""
    size, count = SIZES[kind][1], numbers // SIZES[kind][0]
    assert blocks.flags.c_contiguous
    assert blocks.nbytes == count * size, f"{blocks.nbytes} bytes are not {count} blocks"
    return list(SIZES).index(kind), int(blocks.ctypes.data), count
