"""How weights lie in the products of ``products.c``: bf16 numbers or codes, in blocks of 16 outputs; and rounding to codes."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from volley.native.library import functions, is_built, pointer
from volley.native.pages import in_large_pages

Weights = Literal["bf16", "int8", "int4"]
KINDS: tuple[Weights, ...] = get_args(Weights)
"""By the numbers that the library gives them."""
BLOCK, GROUP, FINE = 16, 64, 32
"""Outputs whose weights lie together; inputs that share a scale; and the same of codes that come from blocks of a GGUF file."""
_LAID_OUT_AT_ONCE = 2**18  # numbers of a weight: more would leave the cache


class Codes(NamedTuple):
    """A weight in whole numbers: ``codes [out, in]`` (int8), for int4 from −8 to 7, and ``scales``.

    fp32 scales are ``[out]`` for int8 and ``[out, in / 64]`` for int4; fp16 scales are ``[out, in / 32]``, for both.
    """

    kind: Weights
    codes: Tensor
    scales: Tensor

    @property
    def group(self) -> int:
        """Inputs that meet the weight with one scale."""
        return FINE if self.scales.dtype == torch.float16 else GROUP

    def rows(self, rows: slice) -> "Codes":
        """Those of some outputs."""
        return Codes(self.kind, self.codes[rows], self.scales[rows])

    def dense(self) -> Tensor:
        """The weight ``[out, in]`` in fp32."""
        scales = self.scales.float().view(len(self.codes), -1, 1)
        return (self.codes.float().view(len(self.codes), scales.shape[1], -1) * scales).flatten(1)


class CodeSource(Protocol):
    """Codes of a weight that are read some rows after others: :class:`Codes` are one."""

    @property
    def kind(self) -> Weights: ...

    @property
    def group(self) -> int: ...

    def rows(self, rows: slice, /) -> Codes: ...


class StackedCodes:
    """Codes of one kind, one below the other."""

    def __init__(self, parts: Sequence[CodeSource], sizes: Sequence[int]) -> None:
        """``sizes``: the outputs of each."""
        self.kind, self.group = parts[0].kind, parts[0].group
        assert all((part.kind, part.group) == (self.kind, self.group) for part in parts), "codes of several kinds"
        self._parts = tuple(zip(parts, sizes, strict=True))

    def rows(self, rows: slice) -> Codes:
        begin, found = 0, []
        for part, size in self._parts:
            own = slice(max(rows.start - begin, 0), min(rows.stop - begin, size))
            if own.start < own.stop:
                found.append(part.rows(own))
            begin += size
        return Codes(self.kind, torch.cat([one.codes for one in found]), torch.cat([one.scales for one in found]))


class WeightSource(Protocol):
    """A weight ``[out, in]`` in bf16 whose rows are read some after others: a tensor is one, and so is a product."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, rows: slice, /) -> Tensor: ...


