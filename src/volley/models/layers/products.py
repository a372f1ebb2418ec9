"""Matmuls with fixed weights on a CPU: bf16, int8 or int4, packed once for the machine."""

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from volley import native
from volley.errors import ConfigError, unknown_key
from volley.models.layers.host_memory import MappedFiles, StackedRows
from volley.native import WantedDraftWeights, Weights
from volley.native.packing import CodeSource, stacked

Product = Callable[[Tensor], Tensor]
"""Map ``x [..., in] -> [..., out]``, both bf16."""
_ROWS = 16  # number of rows for which oneDNN packs weights; other numbers work as well


def is_linear(module: object) -> TypeGuard[nn.Linear]:
    """Return whether a module is a plain linear layer; a layer that quantises its inputs has a ``forward`` of its own."""
    return type(module) is nn.Linear and "forward" not in vars(module)


def check_weights(weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse quantised weights that no kernel here supports."""
    if weights not in get_args(Weights):
        raise unknown_key("kind of weights", str(weights), get_args(Weights))
    if weights != "bf16" and dtype != torch.bfloat16:
        raise ConfigError(f"weights={weights!r} quantises bf16 weights; load the model with dtype bf16")
    if weights != "bf16" and not (native.available and device.type == "cpu"):
        raise ConfigError(
            f"weights={weights!r} needs an x86-64 CPU with AVX2, and volley's kernels, which are built when it is "
            "installed where there is a C compiler; use weights='bf16' here"
        )


def choose_draft_weights(
    weights: WantedDraftWeights, head: Tensor | native.Product, device: torch.device, dtype: torch.dtype
) -> Weights:
    """Return the format of a drafter's weights beside a target's ``head [V, H]``; refuse one that no kernel here supports.

    "auto" takes the target's format if that is quantised, so both share the head. Beside a bf16 target it is int8 if the CPU
    has fast integer dot products. With AVX2 alone, and on a GPU, it is bf16.
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
"""Codes of stacked weights, with the number of outputs of each; empty if the weights are not stored in codes."""


def codes_of(layers: Sequence[nn.Linear | nn.Embedding], weights: Weights | None = None) -> StoredCodes:
    """Return the stored codes of several layers' weights, stacked; none unless all layers have them.

    ``models/quantised/stored_codes.py`` and ``models/gguf/codes.py`` attach them to layers. bf16 ``weights`` take small floats
    alone, which become the same bf16 numbers in a matmul.
    """
    if weights == "bf16" and not all(getattr(layer, "codes_are_wide", False) for layer in layers):
        return []
    asked = [getattr(layer, "stored_codes", None) for layer in layers]
    found = [(ask(), len(layer.weight)) for ask, layer in zip(asked, layers, strict=True) if ask is not None]
    known = [(codes, size) for codes, size in found if codes is not None]
    return stacked(known) if len(known) == len(layers) else []


def inputs_of(stored: StoredCodes) -> int:
    """Return the number of which the inputs must be a multiple, for weights in such codes or weights that are quantised."""
    return max((codes.format.inputs for codes, _ in stored), default=native.GROUP)


def make_product(
    weight: Tensor,
    bias: Tensor | None = None,
    weights: Weights = "bf16",
    stored: StoredCodes | None = None,
    files: MappedFiles | None = None,
) -> Product:
    """Make ``x @ weight.T + bias`` of ``weight [out, in]`` and ``bias [out]`` in bf16, with a copy of the weight.

    ``stored`` are codes of the weight, if it has them. A weight whose number of inputs does not suit codes stays bf16. If oneDNN
    has no bf16 matmul for this CPU the copy is in fp32, because PyTorch's bf16 matmul takes three times as long for a block of
    rows. A weight in one of ``files`` leaves memory while it is copied.
    """
    weight = weight.detach()
    bias = None if bias is None else bias.detach()
    for kind in (weights, "bf16"):
        is_wide = stored and all(own.format.is_wide for own, _ in stored)
        codes = stored if stored and (kind != "bf16" or is_wide) else []
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


class RoundedInputs:
    """Forward of a layer of compressed-tensors that rounds its inputs, with ``product`` instead of the layer's weight."""

    def __init__(self, layer: nn.Linear, product: native.Product) -> None:
        self.layer, self.product = layer, product

    def __call__(self, x: Tensor) -> Tensor:
        from compressed_tensors.quantization.lifecycle.forward import forward_quantize

        scheme: Any = self.layer.quantization_scheme
        if scheme.input_activations is not None:
            x = forward_quantize(self.layer, x, "input", scheme.input_activations)
        found = self.product(x)
        if scheme.output_activations is None:
            return found
        rounded: Tensor = forward_quantize(self.layer, found, "output", scheme.output_activations)
        return rounded


def has_bf16_products() -> bool:
    """Return whether bf16 matmuls on this CPU keep their weights in bf16."""
    return native.available or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def recoded_head(head: Tensor | native.Product, weights: Weights) -> native.Product | None:
    """Quantise a target's head ``[V, H]``; ``None`` if it has this format already, or too few inputs."""
    if isinstance(head, native.Product):
        fits = head.inputs % native.GROUP == 0
        return native.Product(head, None, weights) if fits and head.kind != weights else None
    return native.Product(head, None, weights) if native.fits(head, weights) else None
