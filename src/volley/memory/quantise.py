"""Quantise K/V: encode vectors as small codes with one scale each, and decode them.

Every vector is encoded alone, so its code does not depend on the batch or the chunk it was computed in. A codec may keep
vectors in a rotated basis. Attention then rotates its few queries and outputs instead of every key and value that it reads.
"""

import functools
import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from volley.errors import ConfigError

SCALE_DTYPE = torch.bfloat16  # has the range of bf16; the rounding of a scale adds 1e-6 to the MSE of a unit variance
_GAUSSIAN_LEVELS = (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326)  # Lloyd-Max, 16 levels; Max (1960)
_CELLS, _CELLS_PER_UNIT = 1024, 128  # ±4 standard deviations
_TINY = torch.finfo(SCALE_DTYPE).tiny


class Codec(ABC):
    """Encodes vectors ``[..., head_dim]`` as ``width`` codes and one scale each; decodes to ``dtype``."""

    code_dtype: torch.dtype
    width: int
    rotation: Tensor | None = None
    """Orthogonal ``[head_dim, head_dim]`` in fp32, with ``decode(*encode(x)) ≈ x @ rotation``; ``None`` is the identity."""

    @abstractmethod
    def __init__(self, head_dim: int, dtype: torch.dtype, device: torch.device) -> None: ...

    @abstractmethod
    def encode(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes ``[..., width]`` and scales ``[..., 1]``."""

    @abstractmethod
    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return vectors ``[..., head_dim]`` in the codec's basis; ``codes`` must be contiguous."""


class Int8Codec(Codec):
    """Symmetric int8: the largest coordinate becomes ±127."""

    code_dtype = torch.int8

    def __init__(self, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.width = head_dim
        self.dtype = dtype

    def encode(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        vectors = vectors.float()
        scales = (vectors.abs().amax(dim=-1, keepdim=True) / 127).clamp_min(_TINY).to(SCALE_DTYPE)
        return (vectors / scales).round().clamp(-127, 127).to(torch.int8), scales

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.to(self.dtype) * scales.to(self.dtype)


class RotatedInt4Codec(Codec):
    """Int4: random rotation, scale, nearest of 16 levels, two coordinates a byte.

    The coordinates of a rotated vector are nearly Gaussian, whatever the vector. So one set of levels fits all: Lloyd-Max for
    the Gaussian, with an MSE of 0.0095 at unit variance. The scale begins as the norm and is then fitted to the chosen levels,
    which lowers the MSE further.
    """

    code_dtype = torch.uint8
    rotation: Tensor

    def __init__(self, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        if head_dim % 2:
            raise ConfigError(
                f"the head size {head_dim} is odd and an int4 pool packs two coordinates a byte; use int8 or auto"
            )
        self.width = head_dim // 2
        self.dtype = dtype
        self.rotation = random_rotation(head_dim).to(device)
        half = torch.tensor(_GAUSSIAN_LEVELS)
        self.levels = torch.cat((-half.flip(0), half)).to(device)
        cells = (torch.arange(_CELLS, device=device) + 0.5 - _CELLS / 2) / _CELLS_PER_UNIT
        self.nearest = torch.bucketize(cells, (self.levels[1:] + self.levels[:-1]) / 2).to(torch.uint8)
        """Level nearest to each cell of a fine grid; the lookup is ten times as fast as a search among the levels."""
        byte = torch.arange(256, device=device)
        pairs = torch.stack((self.levels[byte % 16], self.levels[byte // 16]), dim=1).to(dtype)
        self.pairs = pairs.view(torch.int64 if dtype == torch.float32 else torch.int32).flatten()
        """Both coordinates of every byte as one number, because gathering single numbers is several times faster."""

    def encode(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        rotated = vectors.float() @ self.rotation
        scales = rotated.norm(dim=-1, keepdim=True) * vectors.shape[-1] ** -0.5
        cells = (rotated * (_CELLS_PER_UNIT / scales.clamp_min(_TINY)) + _CELLS / 2).int().clamp_(0, _CELLS - 1)
        codes = self.nearest.index_select(0, cells.view(-1)).view(rotated.shape)
        levels = self.levels.index_select(0, codes.view(-1).int()).view(rotated.shape)
        scales = (rotated * levels).sum(dim=-1, keepdim=True) / levels.square().sum(dim=-1, keepdim=True)
        return codes[..., 0::2] | codes[..., 1::2] << 4, scales.to(SCALE_DTYPE)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        pairs = self.pairs.index_select(0, codes.view(-1).int())
        return pairs.view(self.dtype).view(*codes.shape[:-1], -1) * scales.to(self.dtype)


@functools.cache
def random_rotation(size: int) -> Tensor:
    """Return a fixed orthogonal ``[size, size]``: a Hadamard matrix with random signs, or a Haar-random rotation if ``size``
    is no power of two."""
    generator = torch.Generator().manual_seed(size)
    if size & (size - 1):
        q, r = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))
        haar: Tensor = q * r.diagonal().sign()
        return haar.float()
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    signs = torch.randint(2, (size, 1), generator=generator) * 2 - 1
    rotation: Tensor = signs * matrix / math.sqrt(size)
    return rotation
