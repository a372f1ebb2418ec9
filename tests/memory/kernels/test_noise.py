"""The noise kernel against PyTorch's integers: on a GPU compiled, elsewhere in the interpreter. See ``decode/test_noise.py``."""

import pytest
import torch

pytest.importorskip("triton")

from tests.memory.kernels import DEVICE
from volley.decode.noise import from_words, philox
from volley.memory.kernels.noise import BLOCK, fill_exponentials


@pytest.mark.parametrize("size", [1, 6, 4 * BLOCK, 4 * BLOCK + 3])
@pytest.mark.parametrize("purpose", [0, 3])
def test_each_number_is_the_references(size: int, purpose: int) -> None:
    """The numbers include those of a row's last program and of the largest seed; large noise has few exact bits in fp32."""
    places = torch.tensor([[0, 2**63 - 1, 5], [0, 17, 2**33]], device=DEVICE)
    found, expected = fill_exponentials(places, purpose, size), from_words(philox(places, purpose, size))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert found.unique().numel() > 0.99 * found.numel()
