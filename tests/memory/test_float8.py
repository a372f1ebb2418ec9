"""The reference of products in e4m3 against their definition."""

import pytest
import torch

from volley.memory import float8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_its_code_times_its_outputs_scale(dtype: torch.dtype) -> None:
    weight = (torch.randn(7, 40) * torch.logspace(-4, 4, 7)[:, None]).to(dtype)
    given = weight.clone()
    codes, scales = float8.quantise(weight)
    assert torch.equal(weight, given)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.int8, (7, 40), (7,))
    found = codes.view(torch.float8_e4m3fn).float() * scales[:, None]
    half_a_step = torch.maximum(2**-4 * weight.float().abs(), 2**-10 * scales[:, None])
    assert bool(((found - weight.float()).abs() <= 1.001 * half_a_step).all())
    assert torch.equal(found.abs().amax(dim=1), 448 * scales)


def test_an_output_of_zeros_stays_zero() -> None:
    weight = torch.zeros(2, 3)
    assert not float8.multiply(torch.randn(4, 3), float8.quantise(weight)).any()


def test_outputs_are_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(2, 3, 20), torch.randn(11, 20)
    whole = float8.product(x, float8.quantise(weight))
    codes, scales = float8.quantise(weight)
    torch.testing.assert_close(whole, x @ (codes.view(torch.float8_e4m3fn).float() * scales[:, None]).T)
    monkeypatch.setattr(float8, "AT_ONCE", 60)
    parts = float8.quantise(weight)
    assert all(torch.equal(one, other) for one, other in zip(parts, (codes, scales), strict=True))
    torch.testing.assert_close(float8.product(x, parts), whole)
