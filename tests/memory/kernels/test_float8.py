"""The Triton product with weights in e4m3 against the reference: on a GPU compiled, elsewhere in the interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.memory.kernels import DEVICE
from volley.memory import float8, kernels
from volley.memory.float8 import Float8, quantise
from volley.memory.kernels import float8 as kernel

HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter multiplies bf16 wrongly
EXACT = HALF if DEVICE.type == "cuda" else torch.float32  # compiled, tiles in fp32 are too large for some GPUs


def made(count: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Float8]:
    """Rows, and a weight whose outputs have scales far apart."""
    weight = torch.randn(outputs, inputs) * torch.logspace(-1, 0, outputs)[:, None]
    return torch.randn(count, inputs).to(DEVICE, dtype), quantise(weight.to(DEVICE))


def assert_alike(found: Tensor, wanted: Tensor) -> None:
    tolerance = 1e-4 if wanted.dtype == torch.float32 else 2**-6
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@given(
    count=st.integers(1, 40),
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 600),
    dtype=st.sampled_from([EXACT, HALF]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40)
def test_random_shapes(count: int, outputs: int, inputs: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = made(count, outputs, inputs, dtype)
    found = kernel.multiply(x, *weight)
    assert (found.shape, found.dtype) == ((count, outputs), dtype)
    assert_alike(found, float8.multiply(x, weight))


def test_every_code_is_decoded_exactly() -> None:
    """Zeros of both signs, subnormal numbers and all others; 127 is no number."""
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 127) != 127].view(torch.int8)
    weight = Float8(every[:, None].to(DEVICE), torch.ones(len(every), device=DEVICE))
    found = kernel.multiply(torch.ones(1, 1, dtype=HALF, device=DEVICE), *weight)
    assert torch.equal(found[0].float().cpu(), every.view(torch.float8_e4m3fn).float())


def rows_differ_by_count() -> bool:
    """Whether the first rows of a pass depend on how many there are, to the bit.

    Rows keep their place in a tile: the interpreter's product on a CPU sums rows of different places differently.
    """
    torch.manual_seed(0)
    x, weight = made(kernel.MOST_ROWS, 40, 700, EXACT)
    together = kernel.multiply(x, *weight)
    counts = (1, 2, 7, 15, 16, 17, 33, 63)
    same = all(torch.equal(kernel.multiply(x[:count], *weight), together[:count]) for count in counts)
    return not (same and torch.equal(kernel.multiply(x[16:20], *weight), together[16:20]))


def test_a_row_is_the_same_to_the_bit_beside_any_others() -> None:
    assert not rows_differ_by_count()


def test_sums_that_depend_on_the_number_of_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of other sizes would not do: a GPU adds up the same numbers in the same order."""
    multiply = kernel.multiply

    def planted(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        if len(x) <= 16:
            return multiply(x, codes, scales)
        parts = zip(x.tensor_split(2, dim=1), codes.tensor_split(2, dim=1), strict=True)
        first, second = (multiply(own, part.contiguous(), scales) for own, part in parts)
        return first + second

    monkeypatch.setattr(kernel, "multiply", planted)
    assert rows_differ_by_count()


def test_scales_of_other_outputs_are_found() -> None:
    torch.manual_seed(0)
    x, weight = made(5, 40, 300, HALF)
    wrong = weight._replace(scales=weight.scales.roll(1))
    with pytest.raises(AssertionError, match="not close"):
        assert_alike(kernel.multiply(x, *wrong), float8.multiply(x, weight))


def test_rows_need_not_be_contiguous() -> None:
    x, weight = made(3, 10, 40, HALF)
    wide = torch.cat((x, x), dim=1)[:, :40]
    assert torch.equal(kernel.multiply(wide, *weight), kernel.multiply(x, *weight))


def test_many_rows_are_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "usable", lambda _: True)
    x, weight = made(kernel.MOST_ROWS + 1, 10, 40, HALF)
    assert torch.equal(float8.product(x, weight), float8.multiply(x, weight))
    monkeypatch.setattr(kernel, "MOST_ROWS", len(x))
    monkeypatch.setattr(kernel, "multiply", lambda x, *_: x.new_zeros(len(x), 10))
    assert not float8.product(x, weight).any(), "fewer are the kernel's"
