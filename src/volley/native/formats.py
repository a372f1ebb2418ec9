"""Weight formats of ``products.c``: bf16 numbers, volley's own quantised formats, and those of GGUF files."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Weights = Literal["bf16", "int8", "int4"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)
BLOCK, GROUP, PACK, LARGE = 16, 64, 32, 256
"""Numbers of outputs in a block, of inputs that share a scale in int8 and int4, of inputs whose codes are packed together, and of
inputs that share the scale of their groups' scales."""


@dataclass(frozen=True)
class Format:
    """Weight format: ``code · scale``, or ``code · scale + least``, for every group of inputs."""

    name: str
    """Name of the format, one of :data:`WEIGHTS` or of GGUF's types."""
    bits: int
    group: int
    """Number of inputs that share a scale."""
    scale: torch.dtype = torch.float16
    zero: int = 0
    """Stored code of the number zero."""
    has_least: bool = False
    has_factors: bool = False
    """True if scales and minima are a number for 256 inputs times an integer for each group."""
    table: tuple[int, ...] = ()
    """Numbers that the codes index; empty: codes are numbers themselves."""

    @property
    def weights(self) -> Weights:
        """Return the user's name of the format's class: bf16, int8 or int4."""
        if self.name == "bf16":
            return "bf16"
        return "int8" if self.bits > 4 else "int4"

    @property
    def by_output(self) -> bool:
        """Return whether all inputs of an output share one scale."""
        return self.name == "int8"

    @property
    def inputs(self) -> int:
        """Return the number of which a layer's inputs must be a multiple."""
        return LARGE if self.has_factors else max(self.group, PACK)

    @property
    def scaled_inputs(self) -> int:
        """Return the number of inputs whose scales are stored together."""
        return LARGE if self.has_factors else self.group

    @property
    def scale_bytes(self) -> int:
        """Return the bytes of the scales that are stored together, for 16 outputs."""
        factors = LARGE // self.group if self.has_factors else 0
        return (self.scale.itemsize + factors) * (1 + self.has_least) * BLOCK


_DOUBLED_FLOATS = (0, 1, 2, 3, 4, 6, 8, 12)
_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_ALL = (
    Format("bf16", 16, GROUP, torch.bfloat16),
    Format("int8", 8, GROUP, torch.float32, 128),
    Format("int4", 4, GROUP, torch.float32, 8),
    Format("Q8_0", 8, 32, zero=128),
    Format("Q5_0", 5, 32, zero=16),
    Format("Q4_0", 4, 32, zero=8),
    Format("Q5_1", 5, 32, has_least=True),
    Format("Q4_1", 4, 32, has_least=True),
    Format("Q6_K", 6, 16, zero=32, has_factors=True),
    Format("Q5_K", 5, 32, has_least=True, has_factors=True),
    Format("Q4_K", 4, 32, has_least=True, has_factors=True),
    Format("Q3_K", 3, 16, zero=4, has_factors=True),
    Format("Q2_K", 2, 16, has_least=True, has_factors=True),
    Format("IQ4_NL", 4, 32, table=_NONLINEAR),
    Format("IQ4_XS", 4, 32, table=_NONLINEAR, has_factors=True),
    Format("MXFP4", 4, 32, torch.bfloat16, table=(*_DOUBLED_FLOATS, *(-number for number in _DOUBLED_FLOATS))),
)
FORMATS = {own.name: own for own in _ALL}
"""Formats by name, in the order of their numbers in the library."""
NUMBERS = {name: number for number, name in enumerate(FORMATS)}
STORED = {name: own for name, own in FORMATS.items() if name not in WEIGHTS}
"""Formats of GGUF files."""


