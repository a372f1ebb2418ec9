"""Multiply few rows by e4m3 weights, which are converted to the rows' type for the tensor cores.

The reference is ``memory.float8.multiply``. One program computes some outputs of some rows, over all inputs in order, in tiles
of one shape. A row's result is therefore bit-equal, alone or with up to :data:`MOST_ROWS` rows in all.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from volley.memory.kernels import launching

MOST_ROWS = 64
"""Most rows of the kernel; with more, ``memory.float8.product`` uses the reference. Each tile of rows reads the codes again,
mostly from the cache: four tiles read 4 bytes a weight. Dequantising once for PyTorch's matmul moves 5 bytes a weight, however
many rows there are."""
ROWS, OUTPUTS, INPUTS = 16, 32, 256
"""Tile of a program. With 4,096 outputs there are 128 programs, about as many as a large GPU has processors."""
OPTIONS = {"num_warps": 4, "num_stages": 4}
_FIELDS = tl.constexpr(-0x78100000)  # 0x87F00000: the bits of fp32 that a code fills, its sign and seven below bit 27
_BIAS = tl.constexpr(2.0**120)  # between the exponents of fp32, biased by 127, and of e4m3, by 7


@triton.jit(do_not_specialize=["num_rows"])
def _float8_kernel(
    x,
    codes,
    scales,
    output,
    num_rows,
    num_outputs,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Multiply one tile. Programs of the same outputs are neighbours, so that the cache holds their codes."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    own = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_own = row < num_rows, own < num_outputs
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, SIZE, INPUTS):
        column = start + tl.arange(0, INPUTS)
        inside = column < SIZE
        rows = tl.load(x + row[:, None] * SIZE + column[None, :], mask=is_row[:, None] & inside[None, :], other=0.0)
        code = tl.load(codes + own[:, None] * SIZE + column[None, :], mask=is_own[:, None] & inside[None, :], other=0)
        # sm_80 cannot convert e4m3. Sign extension lets one shift move all bits of a code into place.
        weight = ((code.to(tl.int32) << 20) & _FIELDS).to(tl.float32, bitcast=True) * _BIAS
        total = tl.dot(rows, tl.trans(weight.to(rows.dtype)), total, input_precision="ieee")
    total *= tl.load(scales + own, mask=is_own, other=0.0)[None, :]
    place = output + row[:, None] * num_outputs + own[None, :]
    tl.store(place, total.to(output.dtype.element_ty), mask=is_row[:, None] & is_own[None, :])


def multiply(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Multiply ``x [T, K]`` by a weight's codes ``[N, K]`` and scales ``[N]``: ``[T, N]`` in the type of ``x``, bf16 outside
    of tests."""
    (count, size), outputs = x.shape, len(scales)
    output = torch.empty(count, outputs, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(count, ROWS), triton.cdiv(outputs, OUTPUTS))
    tile = {"SIZE": size, "ROWS": ROWS, "OUTPUTS": OUTPUTS, "INPUTS": INPUTS}
    tensors = (x.contiguous(), codes, scales, output)
    launching.launch(_float8_kernel, grid, x.device, *tensors, count, outputs, **tile, **OPTIONS)
    return output
