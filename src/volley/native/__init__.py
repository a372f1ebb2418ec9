"""Kernels in C for bf16 models on a CPU: products, what lies between them, attention over pages, whole decoder layers.

The library is built when the package is installed, where there is a C compiler, and its products need a CPU with AVX2
(AVX512-BF16 and AMX are faster). Where either is missing :data:`available` is false and the model runs on PyTorch's operations;
masks over logits, recurrent states and noise need no such CPU.
A row's result depends on that row alone, to the bit. The threads are PyTorch's own.
"""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

Weights = Literal["bf16", "int8", "int4"]
TargetWeights = Literal["auto", Weights]
"""``auto``: codes for a GGUF file of codes where the kernels run, and bf16 otherwise."""
DraftWeights = Literal[Weights, "fp8"]
"""``fp8`` is for a GPU (:mod:`volley.memory.float8`), int8 and int4 are for a CPU."""
WantedDraftWeights = Literal["auto", DraftWeights]
"""``auto``: what is read fastest where the target's weights are what they are (``models/layers/products.py``)."""
BLOCK, GROUP = 16, 64
"""Outputs whose weights lie together, and inputs that share a scale."""
_LAID_OUT_AT_ONCE = 2**19  # numbers of a weight
_AT_ONCE = 512  # rows of a weight that are looked up together: each brings its block of 16


class _Product(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("kind", "inputs", "outputs")),
        *((name, c_void_p) for name in ("codes", "scales", "bias")),
    )


class _Plan(Structure):
    _fields_ = (
        *(("written", c_void_p), ("tokens", c_int64), ("units", c_void_p), ("num_units", c_int64)),
        *((name, c_void_p) for name in ("slots", "begins", "ends")),
    )


class _AttentionCall(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("queries", "keys", "values", "key_pool", "value_pool", "out")),
        *((name, c_int64) for name in ("stride", "heads", "shared", "dim")),
        ("scale", c_float),
    )


_NORMS = ("first_norm", "second_norm", "query_norm", "key_norm")


class _Layer(Structure):
    _fields_ = (
        *((name, c_void_p) for name in (*_NORMS, "key_pool", "value_pool")),
        ("plan", c_int64),
        *((name, _Product) for name in ("project", "output", "gate_up", "down")),
    )


class _Shape(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("hidden", "heads", "shared", "dim", "inner")),
        *(("eps", c_float), ("scale", c_float)),
    )


class _Scratch(Structure):
    _fields_ = tuple(
        (name, c_void_p) for name in ("normed", "rows", "mixed", "gated", "active", "codes", "scales", "sums")
    )


_SIGNATURES: dict[str, list[object]] = {
    "rms_norm": [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_float],
    "norm_and_turn": [c_void_p, c_int64, *[c_void_p] * 4, *[c_int64] * 4, c_float],
    "gated_silu": [c_void_p, c_void_p, c_int64, c_int64],
    "linear": [POINTER(_Product), c_void_p, c_int64, *[c_void_p] * 4, c_int64],
    "exponentials": [c_uint64, c_uint64, c_uint64, c_void_p, c_int64],
    "forbid": [c_void_p, c_void_p, c_int64],
    "allowed_softmax": [c_void_p, c_void_p, c_void_p, c_int64, c_float],
    "move_states": [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64],
    "paged_attention": [POINTER(_AttentionCall), POINTER(_Plan)],
    "run_layers": [
        *(POINTER(_Layer), c_int64, POINTER(_Shape), POINTER(_Plan)),
        *(c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_int64), c_int64, POINTER(_Scratch)),
    ],
}


def load(folder: Path) -> ctypes.CDLL | None:
    """The library in ``folder``; ``None`` if there is none, or if it was built from older sources or for another machine.

    Masks, recurrent states and noise are for any CPU; ``library.usable(1)`` says whether all the rest runs: 2 with AVX512's dot
    products, 1 with AVX2.
    """
    for path in sorted(folder.glob("_kernels*.so")):
        try:
            library = ctypes.CDLL(str(path))  # PyTorch's OpenMP runtime is loaded already, and serves this library too
        except OSError:
            continue
        if not all(hasattr(library, name) for name in ("usable", *_SIGNATURES)):
            continue
        library.usable.argtypes, library.usable.restype = [c_int64], c_int64
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        return library
    return None