class Codes(NamedTuple):
    """Quantised weight: ``codes [out, in]`` (int8) with 0 for the number zero, their scales and minima."""

    format: Format
    codes: Tensor
    scales: Tensor
    """Scales: ``[out]`` for int8, else ``[out, in / group]``, or ``[out, in / 256]`` with factors."""
    least: Tensor | None = None
    """Minima of groups, in the shape of ``scales``."""
    factors: Tensor | None = None
    """Integer factors ``[out, in / group, 1 or 2]`` (int8) of scales and minima."""

    def rows(self, rows: slice) -> "Codes":
        """Return the codes of some outputs."""
        return Codes(self.format, *(None if part is None else part[rows] for part in self[1:]))  # type: ignore[arg-type]

    def dense(self) -> Tensor:
        """Decode the weight ``[out, in]`` to fp32."""
        codes = self.codes.float()
        if self.format.table:
            codes = torch.tensor(self.format.table, dtype=torch.float32)[self.codes.long()]
        groups = codes.view(len(codes), 1 if self.scales.dim() == 1 else -1, self._group)
        values = groups * self._of_groups(self.scales, 0)
        if self.least is not None:
            values += self._of_groups(self.least, 1)
        return values.flatten(1)

    @property
    def _group(self) -> int:
        return self.codes.shape[1] if self.scales.dim() == 1 else self.format.group

    def _of_groups(self, numbers: Tensor, place: int) -> Tensor:
        """Return the scales or minima of all groups, ``[out, groups, 1]``."""
        wide = numbers.float().view(len(numbers), -1, 1)
        if self.factors is None:
            return wide
        return wide.repeat_interleave(LARGE // self._group, dim=1) * self.factors[..., place : place + 1]


class StoredBlocks(NamedTuple):
    """Quantised weight in the blocks of a GGUF file."""

    format: Format
    blocks: NDArray[np.uint8]
    """Bytes ``[out, n]``."""


class CodeSource(Protocol):
    """Codes of a weight that are read some rows at a time, such as :class:`Codes`."""

    @property
    def format(self) -> Format: ...

    def rows(self, rows: slice, /) -> Codes | StoredBlocks: ...


class StackedCodes:
    """Stacked codes of one format."""

    def __init__(self, parts: Sequence[CodeSource], sizes: Sequence[int]) -> None:
        """Stack ``parts`` with ``sizes`` outputs each."""
        self.format = parts[0].format
        assert all(part.format == self.format for part in parts), "codes of several formats"
        self._parts = tuple(zip(parts, sizes, strict=True))

    def rows(self, rows: slice) -> Codes | StoredBlocks:
        begin, found = 0, list[Codes | StoredBlocks]()
        for part, size in self._parts:
            own = slice(max(rows.start - begin, 0), min(rows.stop - begin, size))
            if own.start < own.stop:
                found.append(part.rows(own))
            begin += size
        if isinstance(found[0], StoredBlocks):
            return StoredBlocks(self.format, np.concatenate([one[1] for one in found]))
        columns = zip(*(one[1:] for one in found), strict=True)
        joined = [None if parts[0] is None else torch.cat(parts) for parts in columns]
        return Codes(self.format, *joined)  # type: ignore[arg-type]


def stacked(codes: Iterable[tuple[CodeSource, int]]) -> list[tuple[CodeSource, int]]:
    """Stack codes of layers, given with the outputs of each; neighbours of one format are joined."""
    runs: list[list[tuple[CodeSource, int]]] = []
    for one, size in codes:
        if runs and runs[-1][0][0].format == one.format:
            runs[-1].append((one, size))
        else:
            runs.append([(one, size)])
    return [
        (run[0][0] if len(run) == 1 else StackedCodes(*zip(*run, strict=True)), sum(size for _, size in run))
        for run in runs
    ]


# -- packed layout --------------------------------------------------------------------------------------------------------


def packed(codes: Tensor, of: Format) -> Tensor:
    """Pack codes ``[out, in]``, a multiple of 16 outputs, to bytes ``[out / 16, in / 32, bits, 16, 4]`` (``put_pack`` in C)."""
    zero = 0 if of.table else of.zero
    quads = (codes.to(torch.int16) + zero).to(torch.uint8).view(len(codes), -1, 8, 4)
    lines = [_lines(quads >> first & 2**size - 1, size) for size, first in _halves(of.bits)]
    return _side_by_side(torch.cat(lines, dim=2))


def unpacked(lines: Tensor, of: Format) -> Tensor:
    """Unpack lines ``[..., in / 32, bits, 4]`` to codes ``[..., in]``."""
    quads, begin = torch.zeros(*lines.shape[:-2], 8, 4, dtype=torch.int16), 0
    for size, first in _halves(of.bits):
        together = 8 // size
        for quad in range(8):
            line = lines[..., begin + quad // together, :].to(torch.int16)
            quads[..., quad, :] += (line >> quad % together * size & 2**size - 1) << first
        begin += size
    return (quads - (0 if of.table else of.zero)).to(torch.int8).flatten(-3)


def _halves(bits: int) -> list[tuple[int, int]]:
    """Split a code into its lowest four or two bits and those above; return number of bits and first bit of each part."""
    low = 8 if bits == 8 else 4 if bits >= 4 else 2
    return [(low, 0)] + [(bits - low, low)] * (bits > low)


def _lines(quads: Tensor, size: int) -> Tensor:
    """Join parts of ``size`` bits of neighbouring quads ``[out, packs, 8, 4]`` into bytes ``[out, packs, size, 4]``."""
    together = quads.view(*quads.shape[:2], size, 8 // size, 4).long() << torch.arange(0, 8, size)[:, None]
    return together.sum(dim=3).to(torch.uint8)


def _side_by_side(rows: Tensor) -> Tensor:
    """Reshape ``[out, n, m, …]`` to ``[out / 16, n, m, 16, …]``."""
    return rows.reshape(-1, BLOCK, *rows.shape[1:]).movedim(1, 3).contiguous()


def packed_scales(codes: Codes) -> Tensor:
    """Pack the scales of a multiple of 16 outputs: fp32 ``[out]``, or bytes ``[out / 16, in / scaled_inputs, scale_bytes]``."""
    of = codes.format
    if of.by_output:
        return codes.scales
    numbers = [codes.scales] if codes.least is None else [codes.scales, codes.least]
    parts = [_bytes(torch.stack(numbers, dim=-1))]
    if codes.factors is not None:
        parts.append(_bytes(codes.factors.reshape(len(codes.factors), -1, LARGE // of.group * len(numbers))))
    return torch.cat(parts, dim=-1)


def _bytes(rows: Tensor) -> Tensor:
    """Convert numbers ``[out, n, m]`` to bytes ``[out / 16, n, bytes]``."""
    return _side_by_side(rows).flatten(2).view(torch.uint8)


def unpacked_scales(scales: Tensor, of: Format) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Unpack ``scales [n, parts, bytes]`` of blocks to scales, minima and factors ``[n, …, 16]``, the 16 outputs last."""
    each = 1 + of.has_least
    direct = each * BLOCK * of.scale.itemsize
    numbers = scales[..., :direct].contiguous().view(of.scale).view(*scales.shape[:2], each, BLOCK)
    factors = scales[..., direct:].contiguous().view(torch.int8) if of.has_factors else None
    return (
        numbers[:, :, 0],
        numbers[:, :, 1] if of.has_least else None,
        None if factors is None else factors.view(len(scales), -1, each, BLOCK),
    )
