"""Layout of packed weights for ``products.c``, bf16 numbers or codes in blocks of 16 outputs, and quantisation to codes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from volley.library import functions, pointer
from volley.native import blocks as stored_blocks
from volley.native.packing import Codes, CodeSource, StoredBlocks, packed_scales, unpacked, unpacked_scales
from volley.native.pages import in_large_pages
from volley.weights import BLOCK, FORMATS, GROUP, NUMBERS, PACK, Format

_LAID_OUT_AT_ONCE = 2**18  # numbers of a weight: more would leave the cache
_READ_AT_ONCE = 2**20  # numbers of stored codes: larger copies would be in new pages, which the system fills with zeros


class WeightSource(Protocol):
    """Weight ``[out, in]`` in bf16, read some rows at a time, such as a tensor or a :class:`Product`."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, rows: slice, /) -> Tensor: ...


class LaidOut(NamedTuple):
    """Packed weight, in the order in which the instructions read it."""

    codes: Tensor
    """Numbers ``[out / 16, in / 2, 16, 2]`` in bf16, or codes as bytes ``[out / 16, in / 32, bits, 16, 4]``."""
    scales: Tensor | None
    """Scales: fp32 ``[out]`` for int8, else bytes ``[out / 16, in / scaled_inputs, scale_bytes]``."""

    @classmethod
    def unset(cls, of: Format, outputs: int, inputs: int, empty: Callable[..., Tensor] = torch.empty) -> "LaidOut":
        """Allocate a weight of ``outputs``, in whole blocks; ``empty(shape, dtype=…)`` allocates the codes."""
        blocks = -(-outputs // BLOCK)
        if of.name == "bf16":
            return cls(empty((blocks, inputs // 2, BLOCK, 2), dtype=torch.bfloat16), None)
        if of.is_wide:
            size = inputs // GROUP * BLOCK * 4 if of.bits == 8 else BLOCK * 4 + inputs
            pairs = empty((blocks, inputs // 2, BLOCK, of.bits // 4), dtype=torch.uint8)
            return cls(pairs, torch.empty(blocks, size, dtype=torch.uint8))
        codes = empty((blocks, inputs // PACK, of.bits, BLOCK, 4), dtype=torch.uint8)
        if of.by_output:
            return cls(codes, torch.empty(blocks * BLOCK, dtype=torch.float32))
        return cls(codes, torch.empty(blocks, inputs // of.scaled_inputs, of.scale_bytes, dtype=torch.uint8))

    def blocks(self, blocks: slice) -> "LaidOut":
        """Return some blocks of outputs, in the same memory."""
        outputs, scales = slice(blocks.start * BLOCK, blocks.stop * BLOCK), self.scales
        return LaidOut(self.codes[blocks], None if scales is None else scales[outputs if scales.dim() == 1 else blocks])


def lay_out(weight: WeightSource, of: Format, stored: CodeSource | None = None) -> LaidOut:
    """Pack ``weight [out, in]``, or its ``stored`` codes, some rows at a time, because these may be read from disk."""
    outputs, inputs = weight.shape
    whole = LaidOut.unset(of, outputs, inputs, in_large_pages)
    step = max((_LAID_OUT_AT_ONCE if stored is None else _READ_AT_ONCE) // inputs // BLOCK, 1) * BLOCK
    for first in range(0, outputs, step):
        rows = slice(first, min(first + step, outputs))
        part = weight[rows] if stored is None else stored.rows(rows)
        blocks = whole.blocks(slice(first // BLOCK, -(-rows.stop // BLOCK)))
        (put_small_floats if of.is_wide else put_rows)(part, of, blocks)
        if stored is not None:
            stored.forget(rows)
    return whole


def put_rows(part: Tensor | Codes | StoredBlocks, of: Format, to: LaidOut) -> None:
    """Pack rows of a weight, or their codes, into blocks ``to``."""
    if isinstance(part, StoredBlocks):
        assert to.scales is not None, "the format has scales"
        assert len(to.codes) == -(-len(part.blocks) // BLOCK), (
            f"{len(part.blocks)} rows are not for {len(to.codes)} blocks"
        )
        stored_blocks.lay_out(of.name, part.blocks, to.codes, to.scales)
        return
    rows = (part.codes if isinstance(part, Codes) else part).contiguous()
    outputs, inputs = rows.shape
    assert inputs % (2 if of.name == "bf16" else of.inputs) == 0, f"{inputs} inputs do not fill whole groups"
    assert len(to.codes) == -(-outputs // BLOCK), f"{outputs} rows are not for {len(to.codes)} blocks"
    if isinstance(part, Codes):
        functions().put_codes(NUMBERS[of.name], rows.data_ptr(), outputs, inputs, to.codes.data_ptr())
        _put_scales(part, to)
        return
    if rows.dtype != torch.bfloat16:
        assert of.name != "bf16", f"products take bf16, not {rows.dtype}"
        rows = rows.float()
    shape = {"bf16": None, "int8": (outputs,), "int4": (outputs, inputs // GROUP)}[of.name]
    scales = None if shape is None else torch.empty(shape, dtype=torch.float32)
    is_wide = rows.dtype == torch.float32
    functions().round_weight(
        *(NUMBERS[of.name], rows.data_ptr(), is_wide, outputs, inputs, to.codes.data_ptr(), pointer(scales))
    )
    if scales is not None:
        _put_scales(Codes(of, rows, scales), to)


def put_small_floats(part: Tensor | Codes | StoredBlocks, of: Format, to: LaidOut) -> None:
    """Pack rows of FP8 or NVFP4 codes into blocks ``to`` (``widen_block`` in C)."""
    assert isinstance(part, Codes), "weights are not rounded to small floats"
    assert to.scales is not None, "the format has scales"
    codes, scales = _padded(part.codes), _padded(part.scales)
    to.codes[:] = codes.view(len(to.codes), BLOCK, -1, of.bits // 4).transpose(1, 2)
    numbers = [scales.view(len(to.codes), BLOCK, -1).transpose(1, 2).flatten(1).contiguous().view(torch.uint8)]
    if part.factors is not None:
        numbers.append(_padded(part.factors).view(len(to.codes), BLOCK, -1).transpose(1, 2).flatten(1))
    to.scales[:] = torch.cat(numbers, dim=1)


def _small_floats_back(own: LaidOut, of: Format, count: int) -> Codes:
    """Unpack the first ``count`` rows of what :func:`put_small_floats` packed."""
    assert own.scales is not None

    def by_row(numbers: Tensor) -> Tensor:
        return numbers.view(len(own.codes), -1, BLOCK).transpose(1, 2).flatten(0, 1)[:count].contiguous()

    codes = own.codes.transpose(1, 2).flatten(2).flatten(0, 1)[:count]
    if of.bits == 8:
        return Codes(of, codes, by_row(own.scales.view(torch.float32)))
    whole = own.scales[:, : BLOCK * 4].contiguous().view(torch.float32).flatten()[:count]
    return Codes(of, codes, whole, None, by_row(own.scales[:, BLOCK * 4 :].contiguous()))


def _padded(rows: Tensor) -> Tensor:
    """Pad ``rows`` with zeros to whole blocks."""
    missing = -len(rows) % BLOCK
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows


def _put_scales(part: Codes, to: LaidOut) -> None:
    assert to.scales is not None, "the format has scales"
    scales, least, factors = (None if one is None else _padded(one) for one in part[2:])
    assert scales is not None
    to.scales[:] = packed_scales(Codes(part.format, part.codes, scales, least, factors))


def taken_back(blocks: LaidOut, of: Format, outputs: int, rows: slice) -> Codes | Tensor:
    """Unpack rows of a weight with ``outputs``, in bf16 or codes; the first one must begin a block of 16."""
    first, last, _ = rows.indices(outputs)
    assert first % BLOCK == 0, f"row {first} is within a block"
    count, own = last - first, blocks.blocks(slice(first // BLOCK, -(-last // BLOCK)))
    if of.is_wide:
        return _small_floats_back(own, of, count)

    def by_row(numbers: Tensor) -> Tensor:
        """Reshape ``[blocks, …, 16]`` to ``[count, …]``."""
        return numbers.movedim(-1, 1).flatten(0, 1)[:count]

    lines = by_row(own.codes.movedim(-2, -1))
    if own.scales is None:
        return lines.flatten(1)
    if of.by_output:
        return Codes(of, unpacked(lines, of), own.scales[:count])
    scales = [None if part is None else by_row(part) for part in unpacked_scales(own.scales, of)]
    return Codes(of, unpacked(lines, of), *scales)  # type: ignore[arg-type]


def quantise_finely(weight: Tensor) -> Codes:
    """Quantise ``[out, in]`` to int8 with fp16 scales for 32 inputs, like GGUF's Q8_0."""
    of = FORMATS["Q8_0"]
    values = weight.float().view(len(weight), -1, of.group)
    scales = (values.abs().amax(dim=-1) / 127).half()
    inverse = torch.where(scales == 0, 0.0, 1 / scales.float())
    codes = (values * inverse[..., None]).round().clamp(-127, 127).to(torch.int8)
    return Codes(of, codes.view(weight.shape), scales)
