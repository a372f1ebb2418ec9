"""Codes of quantised weights, and their packed layout in ``products.c``."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from volley.weights import BLOCK, FLOATS, GROUP, LARGE, Format


class Codes(NamedTuple):
    """Quantised weight: ``codes [out, in]`` (int8) with 0 for the number zero, their scales and minima.

    Small floats are bytes: FP8 with scales ``[out, in / 64]``; pairs of NVFP4 ``[out, in / 2]``, whose scales are ``factors``
    ``[out, in / 16]`` (e4m3) divided by ``scales [out]``.
    """

    format: Format
    codes: Tensor
    scales: Tensor
    """Scales: ``[out]`` for int8, else ``[out, in / group]``, or ``[out, in / 256]`` with factors."""
    least: Tensor | None = None
    """Minima of groups, in the shape of ``scales``."""
    factors: Tensor | None = None
    """Integer factors ``[out, in / group, 1 or 2]`` (int8) of scales and minima."""

    @property
    def in_blocks(self) -> bool:
        """Return False, because codes and scales are split."""
        return False

    def rows(self, rows: slice) -> "Codes":
        """Return the codes of some outputs."""
        return Codes(self.format, *(None if part is None else part[rows] for part in self[1:]))  # type: ignore[arg-type]

    def forget(self, rows: slice) -> None:
        """Do nothing, because the codes are in memory whole."""

    def dense(self) -> Tensor:
        """Decode the weight ``[out, in]`` to fp32."""
        if self.format.name == "FP8":
            return self.codes.view(torch.float8_e4m3fn).float() * self.scales.repeat_interleave(GROUP, dim=1)
        if self.format.name == "NVFP4":
            assert self.factors is not None
            pairs = torch.stack([self.codes & 15, self.codes >> 4], dim=-1).flatten(1).long()
            scales = self.factors.view(torch.float8_e4m3fn).float() / self.scales[:, None]
            return torch.tensor(FLOATS)[pairs] * scales.repeat_interleave(16, dim=1)
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
        factors = self.factors[..., place : place + 1]
        return wide.repeat_interleave(LARGE // self._group, dim=1) * factors * self.format.unit


class StoredBlocks(NamedTuple):
    """Quantised weight in the blocks of a GGUF file."""

    format: Format
    blocks: NDArray[np.uint8]
    """Bytes ``[out, n]``."""


class CodeSource(Protocol):
    """Codes of a weight that are read some rows at a time, such as :class:`Codes`."""

    @property
    def format(self) -> Format: ...

    @property
    def in_blocks(self) -> bool:
        """Return whether rows are :class:`StoredBlocks`."""

    def rows(self, rows: slice, /) -> Codes | StoredBlocks:
        """Return the codes of some outputs."""

    def forget(self, rows: slice, /) -> None:
        """Give back the memory of outputs that were read."""


class StackedCodes:
    """Stacked codes of one format, all of them in blocks or none."""

    def __init__(self, parts: Sequence[CodeSource], sizes: Sequence[int]) -> None:
        """Stack ``parts`` with ``sizes`` outputs each."""
        self.format, self.in_blocks = parts[0].format, parts[0].in_blocks
        assert all(_alike(part, parts[0]) for part in parts), "codes of several formats"
        self._parts = tuple(zip(parts, sizes, strict=True))
        self._begins = [*accumulate(sizes, initial=0)]

    def rows(self, rows: slice) -> Codes | StoredBlocks:
        found = [part.rows(own) for part, own in self._in(rows)]
        if len(found) == 1:
            return found[0]
        if self.in_blocks:
            return StoredBlocks(self.format, np.concatenate([one[1] for one in found]))
        columns = zip(*(one[1:] for one in found), strict=True)
        joined = [None if parts[0] is None else torch.cat(parts) for parts in columns]
        return Codes(self.format, *joined)  # type: ignore[arg-type]

    def forget(self, rows: slice) -> None:
        for part, own in self._in(rows):
            part.forget(own)

    def _in(self, rows: slice) -> Iterator[tuple[CodeSource, slice]]:
        """Yield each part with some of the outputs, and which of its own these are."""
        first = bisect_right(self._begins, rows.start) - 1
        for (part, size), begin in zip(self._parts[first:], self._begins[first:], strict=False):
            own = slice(max(rows.start - begin, 0), min(rows.stop - begin, size))
            if own.start >= own.stop:
                break
            yield part, own


def _alike(one: CodeSource, other: CodeSource) -> bool:
    return one.format == other.format and one.in_blocks == other.in_blocks


def stacked(codes: Iterable[tuple[CodeSource, int]]) -> list[tuple[CodeSource, int]]:
    """Stack codes of layers, given with the outputs of each; neighbours of one format are joined if they are stored alike."""
    runs: list[list[tuple[CodeSource, int]]] = []
    for one, size in codes:
        if runs and _alike(runs[-1][0][0], one):
            runs[-1].append((one, size))
        else:
            runs.append([(one, size)])
    return [
        (run[0][0] if len(run) == 1 else StackedCodes(*zip(*run, strict=True)), sum(size for _, size in run))
        for run in runs
    ]


# -- packed layout --------------------------------------------------------------------------------------------------------


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
    direct = each * BLOCK * of.scale_size
    numbers = scales[..., :direct].contiguous().view(getattr(torch, of.scale)).view(*scales.shape[:2], each, BLOCK)
    factors = scales[..., direct:].contiguous().view(torch.int8) if of.has_factors else None
    return (
        numbers[:, :, 0],
        numbers[:, :, 1] if of.has_least else None,
        None if factors is None else factors.view(len(scales), -1, each, BLOCK),
    )
