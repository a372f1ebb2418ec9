"""Make exponential noise on the device, each number from its position and token alone. The reference is ``decode.noise``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from volley.memory.kernels import launching

BLOCK = 512  # counters of one program, four tokens each


@triton.jit
def _round(first, second, third, fourth, key, other):
    """Compute one round of Philox4x64."""
    by_first = tl.full(first.shape, 0xD2E7470EE14C6C93, tl.uint64)
    by_third = tl.full(first.shape, 0xCA5A826395121157, tl.uint64)
    high, low = tl.umulhi(first, by_first), first * by_first
    high_, low_ = tl.umulhi(third, by_third), third * by_third
    return high_ ^ second ^ key, low_, high ^ fourth ^ other, low


@triton.jit
def _exponential(word):
    uniform = (word >> 1).to(tl.int64).to(tl.float32) * 1.0842021724855044e-19  # 2⁻⁶³
    uniform = tl.minimum(tl.maximum(uniform, 1.0842021724855044e-19), 0.9999999403953552)
    rest = 1.0 - uniform
    # log1p(−u) is computed from log(1 − u), whose argument is rounded; the quotient corrects that rounding.
    return tl.where(rest == 1.0, uniform, -tl.log(rest) * (uniform / (1.0 - tl.where(rest == 1.0, 0.0, rest))))


@triton.jit(do_not_specialize=["count"])
def _exponentials_kernel(places, output, count, size, PURPOSE: tl.constexpr, BLOCK: tl.constexpr):
    """Fill one row with the noise of ``BLOCK`` counters."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], tl.uint64)
    key = zeros + tl.load(places + row).to(tl.uint64)
    other = zeros + PURPOSE
    first, second = zeros + (block + 1).to(tl.uint64), zeros
    third, fourth = zeros + tl.load(places + count + row).to(tl.uint64), zeros
    for _ in tl.static_range(10):
        first, second, third, fourth = _round(first, second, third, fourth, key, other)
        key += tl.full([BLOCK], 0x9E3779B97F4A7C15, tl.uint64)
        other += tl.full([BLOCK], 0xBB67AE8584CAA73B, tl.uint64)
    token = block * 4
    start = output + row * size + token
    tl.store(start, _exponential(first), mask=token < size)
    tl.store(start + 1, _exponential(second), mask=token + 1 < size)
    tl.store(start + 2, _exponential(third), mask=token + 2 < size)
    tl.store(start + 3, _exponential(fourth), mask=token + 3 < size)


def fill_exponentials(places: Tensor, purpose: int, size: int) -> Tensor:
    """Return unit exponentials ``[R, size]`` (fp32) for ``places [2, R]`` (int64), seeds and positions."""
    count = places.shape[1]
    output = torch.empty(count, size, dtype=torch.float32, device=places.device)
    grid = (count, triton.cdiv(size, 4 * BLOCK))
    launching.launch(
        _exponentials_kernel, grid, places.device, places, output, count, size, PURPOSE=purpose, BLOCK=BLOCK
    )
    return output
