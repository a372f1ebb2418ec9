"""Codes of any format, made up."""

import torch
from torch import Tensor

from volley.native.formats import FORMATS, Codes

OF_CODES = [name for name in FORMATS if name != "bf16"]


def made_up(name: str, outputs: int, inputs: int) -> Codes:
    """Any codes, with scales that may be negative or too small for a normal fp16."""
    of = FORMATS[name]
    places = outputs, inputs // of.scaled_inputs
    codes = torch.randint(0, 2**of.bits, (outputs, inputs)) - (0 if of.table else of.zero)
    factors = torch.randint(-128, 128, (outputs, inputs // of.group, 1 + of.has_least)).to(torch.int8)
    return Codes(
        of,
        codes.to(torch.int8),
        _numbers(places[:1] if of.by_output else places).to(of.scale),
        _numbers(places).to(of.scale) if of.has_least else None,
        factors if of.has_factors else None,
    )


def _numbers(shape: tuple[int, ...]) -> Tensor:
    rows = torch.tensor([1e-6, 1e-2])[torch.randint(2, (shape[0],))]
    return torch.randn(shape) * rows.view(-1, *[1] * (len(shape) - 1))