_library = load(Path(__file__).parent)
is_built = _library is not None
"""Whether the library was built, from these sources; masks, recurrent states and noise need no more."""
_usable = 0 if _library is None else _library.usable(1)
available = _usable > 0
"""Whether it was, and its products run on this CPU."""
has_dot_products = _usable > 1
"""Whether they have AVX512's for bf16 and for whole numbers (VNNI)."""


def functions() -> ctypes.CDLL:
    """The library, where it was built."""
    assert _library is not None, "ask native.available or native.is_built first"
    return _library


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


# -- rows ---------------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight [H] · x / rms(x)`` of contiguous ``x [..., H]``, rounded before and after the weight."""
    out = torch.empty_like(x)
    size = x.shape[-1]
    functions().rms_norm(x.data_ptr(), size, weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps)
    return out


def norm_and_turn(
    x: Tensor, norms: tuple[Tensor, Tensor] | None, cos: Tensor, sin: Tensor, heads: int, shared: int, eps: float
) -> None:
    """Norm and rotary embedding, in place, of the first ``heads`` and the next ``shared`` heads of ``x [T, more · d]``.

    ``norms`` are the weights ``[d]`` of queries and keys; ``cos`` and ``sin`` are ``[T, d]`` in the half-split layout.
    """
    of_queries, of_keys = norms or (None, None)
    functions().norm_and_turn(
        *(x.data_ptr(), x.stride(0), _pointer(of_queries), _pointer(of_keys), cos.data_ptr(), sin.data_ptr()),
        *(len(x), heads, shared, cos.shape[-1], eps),
    )


