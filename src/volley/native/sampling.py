"""What sampling does to whole rows of a vocabulary."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from volley.native import functions


def exponentials(seed: int, purpose: int, position: int, size: int) -> Tensor:
    """Unit exponentials ``[size]`` (fp32): :mod:`volley.decode.noise`."""
    out = torch.empty(size)
    functions().exponentials(seed, purpose, position, out.data_ptr(), size)
    return out


def forbid(row: Tensor, allowed: NDArray[np.uint8]) -> None:
    """Replace logits in ``row [V]`` (fp32, contiguous) by −∞ where the token has no bit in ``allowed [≥ V / 8]``."""
    assert row.dtype == torch.float32, f"masks are for fp32, not {row.dtype}"
    assert 8 * allowed.nbytes >= len(row), "every token has a bit"
    functions().forbid(row.data_ptr(), allowed.ctypes.data, len(row))


def allowed_softmax(row: Tensor, allowed: NDArray[np.uint8], out: Tensor, temperature: float) -> None:
    """The softmax of ``row [V] / temperature`` over the tokens with a bit in ``allowed [≥ V / 8]``, and 0 for all others, in
    ``out [V]``; both fp32 and contiguous.
    """
    assert row.dtype == out.dtype == torch.float32, f"masks are for fp32, not {row.dtype}"
    assert 8 * allowed.nbytes >= len(row), "every token has a bit"
    functions().allowed_softmax(row.data_ptr(), allowed.ctypes.data, out.data_ptr(), len(row), 1 / temperature)
