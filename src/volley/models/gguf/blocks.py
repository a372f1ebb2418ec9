"""GGUF's blocks taken apart into integer codes, scales and offsets, without rounding.

Only types with even steps can be: their value is ``code · scale + offset``. Others, such as IQ4_XS, look values up in tables.
A block holds 32 columns of a row, or 256 for the K types, whose scales are themselves quantised in groups of 16 or 32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
Unpacked = tuple[NDArray[Any], NDArray[np.float32], NDArray[np.float32] | None]
"""Codes ``[n, columns]``, scales and offsets ``[n, groups]`` of n blocks."""


@dataclass(frozen=True)
class QuantisedWeight:
    """A matrix as it is stored: ``codes · scales + offsets``, each scale and offset for ``group_size`` columns of a row.

    ``dense`` gives the very numbers that the ``gguf`` package decodes.
    """

    type: str
    """GGUF's name of the type, such as ``Q4_K``."""
    codes: Tensor
    """Signed integers ``[N, K]``, int8."""
    scales: Tensor
    """``[N, K / group_size]``, fp32."""
    offsets: Tensor | None
    """``[N, K / group_size]``, fp32; ``None`` where they are all zero."""

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def dense(self) -> Tensor:
        """The matrix ``[N, K]`` in fp32."""
        grouped = self.codes.view(*self.scales.shape, self.group_size) * self.scales[..., None]
        if self.offsets is not None:
            grouped += self.offsets[..., None]
        return grouped.view(self.codes.shape)


def unpack(kind: str, data: NDArray[Any]) -> QuantisedWeight | None:
    """``data [N, bytes of a row]`` of type ``kind``; ``None`` if that type is not in :data:`UNPACK`."""
    if kind not in UNPACK or data.ndim != 2:
        return None
    size, function = UNPACK[kind]
    codes, scales, offsets = function(np.ascontiguousarray(data).view(np.uint8).reshape(-1, size))
    rows = data.shape[0]
    return QuantisedWeight(
        kind,
        torch.from_numpy(codes.astype(np.int8).reshape(rows, -1)),
        torch.from_numpy(scales.reshape(rows, -1)),
        None if offsets is None else torch.from_numpy(offsets.reshape(rows, -1)),
    )


def _half(blocks: Bytes) -> NDArray[np.float32]:
    """Two bytes a block as an fp16 number, in fp32 ``[n, 1]``."""
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _nibbles(blocks: Bytes) -> Bytes:
    """The low halves of all bytes ``[n, b]``, then the high ones: ``[n, 2b]``."""
    return np.concatenate([blocks & 15, blocks >> 4], axis=1)


def _fifth_bits(blocks: Bytes) -> Bytes:
    """Bit i of each block's four bytes is column i's fifth bit: ``[n, 32]`` of 0 and 16."""
    return np.unpackbits(blocks, axis=1, bitorder="little") * np.uint8(16)


def _q8_0(blocks: Bytes) -> Unpacked:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _half(blocks[:, :2]), None


def _q4_0(blocks: Bytes) -> Unpacked:
    return _nibbles(blocks[:, 2:]).astype(np.int8) - 8, _half(blocks[:, :2]), None


def _q4_1(blocks: Bytes) -> Unpacked:
    return _nibbles(blocks[:, 4:]), _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q5_0(blocks: Bytes) -> Unpacked:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return codes.astype(np.int8) - 16, _half(blocks[:, :2]), None


def _q5_1(blocks: Bytes) -> Unpacked:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return codes, _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _k_scales(blocks: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and offsets ``[n, 8]`` of Q4_K and Q5_K: two fp16 numbers, then 12 bytes of six-bit scales and minimums."""
    scale, minimum, packed = _half(blocks[:, :2]), _half(blocks[:, 2:4]), blocks[:, 4:16]
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minimums = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=1)
    return scale * scales.astype(np.float32), -(minimum * minimums.astype(np.float32))


def _k_nibbles(blocks: Bytes) -> Bytes:
    """Each 32 bytes hold 32 columns in their low halves and the next 32 in their high ones: ``[n, 256]``."""
    quarters = blocks.reshape(-1, 4, 1, 32)
    return np.concatenate([quarters & 15, quarters >> 4], axis=2).reshape(-1, 256)


def _q4_k(blocks: Bytes) -> Unpacked:
    return _k_nibbles(blocks[:, 16:]), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> Unpacked:
    bits = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return _k_nibbles(blocks[:, 48:]) | (bits << 4).reshape(-1, 256), *_k_scales(blocks)


def _q6_k(blocks: Bytes) -> Unpacked:
    """Halves of 128 columns: 64 bytes of low nibbles, and 32 bytes with the two high bits of four columns each."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    codes = (low | (high << 4)).reshape(-1, 256).astype(np.int8) - 32
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return codes, _half(blocks[:, 208:]) * scales, None


UNPACK: Mapping[str, tuple[int, Callable[[Bytes], Unpacked]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
"""Bytes of a block, and what takes it apart."""
