"""The Triton kernels of a layer's rows against the reference: on a GPU compiled, elsewhere in the interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.memory import rows as reference
from tests.memory.kernels import DEVICE
from volley.memory.kernels import rows as kernels

DTYPES = [torch.float32, torch.bfloat16]


def made(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def assert_alike(found: Tensor, wanted: Tensor) -> None:
    tolerance = 1e-5 if wanted.dtype == torch.float32 else 2**-6
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "size"), [(1, 64), (5, 96), (3, 1040)])
@pytest.mark.parametrize("adds", [False, True])
def test_norms(count: int, size: int, adds: bool, dtype: torch.dtype) -> None:
    states, weight = made(count, size, dtype=dtype), made(size, dtype=dtype)
    update = made(count, 2 * size, dtype=dtype)[:, :size] if adds else None
    found, wanted = (ops.add_norm(states, update, weight, 1e-6) for ops in (kernels, reference))
    assert_alike(found[0], wanted[0])  # the interpreter cuts bf16 off instead of rounding it
    assert_alike(found[1], wanted[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "shared", "dim"), [(4, 2, 16), (5, 1, 24), (8, 8, 64)])
@pytest.mark.parametrize("normed", [False, True])
def test_turns(heads: int, shared: int, dim: int, normed: bool, dtype: torch.dtype) -> None:
    rows = made(3, heads + 2 * shared, dim, dtype=dtype)
    norms = (made(dim, dtype=dtype), made(dim, dtype=dtype)) if normed else None
    angles = torch.rand(3, dim // 2).repeat(1, 2) * 7
    turns = [function(angles).to(DEVICE, dtype) for function in (torch.cos, torch.sin)]
    found, wanted = rows.clone(), rows.clone()
    for ops, own in ((kernels, found), (reference, wanted)):
        ops: Any
        ops.norm_and_turn(own, norms, *turns, heads, 1e-6)
    assert_alike(found, wanted)
    assert not torch.equal(found, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "size"), [(1, 16), (4, 1100)])
def test_gates(count: int, size: int, dtype: torch.dtype) -> None:
    rows = made(count, 2 * size, dtype=dtype) * 4
    assert_alike(kernels.gated_silu(rows), reference.gated_silu(rows))
