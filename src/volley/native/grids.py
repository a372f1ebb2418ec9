"""Codes of GGUF's types of three bits and less, which pack several numbers together as an index into a grid.

The grids are those of the package ``gguf``. Codes are bytes in words of eight, looked up and given their signs at once.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from volley.errors import CheckpointError
from volley.native.packing import Codes
from volley.weights import BY_GRID, LARGE

Bytes = NDArray[np.uint8]
Split = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
"""Codes ``[n, 256]`` as bytes, or as words; fp16 scales as bytes ``[n, 2]``; scales of groups ``[n, groups]``."""


def take(kind: str, blocks: Bytes) -> Codes:
    """Split ``blocks [rows, bytes]`` into codes ``[rows, in]`` and their scales, to the numbers that the package decodes."""
    of, rows = BY_GRID[kind], len(blocks)
    codes, halves, factors = _SPLITS[kind](blocks.reshape(-1, BYTES[kind]))
    inputs, groups = len(halves) // rows * LARGE, LARGE // of.group
    spread = np.repeat(factors, groups // factors.shape[1], axis=1).astype(np.int8)
    return Codes(
        of,
        torch.from_numpy(np.ascontiguousarray(codes).view(np.int8).reshape(rows, inputs)),
        torch.from_numpy(np.ascontiguousarray(halves).view(np.float16).reshape(rows, inputs // LARGE)),
        None,
        torch.from_numpy(spread.reshape(rows, inputs // of.group, 1)),
    )


BYTES = {
    "IQ1_S": 50,
    "IQ1_M": 56,
    "IQ2_XXS": 66,
    "IQ2_XS": 74,
    "IQ2_S": 82,
    "IQ3_XXS": 98,
    "IQ3_S": 110,
    "TQ1_0": 54,
    "TQ2_0": 66,
}
"""Bytes of a block of 256 numbers."""


@cache
def _grid(kind: str) -> NDArray[Any]:
    """Return the codes of a grid's entries, as words of eight or four bytes."""
    from gguf import quants

    own: Any = getattr(quants, kind)
    own.init_grid()
    entries, table = own.grid.reshape(-1, own.grid.shape[-1]), BY_GRID[kind].table
    sizes = (-1, 0, 1) if kind.startswith("IQ1") else [size for size in table if size > 0]
    codes = np.searchsorted(sizes, entries).astype(np.uint8)
    words: NDArray[Any] = codes.view(np.uint64 if codes.shape[1] == 8 else np.uint32)[:, 0]
    return words


@cache
def _signs(bit: int) -> NDArray[np.uint64]:
    """Return for each byte of eight signs the word with these in bit ``bit`` of its bytes."""
    bits = np.arange(256, dtype=np.uint8)[:, None] >> np.arange(8, dtype=np.uint8) & 1
    words: NDArray[np.uint64] = (bits << bit).view(np.uint64)[:, 0]
    return words


@cache
def _even_signs(bit: int) -> NDArray[np.uint64]:
    """Return such words for seven signs, of which an even number of eight are set."""
    from gguf.quants import IQ2_XXS

    return _signs(bit)[np.frombuffer(IQ2_XXS.ksigns, np.uint8)]


def _shifted(numbers: NDArray[Any], *shifts: int) -> NDArray[Any]:
    """Return numbers ``[n, m]`` shifted to the right, ``[n, m · shifts]``."""
    found: NDArray[Any] = numbers[..., None] >> np.array(shifts, numbers.dtype)
    return found.reshape(len(numbers), -1)


def _odd(scales: NDArray[Any]) -> NDArray[Any]:
    return 2 * scales.astype(np.uint8) + 1


def _parts(blocks: Bytes, *sizes: int) -> list[Bytes]:
    return np.split(blocks, np.cumsum(sizes), axis=1)


def _words(part: Bytes, of: Any) -> NDArray[Any]:
    return np.ascontiguousarray(part).view(of)


