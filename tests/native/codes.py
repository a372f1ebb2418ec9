"""Codes of any format, made up, and the codes of rounded weights by PyTorch."""

import torch
from torch import Tensor

from volley.native import Weights
from volley.native.codes import LaidOut, taken_back
from volley.native.packing import Codes
from volley.weights import BLOCK, FORMATS, GROUP, Format

OF_CODES = [name for name, of in FORMATS.items() if name != "bf16" and not of.is_wide]
SMALL_FLOATS = [name for name, of in FORMATS.items() if of.is_wide]


def made_up(name: str, outputs: int, inputs: int) -> Codes:
    """Any codes, with scales that may be negative or too small for a normal fp16."""
    of = FORMATS[name]
    places = outputs, inputs // of.scaled_inputs
    codes = torch.randint(0, 2**of.bits, (outputs, inputs)) - (0 if of.table else of.zero)
    factors = torch.randint(-128, 128, (outputs, inputs // of.group, 1 + of.has_least)).to(torch.int8)
    return Codes(
        of,
        codes.to(torch.int8),
        _numbers(places[:1] if of.by_output else places).to(getattr(torch, of.scale)),
        _numbers(places).to(getattr(torch, of.scale)) if of.has_least else None,
        factors if of.has_factors else None,
    )


def made_up_floats(name: str, outputs: int, inputs: int) -> Codes:
    """Any small floats but NaN, with scales as files have them."""
    if name == "FP8":
        numbers = torch.rand(outputs, inputs) * 896 - 448
        numbers[:, ::7] *= 2**-16  # some are subnormal
        codes = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
        return Codes(FORMATS[name], codes, torch.rand(outputs, inputs // 64) * 1e-3)
    pairs = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    scales = (torch.rand(outputs, inputs // 16) * torch.tensor([448.0, 2**-6]).repeat(inputs // 32)).to(
        torch.float8_e4m3fn
    )
    return Codes(FORMATS[name], pairs, 100 + torch.rand(outputs) * 1e5, None, scales.view(torch.uint8))


def _numbers(shape: tuple[int, ...]) -> Tensor:
    rows = torch.tensor([1e-6, 1e-2])[torch.randint(2, (shape[0],))]
    return torch.randn(shape) * rows.view(-1, *[1] * (len(shape) - 1))


def rows_of(laid: LaidOut, of: Format, outputs: int) -> Codes | Tensor:
    """Return the rows of a packed weight; those that fill up its last block must be zeros."""
    every = len(laid.codes) * BLOCK
    rows = taken_back(laid, of, every, slice(every))
    if isinstance(rows, Tensor):
        assert not rows[outputs:].any()
        return rows[:outputs]
    assert not any(part[outputs:].any() for part in rows[1:] if part is not None)
    return rows.rows(slice(outputs))


def rounded(weight: Tensor, kind: Weights) -> Codes:
    """Return the codes of a weight: the reference of ``round_weight`` in C, to the bit."""
    return Codes(FORMATS[kind], *(quantise_int8 if kind == "int8" else quantise_int4)(weight))


def quantise_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes ``[out, in]`` and scales ``[out]``; a weight is about its code times its output's scale."""
    values = weight.float()
    scales = (values.abs().amax(dim=1) / 127).clamp_min(1e-30)
    return (values / scales[:, None]).round().nan_to_num_(0.0).to(torch.int8), scales


def quantise_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes ``[out, in]`` from −8 to 7 and scales ``[out, in / 64]``, the best of nine by squared error."""
    values = weight.float().view(len(weight), -1, GROUP)
    extreme = values.gather(-1, values.abs().argmax(dim=-1, keepdim=True))
    best = torch.ones_like(extreme)
    least = torch.full_like(extreme, torch.inf)
    for steps in torch.linspace(-9.5, -6.5, 9).tolist():  # the largest weight becomes about −8, which has no opposite
        scales = extreme / steps
        scales = torch.where(scales.abs() < 1e-30, 1e-30, scales)
        error = _total(_int4(values, scales).mul_(scales).sub_(values).square_())
        better = error < least
        least, best = torch.where(better, error, least), torch.where(better, scales, best)
    codes = _int4(values, best).nan_to_num_(0.0)
    best = torch.where(extreme.isfinite(), best, torch.nan)  # a damaged weight becomes NaN, as it would in bf16
    return codes.to(torch.int8).view(weight.shape), best[..., 0].contiguous()


def _int4(values: Tensor, scales: Tensor) -> Tensor:
    return (values / scales).round_().clamp_(-8, 7)


def _total(parts: Tensor) -> Tensor:
    """Sum ``[..., 64]`` to ``[..., 1]`` by halves; the order of PyTorch's sum depends on the CPU's vector width."""
    while parts.shape[-1] > 1:
        half = parts.shape[-1] // 2
        parts = parts[..., :half] + parts[..., half:]
    return parts
