"""Weight formats of ``native/products.c``: bf16, volley's own quantised formats, those of GGUF files, and small floats."""

from dataclasses import dataclass
from typing import Literal, get_args

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
    scale: Literal["float16", "bfloat16", "float32"] = "float16"
    """Data type of the scales."""
    zero: int = 0
    """Stored code of the number zero."""
    has_least: bool = False
    has_factors: bool = False
    """True if scales and minima are a number for 256 inputs times an integer for each group."""
    table: tuple[int, ...] = ()
    """Numbers that the codes index; empty: codes are numbers themselves."""
    unit: float = 1.0
    """Power of two that scales with factors are multiplied by."""
    is_wide: bool = False
    """True if codes are small floats that become bf16 numbers when they are multiplied, as a bf16 weight would be."""

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
    def scale_size(self) -> int:
        """Return the bytes of a scale."""
        return 4 if self.scale == "float32" else 2

    @property
    def scale_bytes(self) -> int:
        """Return the bytes of the scales that are stored together, for 16 outputs."""
        factors = LARGE // self.group if self.has_factors else 0
        return (self.scale_size + factors) * (1 + self.has_least) * BLOCK

    @property
    def held_bits(self) -> float:
        """Return the bits of a number in memory, with its share of scales and minima; those of whole outputs do not count."""
        is_scaled = self.name != "bf16" and not self.by_output
        return self.bits + (8 * self.scale_bytes / (BLOCK * self.scaled_inputs) if is_scaled else 0.0)


FLOATS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Numbers of NVFP4's codes."""
_DOUBLED_FLOATS = (0, 1, 2, 3, 4, 6, 8, 12)
_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _signed(*sizes: int) -> tuple[int, ...]:
    """Return a table of numbers of these sizes, whose codes have the sign in their last bit."""
    return *sizes, *(-size for size in sizes)


_ALL = (
    Format("bf16", 16, GROUP, "bfloat16"),
    Format("int8", 8, GROUP, "float32", 128),
    Format("int4", 4, GROUP, "float32", 8),
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
    Format("MXFP4", 4, 32, "bfloat16", table=(*_DOUBLED_FLOATS, *(-number for number in _DOUBLED_FLOATS))),
    Format("IQ3_XXS", 4, 32, has_factors=True, table=_signed(4, 12, 20, 28, 36, 44, 52, 62), unit=1 / 4),
    Format("IQ3_S", 4, 32, has_factors=True, table=_signed(*range(1, 16, 2))),
    Format("IQ2", 3, 16, has_factors=True, table=_signed(8, 25, 43, 0), unit=1 / 8),
    Format("IQ1", 3, 16, has_factors=True, table=(-7, 1, 9, 0, -9, -1, 7, 0), unit=1 / 8),
    Format("TQ", 2, 32, zero=2, has_factors=True),
    Format("FP8", 8, GROUP, "float32", is_wide=True),
    Format("NVFP4", 4, GROUP, "float32", is_wide=True),
)
FORMATS = {own.name: own for own in _ALL}
"""Formats by name, in the order of their numbers in the library."""
NUMBERS = {name: number for number, name in enumerate(FORMATS)}
BY_GRID = {
    **dict.fromkeys(("IQ1_S", "IQ1_M"), FORMATS["IQ1"]),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S"), FORMATS["IQ2"]),
    **{name: FORMATS[name] for name in ("IQ3_XXS", "IQ3_S")},
    **dict.fromkeys(("TQ1_0", "TQ2_0"), FORMATS["TQ"]),
}
"""Formats of GGUF's types of three bits and less that pack numbers together (``native/grids.py``)."""
STORED = {
    name: own
    for name, own in FORMATS.items()
    if name not in WEIGHTS and not own.is_wide and own not in BY_GRID.values()
}
"""Formats of GGUF's other types."""
OF_FILES = {**STORED, **BY_GRID}
"""Formats of all types of GGUF files that the kernels have, by GGUF's names."""
