"""Make exponential noise as a function of (seed, position, token), equal on every device up to the rounding of a logarithm.

Philox4x64-10 (Salmon et al. 2011) turns a key of two words and a counter of four into four random 64-bit words. The key is
(seed, purpose), and the counter is (1 + token // 4, 0, position, 0), as in NumPy's generator. NumPy's generator is used on a
CPU without volley's C library. On a GPU a Triton kernel computes each word, or PyTorch if there is no Triton.

A token of probability p wins a race if its noise is about as small as p, so small values must be precise, too. A word w gives
``e = −log(1 − u)`` with ``u = w / 2⁶⁴`` in floating point, whose relative precision is constant down to 2⁻⁶³. Noise of 23 bits
would be 0 once in 2²³ draws. With 152k tokens, a token of any probability would then win one race in 55.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from volley import native
from volley.memory.kernels import usable
from volley.memory.upload import upload
from volley.native import sampling as in_c

_KEPT = 128  # rows cached on a CPU: draft, target and the next draft use the same ones
_LOW = 2**32 - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
SMALLEST, LARGEST = 2.0**-63, 1 - 2.0**-24
"""Bounds of the uniforms: 0 or 1 would make the race divide by 0 or by infinity."""


def exponentials(
    seeds: Sequence[int],
    purpose: int,
    positions: Sequence[int],
    size: int,
    device: torch.device,
    moved: Tensor | None = None,
) -> Tensor:
    """Return unit exponentials ``[R, size]`` (fp32) for R pairs of seed and position.

    If only the device knows the positions, ``moved [R]`` is added to them there.
    """
    if device.type == "cpu":
        if moved is not None:
            positions = [position + by for position, by in zip(positions, moved.tolist(), strict=True)]
        return torch.stack([_row(*pair, purpose, size) for pair in zip(seeds, positions, strict=True)])
    places = upload(np.array([seeds, positions], dtype=np.int64), device)
    if moved is not None:
        places[1].add_(moved)
    if usable(device):
        from volley.memory.kernels.noise import fill_exponentials

        return fill_exponentials(places, purpose, size)
    return from_words(philox(places, purpose, size))


@lru_cache(maxsize=_KEPT)
def _row(seed: int, position: int, purpose: int, size: int) -> Tensor:
    if native.is_built:
        return in_c.exponentials(seed, purpose, position, size)
    words = np.random.Philox(key=[seed, purpose], counter=[0, 0, position, 0]).random_raw(size)
    return from_words(torch.from_numpy(words.view(np.int64)))


def from_words(words: Tensor) -> Tensor:
    """Turn random words (int64) into unit exponentials (fp32)."""
    uniforms = ((words >> 1) & (2**63 - 1)).float().mul_(2.0**-63).clamp_(SMALLEST, LARGEST)
    return uniforms.neg_().log1p_().neg_()


def philox(places: Tensor, purpose: int, size: int) -> Tensor:
    """Return random words ``[R, size]`` (int64) for ``places [2, R]``, seeds and positions; this is the reference of the
    kernel.

    PyTorch's int64 products wrap like unsigned ones. Upper halves are computed from 32-bit halves.
    """
    seeds, positions = places[:, :, None].unbind(0)
    blocks = torch.arange(1, 2 + (size - 1) // 4, device=places.device)[None]
    first, third = blocks.expand(len(seeds), -1), positions.expand(-1, blocks.shape[1])
    second = fourth = torch.zeros_like(first)
    key, other = seeds, purpose
    for _ in range(10):
        high, low = _product(first, _MULTIPLIERS[0])
        high_, low_ = _product(third, _MULTIPLIERS[1])
        first, second, third, fourth = high_ ^ second ^ key, low_, high ^ fourth ^ other, low
        key, other = key + _signed(_WEYL[0]), _signed(other + _WEYL[1])
    return torch.stack([first, second, third, fourth], dim=-1).flatten(1)[:, :size]


def _product(words: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower 64 bits of ``words`` times ``by``."""
    low, high = words & _LOW, (words >> 32) & _LOW
    by_low, by_high = by & _LOW, by >> 32
    middle = high * by_low + (((low * by_low) >> 32) & _LOW)  # below 2⁶⁴, as is each later sum
    other = low * by_high + (middle & _LOW)
    return high * by_high + ((middle >> 32) & _LOW) + ((other >> 32) & _LOW), words * _signed(by)


def _signed(word: int) -> int:
    """Return the int64 with the lower 64 bits of ``word``."""
    return (word + 2**63) % 2**64 - 2**63
