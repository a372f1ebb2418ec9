"""Products with fixed weights on a CPU: bf16, or int8 and int4 codes of it, laid out once as the machine reads them fastest."""

from collections.abc import Callable, Sequence
from typing import TypeGuard, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from volley import native
from volley.errors import ConfigError, unknown_key
from volley.models.layers.residency import MappedFiles, StackedRows
from volley.native import WantedDraftWeights, Weights
from volley.native.formats import CodeSource, stacked

Product = Callable[[Tensor], Tensor]
"""``x [..., in] -> [..., out]``, both bf16."""
_ROWS = 16  # the number of rows oneDNN lays weights out for; others work as well


def is_linear(module: object) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer and nothing else: one that rounds its inputs has a ``forward`` of its own."""
    return type(module) is nn.Linear and "forward" not in vars(module)


def check_weights(weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse codes where nothing multiplies with them."""
    if weights not in get_args(Weights):
        raise unknown_key("kind of weights", str(weights), get_args(Weights))
    if weights != "bf16" and dtype != torch.bfloat16:
        raise ConfigError(f"weights={weights!r} are codes of bf16 weights; load the model with dtype bf16")
    if weights != "bf16" and not (native.available and device.type == "cpu"):
        raise ConfigError(
            f"weights={weights!r} needs an x86-64 CPU with AVX2, and volley's kernels, which are built when it is "
            "installed where there is a C compiler; use weights='bf16' here"
        )


def choose_draft_weights(
    weights: WantedDraftWeights, head: Tensor | native.Product, device: torch.device, dtype: torch.dtype
) -> Weights:
    """How the weights of a drafter are kept beside a target's ``head [V, H]``; codes where nothing multiplies are refused.

    "auto" is the target's own kind where that is codes, whose head then serves both. Beside bf16 it is int8 where the CPU
    multiplies whole numbers as fast as it reads them; with AVX2 alone bf16 is faster, and on a GPU it is what all have.
    """
    if weights != "auto":
        if weights not in get_args(Weights):
            raise unknown_key("kind of draft weights", str(weights), ("auto", *get_args(Weights)))
        check_weights(weights, device, dtype)
        return weights
    if not native.available or device.type != "cpu" or dtype != torch.bfloat16:
        return "bf16"
    if isinstance(head, native.Product) and head.kind != "bf16":
        return head.kind
    return "int8" if native.has_dot_products else "bf16"


StoredCodes = list[tuple[CodeSource, int]]
"""Codes of weights one below the other, and the outputs of each; empty if they are in none."""


def codes_of(layers: Sequence[nn.Linear | nn.Embedding]) -> StoredCodes:
    """The codes that the weights of several layers are stored in, one below the other; none unless all are.

    ``models/quantised/stored_codes.py`` and ``models/gguf/codes.py`` let layers know theirs.
    """
    asked = [getattr(layer, "stored_codes", None) for layer in layers]
    found = [(ask(), len(layer.weight)) for ask, layer in zip(asked, layers, strict=True) if ask is not None]
    known = [(codes, size) for codes, size in found if codes is not None]
    return stacked(known) if len(known) == len(layers) else []


def inputs_of(stored: StoredCodes) -> int:
    """The number of which the inputs of a weight in such codes are a multiple, or of one that is rounded."""
    return max((codes.format.inputs for codes, _ in stored), default=native.GROUP)


def make_product(
    weight: Tensor,
    bias: Tensor | None = None,
    weights: Weights = "bf16",
    stored: StoredCodes | None = None,
    files: MappedFiles | None = None,
) -> Product:
    """``x @ weight.T + bias`` of ``weight [out, in]`` and ``bias [out]`` in bf16; the result holds a copy of the weight.

    ``stored`` are codes that the weight is in already. A weight whose inputs are too few for codes, or of an odd
    number, stays bf16. On a CPU for which oneDNN has no bf16 products the copy is in fp32: PyTorch's own take three times as long
    for a block of rows. A weight in one of ``files`` leaves memory while it is copied.
    """
    weight = weight.detach()
    bias = None if bias is None else bias.detach()
    for kind in (weights, "bf16"):
        codes = stored if stored and kind != "bf16" else []
        if native.fits(weight, kind, inputs_of(codes)):
            return native.Product(StackedRows([weight], files), bias, kind, codes)
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        wide, wide_bias = weight.float(), None if bias is None else bias.float()
        return lambda x: linear(x.float(), wide, wide_bias).bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)

    def product(x: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return output

    return product


def has_bf16_products() -> bool:
    """Whether products in bf16 have weights in bf16 on a CPU."""
    return native.available or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def recoded_head(head: Tensor | native.Product, weights: Weights) -> native.Product | None:
    """A target's head ``[V, H]`` in codes; ``None`` where it is in them already, or has too few inputs for them."""
    if isinstance(head, native.Product):
        fits = head.inputs % native.GROUP == 0
        return native.Product(head, None, weights) if fits and head.kind != weights else None
    return native.Product(head, None, weights) if native.fits(head, weights) else None