def _iq2_xxs(blocks: Bytes) -> Split:
    halves, rest = _parts(blocks, 2)
    pairs = _words(rest, np.uint32).reshape(len(blocks), -1, 2)
    places, signs = np.ascontiguousarray(pairs[..., 0]).view(np.uint8), pairs[..., 1]
    codes = _grid("IQ2_XXS")[places] | _even_signs(2)[_shifted(signs, 0, 7, 14, 21) & 127]
    return codes, halves, _odd(signs >> 28)


def _iq2_xs(blocks: Bytes) -> Split:
    halves, rest, scales = _parts(blocks, 2, 64)
    places = _words(rest, np.uint16)
    return _grid("IQ2_XS")[places & 511] | _even_signs(2)[places >> 9], halves, _odd(_shifted(scales, 0, 4) & 15)


def _iq2_s(blocks: Bytes) -> Split:
    halves, low, signs, high, scales = _parts(blocks, 2, 32, 32, 8)
    places = low | (_shifted(high, 0, 2, 4, 6) & 3).astype(np.uint16) << 8
    return _grid("IQ2_S")[places] | _signs(2)[signs], halves, _odd(_shifted(scales, 0, 4) & 15)


def _iq3_xxs(blocks: Bytes) -> Split:
    halves, places, rest = _parts(blocks, 2, 64)
    signs = _words(rest, np.uint32)
    codes = _grid("IQ3_XXS")[places].view(np.uint64) | _even_signs(3)[_shifted(signs, 0, 7, 14, 21) & 127]
    return codes, halves, _odd(signs >> 28)


def _iq3_s(blocks: Bytes) -> Split:
    halves, low, high, signs, scales = _parts(blocks, 2, 64, 8, 32)
    places = low | (_shifted(high, *range(8)) & 1).astype(np.uint16) << 8
    return _grid("IQ3_S")[places].view(np.uint64) | _signs(3)[signs], halves, _odd(_shifted(scales, 0, 4) & 15)


def _iq1_s(blocks: Bytes) -> Split:
    halves, low, rest = _parts(blocks, 2, 32)
    high = _words(rest, np.uint16)
    places = low | (_shifted(high, 0, 3, 6, 9) & 7) << 8
    shifts = np.repeat(high >> 15, 4, axis=1) * np.uint64(0x0404040404040404)
    return _grid("IQ1_S")[places] | shifts, halves, _odd(high >> 12 & 7)


def _iq1_m(blocks: Bytes) -> Split:
    low, rest, last = _parts(blocks, 32, 16)
    high, scales = _shifted(rest, 0, 4), _words(last, np.uint16)
    parts = (scales & 0xF000) >> np.array([12, 8, 4, 0], np.uint16)
    halves = np.bitwise_or.reduce(parts, axis=1, keepdims=True).view(np.uint8)
    places = low | (high & 7).astype(np.uint16) << 8
    shifts = (high >> 3 & 1).astype(np.uint64) * np.uint64(0x0404040404040404)
    return _grid("IQ1_M")[places] | shifts, halves, _odd(_shifted(scales, 0, 3, 6, 9) & 7)


def _tq1_0(blocks: Bytes) -> Split:
    first, second, third, halves = _parts(blocks, 32, 16, 4)
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    digits = [
        (part[:, None] * powers[:count]).reshape(len(blocks), -1)
        for part, count in ((first, 5), (second, 5), (third, 4))
    ]
    codes = (np.concatenate(digits, axis=1).astype(np.uint16) * 3 >> 8).astype(np.int8) - 1
    return codes, halves, np.ones((len(blocks), 1))


def _tq2_0(blocks: Bytes) -> Split:
    pairs, halves = _parts(blocks, 64)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    digits = (pairs.reshape(len(blocks), 2, 1, 32) >> shifts & 3).reshape(len(blocks), -1)
    if (digits == 3).any():
        raise CheckpointError(
            "weights of type TQ2_0 have a fourth digit, which no program writes; fetch or convert the file again"
        )
    return digits.astype(np.int8) - 1, halves, np.ones((len(blocks), 1))


_SPLITS: dict[str, Callable[[Bytes], Split]] = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}
