"""Codes of any format, made up."""

import torch
from torch import Tensor

from volley.native.packing import Codes
from volley.weights import FORMATS

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
