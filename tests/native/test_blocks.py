"""Blocks of GGUF files in C: against what the package ``gguf`` decodes, to the bit."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tests.native.codes import rows_of
from volley import native
from volley.native import blocks
from volley.native.codes import LaidOut, lay_out, put_rows
from volley.native.packing import Codes, StackedCodes, StoredBlocks
from volley.weights import STORED

pytestmark = [
    pytest.mark.skipif(not native.is_built, reason="the library was not built"),
    pytest.mark.usefixtures("threads"),
]
TYPES = {kind: GGMLQuantizationType[kind] for kind in STORED}
SCALES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q3_K": (108,),
    "Q2_K": (80, 82),
    "MXFP4": (),
}
"""Offsets of a block's fp16 numbers; in other types they come first."""


def assert_equal(found: Tensor, expected: Tensor) -> None:
    """Bit by bit; one NaN is as good as another."""
    assert found.dtype == expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    integers = {2: torch.int16, 4: torch.int32}[found.element_size()]
    both = [torch.where(one.isnan(), 0, one).view(integers) for one in (found, expected)]
    assert torch.equal(*both)


def decoded(kind: str, data: NDArray[np.uint8]) -> Tensor:
    """By the package."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(dequantize(data, TYPES[kind]).copy())


def check(kind: str, data: NDArray[np.uint8]) -> None:
    expected = decoded(kind, data)
    for dtype in blocks.DTYPES:
        assert_equal(blocks.decode(kind, data, dtype), expected.to(dtype))
    of, rows = STORED[kind], len(data)
    laid = LaidOut.unset(of, rows, expected.shape[1])
    put_rows(StoredBlocks(of, data), of, laid)
    codes = rows_of(laid, of, rows)
    assert isinstance(codes, Codes)
    assert_equal(codes.dense(), expected)


@given(kind=st.sampled_from(list(TYPES)), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_stacked_blocks_are_read_in_order(kind: str, sizes: list[int]) -> None:
    of = STORED[kind]
    parts = [
        StoredBlocks(of, np.full((size, blocks.BYTES[kind]), number, np.uint8)) for number, size in enumerate(sizes)
    ]

    class Source:
        in_blocks = True

        def __init__(self, stored: StoredBlocks) -> None:
            self.format, self._stored, self.held = of, stored, list[slice]()

        def rows(self, rows: slice) -> StoredBlocks:
            self.held.append(rows)
            return StoredBlocks(of, self._stored.blocks[rows])

        def forget(self, rows: slice) -> None:
            self.held.remove(rows)

    sources = [Source(part) for part in parts]
    stacked = StackedCodes(sources, sizes)
    shape = torch.empty(sum(sizes), of.scaled_inputs, device="meta")
    found = lay_out(shape, of, stacked)
    expected = lay_out(shape, of, Source(StoredBlocks(of, np.concatenate([part.blocks for part in parts]))))
    assert torch.equal(found.codes, expected.codes)
    assert not any(source.held for source in sources)


def test_sizes_are_the_format_s() -> None:
    assert {kind: GGML_QUANT_SIZES[number] for kind, number in TYPES.items()} == {
        kind: (of.scaled_inputs, blocks.BYTES[kind]) for kind, of in STORED.items()
    }


@given(kind=st.sampled_from(list(TYPES)), rows=st.integers(1, 40), count=st.integers(1, 9), seed=st.integers(0, 10_000))
def test_any_bytes(kind: str, rows: int, count: int, seed: int) -> None:
    """Scales are of any size, without a number or infinite too."""
    check(kind, np.random.default_rng(seed).integers(0, 256, (rows, count * blocks.BYTES[kind]), dtype=np.uint8))


@given(
    kind=st.sampled_from(list(TYPES)),
    exponent=st.integers(-24, 14),
    rows=st.integers(1, 20),
    seed=st.integers(0, 10_000),
)
def test_usual_scales(kind: str, exponent: int, rows: int, seed: int) -> None:
    """Scales of a matrix are of one size, if they are not zero, and fp16 numbers with few bits."""
    generator = np.random.default_rng(seed)
    size = blocks.BYTES[kind]
    data = generator.integers(0, 256, (rows, 4, size), dtype=np.uint8)
    for place in SCALES.get(kind, (0,)):
        scales = generator.standard_normal((rows, 4)) * 2.0**exponent * generator.integers(0, 2, (rows, 4))
        data[..., place : place + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    check(kind, data.reshape(rows, -1))


def test_every_scale() -> None:
    """All numbers of fp16."""
    data = np.zeros((2**16, 34), np.uint8)
    data[:, :2] = np.arange(2**16, dtype=np.uint16)[:, None].view(np.uint8)
    data[:, 2:] = np.arange(-16, 16, dtype=np.int8).view(np.uint8)
    check("Q8_0", data)


def test_blocks_that_are_not_all_there_are_refused() -> None:
    with pytest.raises(AssertionError, match="33 bytes are no blocks of 34"):
        blocks.decode("Q8_0", np.zeros((1, 33), np.uint8), torch.float32)
