"""Weights in 8-bit floating point (e4m3), a scale for each output: rounded here, multiplied with here and in Triton on a GPU."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from volley.memory import kernels

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
AT_ONCE = 2**26  # numbers of a weight that are decoded together


class Float8(NamedTuple):
    """A weight ``[N, K]``: codes as bytes, ``[N, K]`` int8, and fp32 scales ``[N]``."""

    codes: Tensor
    scales: Tensor


def quantise(weight: Tensor) -> Float8:
    """``weight [N, K]`` of any float type, each output scaled so that its largest number is e4m3's largest, 448."""
    parts = []
    for part in _parts(weight):
        wide = part.detach().float()
        scales = (wide.abs().amax(dim=1) / _LARGEST).clamp_min(1e-30)
        parts.append(((wide / scales[:, None]).to(torch.float8_e4m3fn).view(torch.int8), scales))
    return Float8(*(torch.cat(kind) for kind in zip(*parts, strict=True)))


def multiply(x: Tensor, weight: Float8) -> Tensor:
    """The reference: ``x [T, K] @ weight.T`` ``[T, N]`` in the type of ``x``; decodes some outputs after others."""
    outputs = [linear(x, part.view(torch.float8_e4m3fn).to(x.dtype)) for part in _parts(weight.codes)]
    return (torch.cat(outputs, dim=1) * weight.scales).to(x.dtype)


def product(x: Tensor, weight: Float8) -> Tensor:
    """``x [..., K] @ weight.T`` ``[..., N]`` as fast as the device can."""
    rows = x.reshape(-1, x.shape[-1])
    if kernels.usable(x.device):
        from volley.memory.kernels import float8

        if len(rows) <= float8.MOST_ROWS:
            return float8.multiply(rows, *weight).view(*x.shape[:-1], -1)
    return multiply(rows, weight).view(*x.shape[:-1], -1)


def _parts(weight: Tensor) -> Iterator[Tensor]:
    yield from torch.split(weight, max(1, AT_ONCE // weight.shape[1]))
