"""C kernels for bf16 models on a CPU: the library, its matmuls and its other operations.

The library is built when the package is installed, if there is a C compiler. Its matmuls need a CPU with AVX2; AVX512-BF16 and
AMX are faster. If either is missing, :data:`available` is false and the model runs on PyTorch's operations. Masks over logits,
recurrent states, noise and the fp32 operations (norms, gates, rotary embeddings) run on any CPU. Results are batch-invariant: a
row's result depends on that row alone, to the bit. The kernels use PyTorch's threads.
"""

import math
from collections.abc import Sequence
from ctypes import addressof, byref
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from volley.library import ActivationStruct as ActivationStruct
from volley.library import HeadsStruct as HeadsStruct
from volley.library import ProductStruct as ProductStruct
from volley.library import TurnsStruct as TurnsStruct
from volley.library import available as available
from volley.library import functions as functions
from volley.library import has_dot_products as has_dot_products
from volley.library import is_built as is_built
from volley.library import load as load
from volley.library import pointer as pointer
from volley.native.codes import LaidOut, WeightSource, lay_out, taken_back
from volley.native.packing import Codes as Codes
from volley.native.packing import CodeSource
from volley.native.packing import stacked as stacked
from volley.weights import BLOCK as BLOCK
from volley.weights import FORMATS, NUMBERS, Format
from volley.weights import GROUP as GROUP
from volley.weights import Weights as Weights

TargetWeights = Literal["auto", Weights]
"""Formats of a target's weights. ``auto``: quantised for a quantised GGUF file if the kernels run here, bf16 otherwise."""
WantedDraftWeights = Literal["auto", Weights]
"""Formats of a drafter's weights. ``auto``: the fastest one beside the target's weights (``models/layers/products.py``)."""
_ACTIVATIONS = ("silu", "gelu", "clamped")  # as the kernels number them


class Activation(NamedTuple):
    """Activation of a gated MLP; GELU in its tanh form."""

    name: Literal["silu", "gelu", "clamped"]
    """Name of the function; ``clamped`` is gpt-oss's: ``gate · sigmoid(alpha · gate) · (1 + up)``."""
    alpha: float = 1.0
    limit: float = math.inf
    """Upper bound of a clamped gate, and bound of the magnitude of ``up``."""

    @property
    def struct(self) -> ActivationStruct:
        return ActivationStruct(_ACTIVATIONS.index(self.name), self.alpha, self.limit)


SILU, GELU = Activation("silu"), Activation("gelu")


