"""Room for weights in pages of 2 MiB."""

import pytest
import torch

from volley import native
from volley.native.pages import in_large_pages

LARGE = 2 * 2**20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size", [0, 1000, LARGE - 1, LARGE, 5 * LARGE + 4098])
def test_it_is_room_as_any_other(size: int, dtype: torch.dtype) -> None:
    size = size // 2 * 2
    found = in_large_pages((size // 2, 2 // dtype.itemsize), dtype=dtype)
    assert (found.shape, found.dtype) == ((size // 2, 2 // dtype.itemsize), dtype)
    assert found.is_contiguous()
    assert found.fill_(1).eq(1).all()
    if size >= LARGE:
        assert found.data_ptr() % LARGE == 0, "pages begin where the system's do"


def test_a_large_weight_is_laid_out_as_in_ordinary_pages() -> None:
    weight = torch.randn(4096, 512).bfloat16()
    product = native.Product(weight, None, "bf16")
    assert product.nbytes == weight.nbytes
    assert torch.equal(product.rows(torch.tensor([0, 17, 4095])), weight[[0, 17, 4095]])
