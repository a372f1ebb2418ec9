"""Weights in the blocks of the products: the kernel against plain PyTorch, to the bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.native.codes import OF_CODES, made_up, rounded, rows_of
from tests.tiles import needs_kernels
from volley.native import GROUP, Codes, Weights
from volley.native.codes import lay_out
from volley.weights import FORMATS, LARGE

pytestmark = [needs_kernels, pytest.mark.usefixtures("threads")]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SEEDS = st.integers(0, 10_000)
SPECIAL = [0.0, -0.0, 1e-38, 1e-30, 3e38, -3e38, float("inf"), -float("inf"), float("nan")]


def check(weight: Tensor, kind: Weights) -> None:
    """Compare bit by bit; one NaN is as good as another."""
    found, expected = rows_of(lay_out(weight, FORMATS[kind]), FORMATS[kind], len(weight)), rounded(weight, kind)
    assert isinstance(found, Codes)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scales.isnan(), expected.scales.isnan())
    assert torch.equal(found.scales.nan_to_num(nan=0.0), expected.scales.nan_to_num(nan=0.0))


def check_codes(codes: Codes) -> None:
    found = rows_of(lay_out(codes.codes, codes.format, codes), codes.format, len(codes.codes))
    assert isinstance(found, Codes)
    for part, own in zip(found[1:], codes[1:], strict=True):
        assert (part is None) == (own is None)
        assert part is None or torch.equal(part, own)


@given(
    kind=st.sampled_from(["int8", "int4"]),
    dtype=st.sampled_from(DTYPES),
    outputs=st.integers(1, 50),
    groups=st.integers(1, 7),
    scale=st.sampled_from([1e-4, 1.0, 300.0]),
    special=st.lists(st.tuples(st.sampled_from(SPECIAL), st.integers(0, 49), st.integers(0, 447)), max_size=6),
    seed=SEEDS,
)
def test_numbers_are_rounded_as_by_the_reference(
    kind: Weights,
    dtype: torch.dtype,
    outputs: int,
    groups: int,
    scale: float,
    special: list[tuple[float, int, int]],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    weight = (torch.randn(outputs, groups * GROUP) * scale).to(dtype)
    for value, row, column in special:
        weight[row % outputs, column % weight.shape[1]] = value
    check(weight, kind)


@given(kind=st.sampled_from(["int8", "int4"]), dtype=st.sampled_from(DTYPES), span=st.integers(1, 40), seed=SEEDS)
def test_ties_fall_as_in_the_reference(kind: Weights, dtype: torch.dtype, span: int, seed: int) -> None:
    """Few numbers, so that many lie in the middle of two codes, have the largest magnitude, or do as well with two scales."""
    torch.manual_seed(seed)
    weight = (torch.randint(-span, span + 1, (20, 3 * GROUP)) / 4).to(dtype)
    check(weight, kind)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_every_number_of_bf16(kind: Weights) -> None:
    """Side by side by their size, and in an order by chance."""
    torch.manual_seed(0)
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for order in (torch.arange(2**16), torch.randperm(2**16)):
        weight = numbers[order].view(-1, 4 * GROUP)
        check(weight, kind)


@given(outputs=st.integers(1, 40), pairs=st.integers(1, 99), seed=SEEDS)
def test_bf16_is_only_moved(outputs: int, pairs: int, seed: int) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(outputs, 2 * pairs).bfloat16()
    assert torch.equal(rows_of(lay_out(weight, FORMATS["bf16"]), FORMATS["bf16"], outputs), weight)


@given(name=st.sampled_from(OF_CODES), outputs=st.integers(1, 50), parts=st.integers(1, 9), seed=SEEDS)
def test_stored_codes_are_only_moved(name: str, outputs: int, parts: int, seed: int) -> None:
    torch.manual_seed(seed)
    check_codes(made_up(name, outputs, parts * FORMATS[name].inputs))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_weight_of_many_slices(kind: Weights) -> None:
    torch.manual_seed(0)
    weight: Tensor = torch.randn(3001, 3 * GROUP).bfloat16()
    check(weight, kind)


@pytest.mark.parametrize("name", ["Q8_0", "Q5_1", "Q2_K"])
def test_codes_of_many_slices(name: str) -> None:
    torch.manual_seed(0)
    check_codes(made_up(name, 3001, LARGE))


def test_widths_that_are_no_groups_are_refused() -> None:
    with pytest.raises(AssertionError, match="whole groups"):
        lay_out(torch.randn(3, GROUP + 32), FORMATS["int4"])