class LaidOut(NamedTuple):
    """A weight as the instructions read it."""

    codes: Tensor
    """``[out / 16, in / 2, 16, 2]`` in bf16, ``[out / 16, in / 4, 16, 4]`` in int8, ``[out / 16, in / 8, 64]`` bytes in int4."""
    scales: Tensor | None
    """``[out]``, or ``[out / 16, groups, 16]``."""

    @classmethod
    def unset(
        cls, kind: Weights, group: int, outputs: int, inputs: int, empty: Callable[..., Tensor] = torch.empty
    ) -> "LaidOut":
        """Room for a weight of so many outputs, in whole blocks; ``group``: inputs that share a scale of codes.

        ``empty(shape, dtype=…)`` makes that of the codes.
        """
        blocks = -(-outputs // BLOCK)
        if kind == "bf16":
            return cls(empty((blocks, inputs // 2, BLOCK, 2), dtype=torch.bfloat16), None)
        shape = (inputs // 4, BLOCK, 4) if kind == "int8" else (inputs // 8, 4 * BLOCK)
        dtype = torch.float16 if group == FINE else torch.float32
        by_output = kind == "int8" and group == GROUP
        scales = (blocks * BLOCK,) if by_output else (blocks, inputs // group, BLOCK)
        return cls(empty((blocks, *shape), dtype=torch.uint8), torch.empty(scales, dtype=dtype))

    def blocks(self, blocks: slice) -> "LaidOut":
        """Some blocks of outputs, in the same memory."""
        outputs, scales = slice(blocks.start * BLOCK, blocks.stop * BLOCK), self.scales
        return LaidOut(self.codes[blocks], None if scales is None else scales[outputs if scales.dim() == 1 else blocks])


def lay_out(weight: WeightSource, kind: Weights, stored: CodeSource | None = None) -> LaidOut:
    """``weight [out, in]``, some rows after others, as these may have to be read first; ``stored``: its codes."""
    outputs, inputs = weight.shape
    whole = LaidOut.unset(kind, GROUP if stored is None else stored.group, outputs, inputs, in_large_pages)
    step = max(_LAID_OUT_AT_ONCE // inputs // BLOCK, 1) * BLOCK
    for first in range(0, outputs, step):
        rows = slice(first, min(first + step, outputs))
        part = weight[rows] if stored is None else stored.rows(rows)
        blocks = whole.blocks(slice(first // BLOCK, -(-rows.stop // BLOCK)))
        (put_rows if is_built else put_rows_slowly)(part, kind, blocks)
    return whole


def put_rows(part: Tensor | Codes, kind: Weights, to: LaidOut) -> None:
    """Lay rows of a weight, or codes of such, out in blocks ``to``."""
    of_codes = isinstance(part, Codes)
    rows = (part.codes if isinstance(part, Codes) else part).contiguous()
    outputs, inputs = rows.shape
    assert inputs % (FINE if of_codes else 2 if kind == "bf16" else GROUP) == 0, f"{inputs} inputs are no whole groups"
    assert len(to.codes) == -(-outputs // BLOCK), f"{outputs} rows are not for {len(to.codes)} blocks"
    if isinstance(part, Codes):
        functions().put_codes(KINDS.index(kind), rows.data_ptr(), outputs, inputs, to.codes.data_ptr())
        _put_scales(part.scales, to)
        return
    if rows.dtype != torch.bfloat16:
        assert kind != "bf16", f"products take bf16, not {rows.dtype}"
        rows = rows.float()
    shape = {"bf16": None, "int8": (outputs,), "int4": (outputs, inputs // GROUP)}[kind]
    scales = None if shape is None else torch.empty(shape, dtype=torch.float32)
    is_wide = rows.dtype == torch.float32
    functions().round_weight(
        *(KINDS.index(kind), rows.data_ptr(), is_wide, outputs, inputs, to.codes.data_ptr(), pointer(scales))
    )
    if scales is not None:
        _put_scales(scales, to)


def put_rows_slowly(part: Tensor | Codes, kind: Weights, to: LaidOut) -> None:
    """What :func:`put_rows` must do, to the bit."""
    if not isinstance(part, Codes):
        if kind == "bf16":
            to.codes[:] = _blocks(_padded(part), 2)
            return
        part = Codes(kind, *(quantise_int8 if kind == "int8" else quantise_int4)(part))
    codes = _padded(part.codes)
    _put_scales(part.scales, to)
    if kind == "int8":
        to.codes[:] = _blocks((codes.to(torch.int16) + 128).to(torch.uint8), 4)
        return
    pairs = _blocks((codes + 8).to(torch.uint8), 4).view(len(codes) // BLOCK, -1, 2, BLOCK * 4)
    to.codes[:] = pairs[:, :, 0] | pairs[:, :, 1] << 4


def _padded(rows: Tensor) -> Tensor:
    """``rows`` and zeros, as many as blocks need."""
    return torch.cat((rows, rows.new_zeros(-len(rows) % BLOCK, *rows.shape[1:])))


def _blocks(codes: Tensor, together: int) -> Tensor:
    """``[out, in]`` as ``[out / 16, in / together, 16, together]``."""
    outputs, inputs = codes.shape
    return codes.view(outputs // BLOCK, BLOCK, inputs // together, together).transpose(1, 2).contiguous()


def _put_scales(scales: Tensor, to: LaidOut) -> None:
    """``[out]`` in whole blocks, or ``[out, groups]`` as ``[out / 16, groups, 16]``."""
    assert to.scales is not None, "there is room for scales"
    padded = _padded(scales)
    to.scales[:] = padded if scales.dim() == 1 else padded.view(-1, BLOCK, scales.shape[1]).transpose(1, 2)


def taken_back(blocks: LaidOut, kind: Weights, outputs: int, rows: slice) -> Codes | Tensor:
    """Rows of a weight of so many outputs, in bf16 or codes; the first of them is the first of a block of 16."""
    first, last, _ = rows.indices(outputs)
    assert first % BLOCK == 0, f"row {first} is within a block"
    own, count = slice(first // BLOCK, -(-last // BLOCK)), last - first
    codes, scales = blocks.codes[own], blocks.scales
    if kind == "int4":
        pairs = torch.stack((codes & 15, codes >> 4), dim=2)
        codes = pairs.reshape(len(codes), -1, BLOCK, 4)
    together = codes.transpose(1, 2).flatten(2).flatten(0, 1)[:count]
    if scales is None:
        return together
    scales = scales[first:last] if scales.dim() == 1 else scales[own].transpose(1, 2).flatten(0, 1)[:count]
    return Codes(kind, _signed(together, kind), scales)


def picked(blocks: LaidOut, kind: Weights, indices: Tensor) -> Codes | Tensor:
    """Rows ``indices [n]`` of a weight, in bf16 or codes."""
    block, place = indices // BLOCK, indices % BLOCK
    if kind == "int4":
        pairs = blocks.codes.view(len(blocks.codes), -1, BLOCK, 4)[block, :, place]
        codes = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)
    else:
        codes = blocks.codes[block, :, place].flatten(1)
    if blocks.scales is None:
        return codes
    scales = blocks.scales[indices] if blocks.scales.dim() == 1 else blocks.scales[block, :, place]
    return Codes(kind, _signed(codes, kind), scales)


def _signed(codes: Tensor, kind: Weights) -> Tensor:
    return (codes.to(torch.int16) - (128 if kind == "int8" else 8)).to(torch.int8)


def quantise_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[out, in]`` and scales ``[out]``; a weight is about its code times its output's scale."""
    values = weight.float()
    scales = (values.abs().amax(dim=1) / 127).clamp_min(1e-30)
    return (values / scales[:, None]).round().nan_to_num_(0.0).to(torch.int8), scales


def quantise_finely(weight: Tensor) -> Codes:
    """int8 with fp16 scales for 32 inputs, as GGUF's Q8_0 rounds ``[out, in]``."""
    values = weight.float().view(len(weight), -1, FINE)
    scales = (values.abs().amax(dim=-1) / 127).half()
    inverse = torch.where(scales == 0, 0.0, 1 / scales.float())
    codes = (values * inverse[..., None]).round().clamp(-127, 127).to(torch.int8)
    return Codes("int8", codes.view(weight.shape), scales)


def quantise_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[out, in]`` from −8 to 7 and scales ``[out, in / 64]``, of nine scales that with the least squared error."""
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
    best = torch.where(extreme.isfinite(), best, torch.nan)  # as a damaged weight would be in bf16
    return codes.to(torch.int8).view(weight.shape), best[..., 0].contiguous()


def _int4(values: Tensor, scales: Tensor) -> Tensor:
    return (values / scales).round_().clamp_(-8, 7)


def _total(parts: Tensor) -> Tensor:
    """``[..., 1]`` of ``[..., 64]``, added by halves: PyTorch's own order depends on how wide a CPU's vectors are."""
    while parts.shape[-1] > 1:
        half = parts.shape[-1] // 2
        parts = parts[..., :half] + parts[..., half:]
    return parts