def gated_silu(x: Tensor) -> Tensor:
    """``silu(gate) · up [T, I]`` of both side by side, ``x [T, 2 · I]``."""
    out = x.new_empty(len(x), x.shape[1] // 2)
    functions().gated_silu(x.data_ptr(), out.data_ptr(), len(x), out.shape[1])
    return out


# -- products -----------------------------------------------------------------------------------------------------------


def fits(weight: Tensor, kind: Weights) -> bool:
    """Whether the products take a weight ``[out, in]``."""
    return available and weight.dtype == torch.bfloat16 and weight.shape[1] % (32 if kind == "bf16" else GROUP) == 0


class Codes(NamedTuple):
    """A weight in whole numbers: ``codes [out, in]`` (int8), in int4 from −8 to 7, and fp32 ``scales``.

    int8 has ``[out]`` of these, int4 ``[out, in / 64]``.
    """

    codes: Tensor
    scales: Tensor


class WeightSource(Protocol):
    """A weight ``[out, in]`` in bf16 whose rows are read some after others: a tensor is one, and so is a product."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, rows: slice, /) -> Tensor: ...


class Product:
    """``x @ weight.T + bias`` for ``weight [out, in]`` and ``bias [out]`` in bf16, of which it holds a copy laid out anew.

    int8 has a scale for every output, int4 one for every 64 inputs of an output. Both meet inputs in int8 that have a scale
    for every 64 inputs of a row.
    """

    def __init__(self, weight: WeightSource, bias: Tensor | None, kind: Weights, stored: Codes | None = None) -> None:
        """``stored`` are codes of that kind that the weight is already in; otherwise it is rounded to some."""
        self.kind = kind
        self.shape = self.outputs, self.inputs = int(weight.shape[0]), int(weight.shape[1])
        self._codes, self._scales = _lay_out(weight, kind, stored)
        self._bias = None if bias is None else bias.bfloat16().contiguous()
        number = ("bf16", "int8", "int4").index(kind)
        self.struct = _Product(
            number, self.inputs, self.outputs, *map(_pointer, (self._codes, self._scales, self._bias))
        )

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, out]`` of ``x [T, in]`` in bf16; leading dimensions stay."""
        assert x.dtype == torch.bfloat16, f"products take bf16, not {x.dtype}"
        rows = x.reshape(-1, self.inputs)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = torch.empty((len(rows), self.outputs), dtype=torch.bfloat16)
        if len(rows):
            scratch = _code_scratch(len(rows), self.inputs) if self.kind != "bf16" else (None, None, None)
            functions().linear(
                *(
                    byref(self.struct),
                    rows.data_ptr(),
                    rows.stride(0),
                    *map(_pointer, scratch),
                    out.data_ptr(),
                    len(rows),
                )
            )
        return out.view(*x.shape[:-1], self.outputs)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows ``[..., in]`` of the weight, as the product has it, for ``indices [...]``: an embedding's lookup."""
        if indices.numel() > _AT_ONCE:
            parts = [self.rows(part) for part in torch.split(indices.reshape(-1), _AT_ONCE)]
            return torch.cat(parts).view(*indices.shape, self.inputs)
        block, place = indices // BLOCK, indices % BLOCK
        together = 2 if self.kind == "bf16" else 4
        if self.kind == "int4":
            pairs = self._codes[block].reshape(*indices.shape, -1, BLOCK, together).movedim(-2, -3)
            pairs = _picked(pairs, place)
            codes = torch.stack((pairs & 15, pairs >> 4), dim=-2).flatten(-3).float() - 8
        else:
            codes = _picked(self._codes[block].movedim(-2, -3), place).flatten(-2)
        if self.kind == "bf16":
            return codes
        assert self._scales is not None
        if self.kind == "int8":
            return ((codes.float() - 128) * self._scales[indices, None]).bfloat16()
        scales = _picked(self._scales[block].movedim(-1, -2), place)
        grouped = codes.reshape(*indices.shape, -1, GROUP) * scales[..., None]
        return grouped.flatten(-2).to(torch.bfloat16)

    def __getitem__(self, rows: slice) -> Tensor:
        """Rows ``[n, in]`` of the weight, as the product has it; the first of them is the first of a block of 16."""
        first, last, _ = rows.indices(self.outputs)
        assert first % BLOCK == 0, f"row {first} is within a block"
        blocks = slice(first // BLOCK, -(-last // BLOCK))
        codes = self._codes[blocks]
        if self.kind == "int4":
            pairs = torch.stack((codes & 15, codes >> 4), dim=2)
            codes = pairs.reshape(len(codes), -1, BLOCK, 4)
        together = codes.transpose(1, 2).reshape(-1, self.inputs)[: last - first]
        if self.kind == "bf16":
            return together
        assert self._scales is not None
        if self.kind == "int8":
            return ((together.float() - 128) * self._scales[first:last, None]).bfloat16()
        scales = self._scales[blocks].transpose(1, 2).reshape(-1, self.inputs // GROUP)[: last - first]
        return ((together.float() - 8).view(len(scales), -1, GROUP) * scales[..., None]).flatten(1).bfloat16()

    def weight(self) -> Tensor:
        """The whole weight ``[out, in]``, as the product has it."""
        return self[: self.outputs]


def _picked(rows: Tensor, place: Tensor) -> Tensor:
    """Entry ``place [...]`` of dimension ``place.dim()`` of ``rows``, whose dimensions before it are those of ``place``."""
    index = place.reshape(*place.shape, *[1] * (rows.dim() - place.dim())).expand(
        *place.shape, 1, *rows.shape[place.dim() + 1 :]
    )
    return rows.gather(place.dim(), index).squeeze(place.dim())


def _code_scratch(rows: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the codes of inputs, their scales and their sums."""
    groups = inputs // GROUP
    return (
        torch.empty(rows * inputs, dtype=torch.int8),
        torch.empty(rows * groups),
        torch.empty(rows * groups, dtype=torch.int32),
    )


def _blocks(codes: Tensor, together: int) -> Tensor:
    """``[out, in]`` as ``[out / 16, in / together, 16, together]``."""
    outputs, inputs = codes.shape
    return codes.view(outputs // BLOCK, BLOCK, inputs // together, together).transpose(1, 2).contiguous()


def _lay_out_int8(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    return _blocks((codes.to(torch.int16) + 128).to(torch.uint8), 4), scales


def _lay_out_int4(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    blocks = _blocks((codes + 8).to(torch.uint8), 4)
    pairs = blocks.view(len(blocks), -1, 2, BLOCK * 4)  # a byte has the codes of one quad of inputs and of the next
    grouped = scales.view(len(blocks), BLOCK, -1).transpose(1, 2).contiguous()
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).contiguous(), grouped


def _padded(rows: Tensor) -> Tensor:
    """``rows`` and zeros, as many as blocks need."""
    return torch.cat((rows, rows.new_zeros(-len(rows) % BLOCK, *rows.shape[1:])))


def _laid_out(weight: Tensor, kind: Weights, stored: Codes | None) -> tuple[Tensor, Tensor | None]:
    """Some rows of a weight."""
    if kind == "bf16":
        return _blocks(_padded(weight), 2), None
    quantise, lay_out = (quantise_int8, _lay_out_int8) if kind == "int8" else (quantise_int4, _lay_out_int4)
    codes, scales = quantise(_padded(weight)) if stored is None else map(_padded, stored)
    return lay_out(codes, scales)


def _lay_out(weight: WeightSource, kind: Weights, stored: Codes | None = None) -> tuple[Tensor, Tensor | None]:
    """Codes and scales of ``weight [out, in]``, made of some rows after others: quantising takes many times their memory."""
    whole: tuple[Tensor | None, ...] = ()
    outputs, inputs = weight.shape
    blocks, step = -(-outputs // BLOCK), max(_LAID_OUT_AT_ONCE // inputs // BLOCK, 1) * BLOCK
    for first in range(0, outputs, step):
        rows = slice(first, min(first + step, outputs))
        own = -(-(rows.stop - first) // BLOCK)
        parts = _laid_out(weight[rows], kind, stored and Codes(*(part[rows] for part in stored)))
        if not whole:
            whole = tuple(x if x is None else x.new_empty(blocks * len(x) // own, *x.shape[1:]) for x in parts)
        for x, part in zip(whole, parts, strict=True):
            if x is not None and part is not None:
                begin = first // BLOCK * len(part) // own
                x[begin : begin + len(part)] = part
    codes, scales = whole
    assert codes is not None
    return codes, scales


def quantise_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[out, in]`` and scales ``[out]``; a weight is about its code times its output's scale."""
    values = weight.float()
    scales = (values.abs().amax(dim=1) / 127).clamp_min(1e-30)
    return (values / scales[:, None]).round().to(torch.int8), scales


def quantise_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[out, in]`` from −8 to 7 and scales ``[out, in / 64]``, of nine scales that with the least squared error."""
    values = weight.float().view(len(weight), -1, GROUP)
    place = values.abs().argmax(dim=-1, keepdim=True)
    extreme = values.gather(-1, place)
    best_codes, best_scales = torch.zeros_like(values), torch.ones_like(extreme)
    least = torch.full_like(extreme, torch.inf)
    for steps in torch.linspace(-9.5, -6.5, 9).tolist():  # the largest weight becomes about −8, which has no opposite
        scales = extreme / steps
        scales = torch.where(scales.abs() < 1e-30, 1e-30, scales)
        codes = (values / scales).round().clamp(-8, 7)
        error = (codes * scales - values).square().sum(-1, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        best_codes, best_scales = torch.where(better, codes, best_codes), torch.where(better, scales, best_scales)
    return best_codes.to(torch.int8).view(weight.shape), best_scales[..., 0].contiguous()


# -- attention ----------------------------------------------------------------------------------------------------------


def attends(heads: int, shared: int, dim: int) -> bool:
    """Whether the kernel has room for heads ``[dim]`` of which ``heads / shared`` share K and V."""
    return dim % 16 == 0 and dim <= 256 and heads <= 32 * shared


class AttentionPlan:
    """Which tokens of a batch see which slots of a pool, worked out once for all layers that see alike.

    ``written [T]``: the slot of each token's own K and V. ``units [U, 5]``: first token, tokens, first entry in ``slots``,
    entries, and the position of the first of them. ``begins``, ``ends`` ``[T]``: the positions a token sees. All int64.
    """

    def __init__(self, written: Tensor, units: Tensor, slots: Tensor, begins: Tensor, ends: Tensor) -> None:
        self._tensors = (written, units, slots, begins, ends)  # the struct points into them
        self.struct = _Plan(
            *(written.data_ptr(), len(written), units.data_ptr(), len(units)),
            *(slots.data_ptr(), begins.data_ptr(), ends.data_ptr()),
        )

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, key_pool: Tensor, value_pool: Tensor, scale: float
    ) -> Tensor:
        """Store ``keys`` and ``values`` ``[T, shared, d]`` in the pools ``[slots, shared, d]``, then attend with ``queries
        [T, heads, d]``; the result has their shape. All three have one stride from token to token, and none within.
        """
        out = torch.empty(queries.shape, dtype=torch.bfloat16)
        call = _AttentionCall(
            *map(_pointer, (queries, keys, values, key_pool, value_pool, out)),
            *(queries.stride(0), queries.shape[1], keys.shape[1], queries.shape[2], scale),
        )
        functions().paged_attention(byref(call), byref(self.struct))
        return out


# -- decoder layers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerShape:
    hidden: int
    heads: int
    shared: int
    """Heads of K and V."""
    dim: int
    inner: int
    """Size of the gated activation."""
    eps: float
    scale: float


P = TypeVar("P", bound=Callable[[Tensor], Tensor])


@dataclass(frozen=True)
class LayerWeights(Generic[P]):
    """Weights ``[H]`` or ``[d]`` of the norms, and the products: q, k and v; attention's output; gate and up; down."""

    first_norm: Tensor
    second_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    project: P
    output: P
    gate_up: P
    down: P

    @property
    def norms(self) -> tuple[Tensor, Tensor] | None:
        """Those of queries and keys, if there are any."""
        return None if self.query_norm is None or self.key_norm is None else (self.query_norm, self.key_norm)

    @property
    def products(self) -> tuple[P, ...]:
        return self.project, self.output, self.gate_up, self.down


class Decoder:
    """Layers of one shape that run one after another in one call."""

    def __init__(self, layers: Sequence[LayerWeights[Product]], shape: LayerShape) -> None:
        self._layers, self._shape = tuple(layers), shape
        self._array = (_Layer * len(layers))()
        for struct, layer in zip(self._array, layers, strict=True):
            for name in _NORMS:
                setattr(struct, name, _pointer(getattr(layer, name)))
            for name in ("project", "output", "gate_up", "down"):
                setattr(struct, name, getattr(layer, name).struct)
        self._struct = _Shape(shape.hidden, shape.heads, shape.shared, shape.dim, shape.inner, shape.eps, shape.scale)
        self._room: tuple[int, _Scratch, list[Tensor]] = (0, _Scratch(), [])

    def place(self, keys: Sequence[Tensor], values: Sequence[Tensor], plans: Sequence[int]) -> None:
        """Where each layer's K and V lie, ``[slots, shared, d]``, and which of a pass's plans it attends by."""
        for struct, *pools, plan in zip(self._array, keys, values, plans, strict=True):
            struct.key_pool, struct.value_pool = map(_pointer, pools)
            struct.plan = plan

    def run(
        self, states: Tensor, cos: Tensor, sin: Tensor, plans: Sequence[AttentionPlan], tapped: Sequence[int] = ()
    ) -> Tensor:
        """States ``[T, H]``, contiguous, through all layers in place; ``cos`` and ``sin`` are ``[T, d]``.

        Returns the states after the layers ``tapped``, -1 being before the first: ``[T, len(tapped) · H]``.
        """
        structs = (_Plan * len(plans))(*(plan.struct for plan in plans))
        features = states.new_empty(len(states), len(tapped) * states.shape[1])
        functions().run_layers(
            *(self._array, len(self._layers), byref(self._struct), structs),
            *(states.data_ptr(), cos.data_ptr(), sin.data_ptr()),
            *(features.data_ptr(), (c_int64 * len(tapped))(*tapped), len(tapped), byref(self._scratch(len(states)))),
        )
        return features

    def _scratch(self, tokens: int) -> _Scratch:
        if tokens > self._room[0]:
            hidden, inner, heads = self._shape.hidden, self._shape.inner, self._shape.heads * self._shape.dim
            widest = max(hidden, inner, heads)
            widths = (hidden, heads + 2 * self._shape.shared * self._shape.dim, heads, 2 * inner, inner)
            room = [torch.empty(tokens * width, dtype=torch.bfloat16) for width in widths]
            room += _code_scratch(tokens, -(-widest // GROUP) * GROUP)
            self._room = (tokens, _Scratch(*map(_pointer, room)), room)
        return self._room[1]
