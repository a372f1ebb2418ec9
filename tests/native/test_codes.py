"""Codes of weights before they are laid out; that they come back from products is tested in ``test_native.py``."""

import pytest
import torch

from tests.native.codes import made_up
from volley.native.codes import quantise_finely
from volley.native.packing import Codes, StackedCodes, stacked
from volley.weights import FORMATS, PACK, Format


def test_a_weight_is_codes_times_scales() -> None:
    codes = torch.tensor([[1, -2, 3, 4], [5, 6, -7, 8]], dtype=torch.int8)
    by_output = Codes(FORMATS["int8"], codes, torch.tensor([0.5, 2.0]))
    assert by_output.dense().tolist() == [[0.5, -1.0, 1.5, 2.0], [10.0, 12.0, -14.0, 16.0]]
    by_group = Codes(Format("pairs", 8, 2, torch.float32), codes, torch.tensor([[1.0, 0.5], [2.0, 0.25]]))
    assert by_group.dense().tolist() == [[1.0, -2.0, 1.5, 2.0], [10.0, 12.0, -1.75, 2.0]]
    assert torch.equal(by_group.rows(slice(1, 2)).dense(), by_group.dense()[1:])
    with_least = by_group._replace(least=torch.tensor([[1.0, 2.0], [3.0, -4.0]]))
    assert with_least.dense().tolist() == [[2.0, -1.0, 3.5, 4.0], [13.0, 15.0, -5.75, -2.0]]


def test_scales_of_scales() -> None:
    """Two groups of 16 of the first 256 inputs and two of the next, whose numbers are 2 and 3, 10 and 20."""
    codes, factors = torch.ones(1, 512, dtype=torch.int8), torch.arange(64, dtype=torch.int8).view(1, 32, 2)
    found = Codes(FORMATS["Q2_K"], codes, torch.tensor([[2.0, 3.0]]), torch.tensor([[10.0, 20.0]]), factors).dense()[0]
    assert found[[0, 15, 16, 240, 256, 511]].tolist() == [10.0, 10.0, 34.0, 370.0, 756.0, 1446.0]


def test_a_table_s_codes_are_its_numbers() -> None:
    codes = torch.arange(32, dtype=torch.int8).remainder(16)[None]
    table = FORMATS["MXFP4"].table
    assert Codes(FORMATS["MXFP4"], codes, torch.tensor([[0.5]])).dense()[0].tolist() == [0.5 * n for n in table * 2]


def test_codes_one_below_the_other() -> None:
    torch.manual_seed(0)
    parts = [made_up("Q4_K", rows, 256) for rows in (5, 1, 9)]
    both, whole = StackedCodes(parts, [5, 1, 9]), torch.cat([part.dense() for part in parts])
    for first in range(15):
        for last in range(first + 1, 16):
            assert torch.equal(both.rows(slice(first, last)).dense(), whole[first:last])
    with pytest.raises(AssertionError, match="several formats"):
        StackedCodes([made_up("int4", 2, 64), made_up("int8", 2, 64)], [2, 2])


def test_neighbours_of_one_format_are_joined() -> None:
    torch.manual_seed(0)
    parts = [(made_up(name, rows, 256), rows) for name, rows in (("Q5_0", 3), ("Q5_0", 2), ("Q8_0", 4), ("Q5_0", 1))]
    found = stacked(parts)
    assert [(codes.format.name, size) for codes, size in found] == [("Q5_0", 5), ("Q8_0", 4), ("Q5_0", 1)]
    dense = torch.cat([codes.rows(slice(0, size)).dense() for codes, size in found])
    assert torch.equal(dense, torch.cat([codes.dense() for codes, _ in parts]))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_fine_codes_are_near(scale: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 4 * PACK) * scale
    weight[3] = 0
    found = quantise_finely(weight)
    assert (found.format.name, found.scales.shape) == ("Q8_0", (40, 4))
    steps = found.scales.float().repeat_interleave(PACK, dim=1)
    error = (found.dense() - weight).abs()
    assert bool((error <= 0.57 * steps).all())  # half a step, and the largest weight's share of a scale rounded down
    assert not found.dense()[3].any()
