"""Codes of weights before they are laid out; that they come back from products is tested in ``test_native.py``."""

import pytest
import torch

from volley.native.codes import FINE, Codes, StackedCodes, quantise_finely, quantise_int4


def made_up(kind: str, outputs: int) -> Codes:
    codes = torch.randint(-8, 8, (outputs, 2 * FINE), dtype=torch.int8)
    return Codes("int4" if kind == "int4" else "int8", codes, torch.randn(outputs, 2).half())


def test_a_weight_is_codes_times_scales() -> None:
    codes = torch.tensor([[1, -2, 3, 4], [5, 6, -7, 8]], dtype=torch.int8)
    by_output = Codes("int8", codes, torch.tensor([0.5, 2.0]))
    assert by_output.dense().tolist() == [[0.5, -1.0, 1.5, 2.0], [10.0, 12.0, -14.0, 16.0]]
    by_group = Codes("int8", codes, torch.tensor([[1.0, 0.5], [2.0, 0.25]]))
    assert by_group.dense().tolist() == [[1.0, -2.0, 1.5, 2.0], [10.0, 12.0, -1.75, 2.0]]
    assert torch.equal(by_group.rows(slice(1, 2)).dense(), by_group.dense()[1:])


def test_codes_one_below_the_other() -> None:
    torch.manual_seed(0)
    parts = [made_up("int4", 5), made_up("int4", 1), made_up("int4", 9)]
    stacked, whole = StackedCodes(parts, [5, 1, 9]), torch.cat([part.dense() for part in parts])
    assert (stacked.kind, stacked.group) == ("int4", FINE)
    for first in range(15):
        for last in range(first + 1, 16):
            assert torch.equal(stacked.rows(slice(first, last)).dense(), whole[first:last])
    with pytest.raises(AssertionError, match="several kinds"):
        StackedCodes([made_up("int4", 2), made_up("int8", 2)], [2, 2])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_fine_codes_are_near(scale: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 4 * FINE) * scale
    weight[3] = 0
    found = quantise_finely(weight)
    assert (found.kind, found.group, found.scales.shape) == ("int8", FINE, (40, 4))
    steps = found.scales.float().repeat_interleave(FINE, dim=1)
    error = (found.dense() - weight).abs()
    assert bool((error <= 0.57 * steps).all())  # half a step, and the largest weight's share of a scale rounded down
    assert not found.dense()[3].any()


def test_a_damaged_weight_stays_damaged() -> None:
    weight = torch.randn(4, 128)
    weight[1, 70], weight[2, 3] = torch.nan, torch.inf
    codes, scales = quantise_int4(weight)
    dense = (codes.float().view(4, 2, 64) * scales[..., None]).view(4, 128)
    damaged = dense.view(4, 2, 64).isnan().all(dim=-1)
    assert damaged.tolist() == [[False, False], [False, True], [True, False], [False, False]]
    assert bool(dense[0].isfinite().all())