# -- rows ---------------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, rounds: bool = True) -> Tensor:
    """Return ``weight [H] · x / rms(x)`` of contiguous ``x [..., H]``; for bf16 ``x`` the weight may be in fp32.

    bf16 is also rounded before the multiplication by the weight, unless ``rounds`` is false. In fp32 the weight may be ``None``,
    and any CPU suffices.
    """
    out = torch.empty_like(x)
    size = x.shape[-1]
    if x.dtype == torch.float32:
        functions().rms_norm_floats(x.data_ptr(), pointer(weight), out.data_ptr(), x.numel() // size, size, eps)
    else:
        assert weight is not None
        scale = weight.float()
        functions().rms_norm(
            *(x.data_ptr(), size, scale.data_ptr(), out.data_ptr(), x.numel() // size, size, eps, rounds)
        )
    return out


class Turns:
    """Rotary embedding of tokens by cosines and sines ``[T, width]`` in the half-split layout.

    It rotates the first ``width`` numbers of a head. Products are rounded to bf16 if cosines and sines are bf16.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._tensors = (cos.float().contiguous(), sin.float().contiguous())  # the struct points into them
        self.struct = TurnsStruct(*map(pointer, self._tensors), cos.shape[-1], cos.dtype == torch.bfloat16)


def norm_and_turn(
    x: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    turns: Turns | None,
    heads: int,
    shared: int,
    eps: float,
    *,
    rounds: bool = True,
) -> None:
    """Norm and rotate in place the first ``heads`` and the next ``shared`` heads of ``x [T, more, d]``.

    ``norms`` are the weights of queries and keys: ``[d]`` for each head, or ``[heads · d]`` and ``[shared · d]`` for all as one.
    """
    dim = x.shape[2]
    of_queries, of_keys = (None, None) if norms is None else (weight.float() for weight in norms)
    whole = of_queries is not None and len(of_queries) != dim
    functions().norm_and_turn(
        *(x.data_ptr(), x.stride(0), pointer(of_queries), pointer(of_keys)),
        *(None if turns is None else byref(turns.struct), len(x)),
        byref(HeadsStruct(heads, shared, dim, whole, rounds, eps)),
    )


def gated_gelu(x: Tensor) -> Tensor:
    """Return ``gelu(gate) · up [T, I]`` of contiguous ``x = [gate, up] [T, 2 · I]`` in fp32; GELU in its tanh form."""
    out = x.new_empty(len(x), x.shape[1] // 2)
    functions().gated_gelu_floats(x.data_ptr(), out.data_ptr(), len(x), out.shape[1])
    return out


def gated(x: Tensor, activation: Activation) -> Tensor:
    """Return ``activation(gate) · up [T, I]`` of ``x = [gate, up] [T, 2 · I]``."""
    out = x.new_empty(len(x), x.shape[1] // 2)
    functions().gated(x.data_ptr(), out.data_ptr(), len(x), out.shape[1], byref(activation.struct))
    return out


def cap(x: Tensor, most: float) -> None:
    """Replace contiguous ``x [T, V]`` in bf16 by ``most · tanh(x / most)``, each step rounded."""
    functions().cap(x.data_ptr(), *x.shape, most)


# -- products -----------------------------------------------------------------------------------------------------------


def fits(weight: Tensor, kind: Weights, inputs: int = GROUP) -> bool:
    """Return whether the matmul kernels support a weight ``[out, in]``, in a format that needs a multiple of ``inputs``."""
    return available and weight.dtype == torch.bfloat16 and weight.shape[1] % (32 if kind == "bf16" else inputs) == 0


class _ProductPart(NamedTuple):
    """Outputs of a matmul whose weights have one format."""

    format: Format
    blocks: LaidOut
    outputs: int


class Product:
    """Matmul ``x @ weight.T + bias`` for ``weight [out, in]`` and ``bias [out]`` in bf16, with a packed copy of the weight.

    int8 has a scale for each output, int4 one for every 64 inputs of an output. With both, inputs are quantised to int8 with a
    scale for every 64 inputs of a row. Stored codes have their own group size, for weights and inputs. A weight may consist of
    parts in several formats, stacked.
    """

    def __init__(
        self,
        weight: WeightSource,
        bias: Tensor | None,
        kind: Weights,
        stored: Sequence[tuple[CodeSource, int]] = (),
    ) -> None:
        """Pack ``stored`` codes of the weight, given with the outputs of each, or else quantise the weight to ``kind``."""
        outputs, inputs = map(int, weight.shape)
        found = []
        for codes, size in stored:
            shape = torch.empty(size, inputs, device="meta")  # with stored codes only the shape is needed
            found.append(_ProductPart(codes.format, lay_out(shape, codes.format, codes), size))
        if not stored:
            found.append(_ProductPart(FORMATS[kind], lay_out(weight, FORMATS[kind]), outputs))
        self._take(found, inputs, None if bias is None else bias.bfloat16().contiguous())

    def _take(self, parts: Sequence[_ProductPart], inputs: int, bias: Tensor | None) -> None:
        self._parts, self._bias = tuple(parts), bias
        self.shape = self.outputs, self.inputs = sum(part.outputs for part in parts), inputs
        self.structs: list[ProductStruct] = []
        end = self.outputs
        for part in reversed(parts):  # each points to the next
            end -= part.outputs
            own = None if bias is None else bias.data_ptr() + end * bias.itemsize
            following = addressof(self.structs[-1]) if self.structs else None
            self.structs.append(
                ProductStruct(
                    *(NUMBERS[part.format.name], inputs, part.outputs, self.outputs, *map(pointer, part.blocks)),
                    *(own, following),
                )
            )

    @property
    def struct(self) -> ProductStruct:
        """Struct of the first part, which points to the next."""
        return self.structs[-1]

    @property
    def formats(self) -> tuple[Format, ...]:
        """Formats of its parts, in the order of outputs."""
        return tuple(part.format for part in self._parts)

    @property
    def kind(self) -> Weights:
        """Format of its largest part."""
        return max(self._parts, key=lambda part: part.outputs).format.weights

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for part in self._parts for tensor in part.blocks if tensor is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[T, out]`` of ``x [T, in]`` in bf16; leading dimensions stay."""
        assert x.dtype == torch.bfloat16, f"products take bf16, not {x.dtype}"
        rows = x.reshape(-1, self.inputs)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = torch.empty((len(rows), self.outputs), dtype=torch.bfloat16)
        if len(rows):
            buffers = input_buffers(len(rows), self.inputs, min(of.group for of in self.formats))
            functions().linear(
                *(
                    byref(self.struct),
                    rows.data_ptr(),
                    rows.stride(0),
                    *map(pointer, buffers),
                    out.data_ptr(),
                    len(rows),
                )
            )
        return out.view(*x.shape[:-1], self.outputs)

    def first(self, outputs: int) -> "Product":
        """Return the matmul of the first ``outputs`` alone, a multiple of 16, in the same memory."""
        return self.part(0, outputs)

    def part(self, begin: int, end: int) -> "Product":
        """Return the matmul of outputs ``[begin, end)`` alone, in the same memory; both are multiples of 16."""
        assert begin % BLOCK == end % BLOCK == 0, f"{begin} or {end} is within a block"
        found, first = [], 0
        for part in self._parts:
            own = slice(max(begin - first, 0), min(end - first, part.outputs))
            if own.start < own.stop:
                blocks = part.blocks.blocks(slice(own.start // BLOCK, -(-own.stop // BLOCK)))
                found.append(_ProductPart(part.format, blocks, own.stop - own.start))
            first += part.outputs
        product = Product.__new__(Product)
        product._take(found, self.inputs, None if self._bias is None else self._bias[begin:end])
        return product

    @classmethod
    def unset(cls, outputs: int, inputs: int) -> "Product":
        """Make a bf16 matmul whose rows are :meth:`put` later; ``outputs`` is a multiple of 16."""
        product, of = cls.__new__(cls), FORMATS["bf16"]
        product._take([_ProductPart(of, LaidOut.unset(of, outputs, inputs), outputs)], inputs, None)
        return product

    def put(self, places: Tensor, rows: Tensor) -> None:
        """Replace the rows ``places [n]`` of a bf16 weight by ``rows [n, in]``."""
        assert self.kind == "bf16", "codes are not replaced"
        self._parts[0].blocks.codes[places // BLOCK, :, places % BLOCK] = rows.view(len(rows), -1, 2)

    def rows(self, indices: Tensor) -> Tensor:
        """Look up rows ``[..., in]`` of the weight, decoded to bf16, for ``indices [...]``, as an embedding does."""
        assert len(self._parts) == 1, "rows are looked up in weights of one format"
        assert not self.formats[0].is_wide, "no rows are looked up in small floats"
        flat = indices.reshape(-1).long().contiguous()
        assert not len(flat) or 0 <= int(flat.min()) <= int(flat.max()) < self.outputs, "no such row"
        rows = torch.empty((len(flat), self.inputs), dtype=torch.bfloat16)
        functions().read_rows(byref(self.struct), flat.data_ptr(), len(flat), rows.data_ptr())
        return rows.view(*indices.shape, self.inputs)

    def __getitem__(self, rows: slice) -> Tensor:
        """Return rows ``[n, in]`` of the weight in bf16; the first one must begin a block of 16."""
        return torch.cat([_in_bf16(part) for part in self._stored(rows)])

    def weight(self) -> Tensor:
        """Return the whole weight ``[out, in]``, decoded and rounded to bf16."""
        return self[: self.outputs]

    def codes(self) -> list[Codes]:
        """Return the codes of the whole weight; empty for bf16."""
        return [part for part in self._stored(slice(self.outputs)) if isinstance(part, Codes)]

    def _stored(self, rows: slice) -> list[Codes | Tensor]:
        """Return rows, part by part."""
        (first, last, _), begin, found = rows.indices(self.outputs), 0, list[Codes | Tensor]()
        for part in self._parts:
            own = slice(max(first - begin, 0), min(last - begin, part.outputs))
            if own.start < own.stop:
                found.append(taken_back(part.blocks, part.format, part.outputs, own))
            begin += part.outputs
        return found


def _in_bf16(rows: Codes | Tensor) -> Tensor:
    return rows.dense().bfloat16() if isinstance(rows, Codes) else rows


def input_buffers(rows: int, inputs: int, group: int) -> list[Tensor]:
    """Allocate buffers for packed inputs, in bf16 or in codes, and for the scales and sums of groups of codes."""
    return [
        torch.empty(rows * inputs, dtype=torch.bfloat16),
        torch.empty(rows * (inputs // group), dtype=torch.float32),
        torch.empty(rows * (inputs // group), dtype=torch.int32),
    ]
