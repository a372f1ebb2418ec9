"""GGUF's types that pack numbers together, split into codes: against what the package ``gguf`` decodes, to the bit."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from volley.errors import CheckpointError
from volley.native import grids
from volley.weights import BY_GRID, LARGE

TYPES = {kind: GGMLQuantizationType[kind] for kind in BY_GRID}


def random_blocks(kind: str, rows: int, count: int, generator: np.random.Generator) -> NDArray[np.uint8]:
    """Any bytes, but no fourth digit of TQ2_0."""
    found = generator.integers(0, 256, (rows, count * grids.BYTES[kind]), dtype=np.uint8)
    if kind == "TQ2_0":
        digits = found.reshape(rows, count, -1)[..., :64]
        digits &= ~(digits >> 1 & digits & 0x55)
    return found


def test_sizes_are_the_package_s() -> None:
    assert {kind: GGML_QUANT_SIZES[number] for kind, number in TYPES.items()} == {
        kind: (LARGE, grids.BYTES[kind]) for kind in BY_GRID
    }


@given(kind=st.sampled_from(list(TYPES)), rows=st.integers(1, 9), count=st.integers(1, 4), seed=st.integers(0, 10_000))
def test_numbers_are_the_package_s(kind: str, rows: int, count: int, seed: int) -> None:
    """Any bytes: scales may be of any size, without a number or infinite."""
    data = random_blocks(kind, rows, count, np.random.default_rng(seed))
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(dequantize(data, TYPES[kind]).copy())
    codes = grids.take(kind, data)
    found = codes.dense()
    assert codes.format == BY_GRID[kind]
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_a_fourth_digit_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"TQ2_0 have a fourth digit, .*; fetch or convert the file again"):
        grids.take("TQ2_0", np.full((1, 66), 255, np.uint8))
