"""Quantise weights to 8-bit floating point (e4m3) with a scale per output, and multiply by them: in PyTorch here, in Triton on
a GPU."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from volley.memory import kernels

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
AT_ONCE = 2**26  # weight elements that are dequantised together


class Float8(NamedTuple):
    """A weight ``[N, K]``: codes as bytes, ``[N, K]`` int8, and fp32 scales ``[N]``."""

    codes: Tensor
    scales: Tensor


def quantise(weight: Tensor) -> Float8:
    """Quantise ``weight [N, K]`` of any float type, each output scaled so that its largest number is e4m3's largest, 448."""
    parts = []
    for part in _parts(weight):
        wide = part.detach().float()
        scales = (wide.abs().amax(dim=1) / _LARGEST).clamp_min(1e-30)
        parts.append(((wide / scales[:, None]).to(torch.float8_e4m3fn).view(torch.int8), scales))
    return Float8(*(torch.cat(kind) for kind in zip(*parts, strict=True)))


def multiply(x: Tensor, weight: Float8) -> Tensor:
    """Multiply ``x [T, K] @ weight.T`` into ``[T, N]`` in the type of ``x``, a part of the outputs at a time; this is the
    reference."""
    outputs = [linear(x, part.view(torch.float8_e4m3fn).to(x.dtype)) for part in _parts(weight.codes)]
    return (torch.cat(outputs, dim=1) * weight.scales).to(x.dtype)


def product(x: Tensor, weight: Float8) -> Tensor:
    """Multiply ``x [..., K] @ weight.T`` into ``[..., N]`` by the fastest kernel of the device."""
    rows = x.reshape(-1, x.shape[-1])
    if kernels.usable(x.device):
        from volley.memory.kernels import float8

        if len(rows) <= float8.MOST_ROWS:
            return float8.multiply(rows, *weight).view(*x.shape[:-1], -1)
    return multiply(rows, weight).view(*x.shape[:-1], -1)


def _parts(weight: Tensor) -> Iterator[Tensor]:
    yield from torch.split(weight, max(1, AT_ONCE // weight.shape[1]))
