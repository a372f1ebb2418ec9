"""Acceleration of a loaded model by fewer and cheaper operations. Only the instances' ``forward`` is replaced.

On a GPU the projections of Llama-like and Qwen-like decoder layers are merged (:mod:`volley.models.layers.merged`). The rest is
for a CPU. In bf16, decoder layers with gated MLPs run on volley's own kernels (:mod:`volley.models.layers.fused`). In other
layers, projections of the same input (``q_proj, k_proj, v_proj``; ``gate_proj, up_proj``) become one matmul with a packed
weight. RMS norms written in Python become one operation. Experts take half as many, in fp32 too. The replacements hold copies of
the weights, which do not follow further training.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from volley import native
from volley.memory import kernels
from volley.models.layers.embeddings import EmbeddingLookup, scale_of
from volley.models.layers.experts import CodedExperts, group_experts
from volley.models.layers.fingerprint import sample
from volley.models.layers.fused import FusedLayer, LayerParts, layers_with_rotary
from volley.models.layers.host_memory import MappedFiles, StackedRows, trim
from volley.models.layers.merged import merge_layers
from volley.models.layers.norms import STYLES, eps_of, style_of
from volley.models.layers.products import (
    Product,
    RoundedInputs,
    codes_of,
    has_bf16_products,
    inputs_of,
    is_linear,
    make_product,
)
from volley.models.layers.routed import WEIGHTS, GatedExperts
from volley.native import Weights
from volley.native.decoder import ChosenExperts

log = logging.getLogger("volley")


class Fill(Protocol):
    """Function that loads the weights of a module that are on the meta device."""

    def __call__(self, module: nn.Module, /, *, coded: bool = True) -> None:
        """Load the weights of ``module``; without ``coded``, those that have stored codes stay on the meta device."""


_MOST = 0.9  # share of the numbers in a model's matrices
_READS_ITS_CLASSIFIER = {"LongcatFlashTopkRouter"}
"""Classes of modules that read the weight of their linear layer directly."""
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def filled(_: nn.Module, /, *, coded: bool = True) -> None:
    """Do nothing, because all weights are loaded."""


def packing_pays(*weights: Tensor) -> bool:
    """Return whether oneDNN or volley computes matmuls with such weights, for which packing pays."""
    on_cpu = all(w.device.type == "cpu" and w.dtype == torch.bfloat16 for w in weights)
    return on_cpu and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


class SharedProjection:
    """Several bias-free linear layers over one input, computed together when the first of them is called."""

    def __init__(self, layers: Sequence[nn.Linear], together: Product) -> None:
        """Take the layers and ``together``, the matmul with their stacked weights."""
        self.together = together
        self.sizes = [layer.out_features for layer in layers]
        self.kept: tuple[Tensor, tuple[Tensor, ...]] | None = None
        """Last input and its outputs, set in one assignment: engines that share a target may run in several threads."""

    def project(self, x: Tensor, index: int) -> Tensor:
        kept = self.kept
        if kept is None or kept[0] is not x:
            kept = x, torch.split(self.together(x), self.sizes, dim=-1)
        is_last = index == len(self.sizes) - 1  # layers are called in order, so the last call drops the result
        self.kept = None if is_last else kept
        return kept[1][index]


def accelerate(model: nn.Module, weights: Weights = "bf16", *, release: bool = False, fill: Fill = filled) -> bool:
    """Replace forwards in place where that pays; return True if anything was replaced.

    Linear layers compute with weights in the format ``weights``. ``release`` frees the original weights layer by layer, so that
    memory holds each once; the model can then be neither saved nor trained. Modules whose forward was replaced before are
    skipped. ``fill`` loads the weights of a module that are on the meta device.
    """
    if kernels.usable(next(model.parameters()).device):
        return merge_layers(model) > 0
    own = [module.weight for module in model.modules() if is_linear(module)]  # other weights may be in fp32
    if not packing_pays(*(weight for weight in own if weight.device.type != "meta" or fill is filled)):
        fill(model)
        return release and sum(_shorten(module) for module in model.modules()) > 0
    if release and not has_bf16_products():
        log.warning(
            "neither volley's kernels nor oneDNN multiply bf16 here, so weights are kept in fp32, in twice their memory; the "
            "kernels need a CPU with AVX2, and GCC when volley is installed"
        )
    files = MappedFiles() if release else None
    # The head, the largest weight, comes first: while it is copied, parts of its file stay in memory.
    done = _replace_head(model, weights, files, fill) | _replace_embedding(model, weights, files, fill)
    done |= _fuse_layers(model, weights, files, fill)
    _code_experts([module for module in model.modules() if module not in done], weights, files, fill)
    done |= {module for module in model.modules() if "forward" in vars(module)}
    reading = [module for module in model.modules() if type(module).__name__ in _READS_ITS_CLASSIFIER]
    done |= {module.get_submodule("classifier") for module in reading}
    fill(model, coded=False)
    for module in model.modules():
        if module in done:
            continue
        for names in SIBLINGS:
            layers = [getattr(module, name, None) for name in names]
            if all(_is_plain(layer) for layer in layers):
                _share([layer for layer in layers if isinstance(layer, nn.Linear)], weights, files, fill)
                done.update(layer for layer in layers if layer is not None)
    for module in list(model.modules()):
        if module not in done and is_linear(module) and (module.bias is None or codes_of([module], weights)):
            _replace(model, module, weights, files)
            done.add(module)
    fill(model)
    for module in model.modules():
        if module not in done:
            _shorten(module)
    if release:
        trim()
    if release and weights != "bf16":
        _log_share(model, weights)
    return True


def _log_share(model: nn.Module, weights: Weights) -> None:
    """Log the quantised share of a model if it is small. Embeddings do not count."""
    coded = other = 0
    for product in _products(model):
        size = product.outputs * product.inputs
        coded, other = (coded + size, other) if product.kind != "bf16" else (coded, other + size)
    for module in model.modules():
        own = [] if isinstance(module, nn.Embedding) else list(module.parameters(recurse=False))
        other += sum(weight.numel() for weight in own if weight.dim() > 1 and weight.device.type != "meta")
    share = coded / max(coded + other, 1)
    if share < _MOST:
        log.warning(
            "weights=%r: %.0f %% of the numbers in matrices became codes; the others, such as those of experts, stay bf16, in "
            "2 bytes each",
            weights,
            100 * share,
        )


def _replace_head(model: nn.Module, weights: Weights, files: MappedFiles | None, fill: Fill) -> set[nn.Module]:
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    if not isinstance(head, nn.Linear) or not _is_plain(head):
        return set()
    if not hasattr(head, "stored_codes"):  # only its stored codes are read
        fill(head)
    _replace(model, head, weights, files)
    return {head}


def _replace_embedding(model: nn.Module, weights: Weights, files: MappedFiles | None, fill: Fill) -> set[nn.Module]:
    """Quantise an embedding that is not tied to the head: keep the file's codes, or use int8 if the layers are quantised."""
    embedding = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    scale = None if embedding is None else scale_of(embedding)
    if files is None or weights == "bf16" or scale is None or not isinstance(embedding, nn.Embedding):
        return set()
    if embedding.weight.device.type == "meta" and not hasattr(embedding, "stored_codes"):
        fill(embedding)
    stored = codes_of([embedding])
    if not native.fits(embedding.weight, "int8", inputs_of(stored)):
        return set()
    rows = StackedRows([embedding.weight], files)
    embedding.forward = EmbeddingLookup(native.Product(rows, None, "int8", stored), scale)  # type: ignore[assignment]
    release_weight(embedding, files)
    return {embedding}


def _is_plain(layer: object) -> bool:
    return is_linear(layer) and layer.bias is None


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's weights, including those in replaced layers.

    A drafter may hold weights twice; all copies count.
    """
    held = sum(weight.nbytes for weight in model.parameters() if weight.device.type != "meta")
    return held + sum(product.nbytes for product in _products(model))


def _products(model: nn.Module) -> set[native.Product]:
    """Return the linear kernels with packed or quantised weights that a model computes with."""
    found: set[object] = set()
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, FusedLayer):
            found.update(forward.weights.products)
        else:
            owner = getattr(getattr(forward, "func", forward), "__self__", forward)  # of a method, or a part of one
            owner = owner.product if isinstance(owner, EmbeddingLookup | RoundedInputs) else owner
            found.update((owner.gate_up, owner.down) if isinstance(owner, CodedExperts | ChosenExperts) else ())
            found.add(owner.together if isinstance(owner, SharedProjection) else owner)
    fused: Any = getattr(model, "fused", None)
    for layer in fused[0] if fused else ():
        found.update(layer.products)
    merged: Any = getattr(model, "merged_kv", None)
    found.update(merged[:1] if merged else ())
    return {product for product in found if isinstance(product, native.Product)}


def _fuse_layers(model: nn.Module, weights: Weights, files: MappedFiles | None, fill: Fill) -> set[nn.Module]:
    """Fuse the decoder layers that can be fused; return them with all modules in them."""
    done: set[nn.Module] = set()
    for layer, rotary in layers_with_rotary(model) if native.available else ():
        _fill_for_trial(layer, fill)
        fused = FusedLayer.of(layer, rotary, weights, files)
        if fused is None:
            continue
        layer.forward = fused
        done.update(layer.modules())
        if files is not None:
            parts = LayerParts.of(layer)
            assert parts is not None
            for name in parts.linear:
                release_weight(layer.get_submodule(name), files)
            for name in () if parts.router is None else WEIGHTS:
                release_weight(layer.get_submodule("mlp.experts"), files, name)
            trim()
    return done


def _code_experts(modules: Sequence[nn.Module], weights: Weights, files: MappedFiles | None, fill: Fill) -> None:
    """Keep the stored codes of experts in layers that are not fused."""
    for module in modules:
        if not hasattr(module, "stored_experts") or "forward" in vars(module):
            continue
        fill(module, coded=False)
        experts = GatedExperts.of(module)
        if experts is None or not experts.fits(weights):
            continue
        gate_up, down = (experts.product(name, weights, files) for name in WEIGHTS)
        module.forward = ChosenExperts(gate_up, down, experts.number, experts.activation)
        if files is not None:
            for name in WEIGHTS:
                release_weight(module, files, name)
            trim()


def _fill_for_trial(layer: nn.Module, fill: Fill) -> None:
    """Load the weights of a layer that are read to fuse it: all but those of merged layers that all have stored codes."""
    fill(layer, coded=False)
    parts = LayerParts.of(layer)
    for names in () if parts is None else parts.merged:
        merged = [layer.get_submodule(name) for name in names]
        if not all(hasattr(module, "stored_codes") for module in merged):
            for module in merged:
                fill(module)


def release_weight(layer: nn.Module, files: MappedFiles, name: str = "weight") -> None:
    """Release a layer's weight; keep its shape, and a sample for its fingerprint."""
    weight = layer.get_parameter(name)
    released = nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), requires_grad=False)
    released.sample = sample(weight)  # type: ignore[attr-defined]
    files.forget(weight)
    setattr(layer, name, released)


def _share(layers: Sequence[nn.Linear], weights: Weights, files: MappedFiles | None, fill: Fill) -> None:
    stored = codes_of(layers, weights)
    if stored and all(layer.weight.is_meta for layer in layers):  # a file's codes, which suit the kernels
        shape = StackedRows([layer.weight for layer in layers], None)
        share(layers, native.Product(shape, None, weights, stored))
    else:
        for layer in layers:
            fill(layer)
        share(layers, make_product(torch.cat([layer.weight.detach() for layer in layers]), None, weights, stored))
    if files is not None:
        for layer in layers:
            release_weight(layer, files)


def share(layers: Sequence[nn.Linear], together: Product) -> None:
    """Compute linear layers that read the same input in one matmul."""
    shared = SharedProjection(layers, together)
    for index, layer in enumerate(layers):
        layer.forward = partial(shared.project, index=index)  # type: ignore[method-assign]


def _replace(model: nn.Module, layer: nn.Linear, weights: Weights, files: MappedFiles | None) -> None:
    """Replace one linear layer of ``model``, whose weight may be tied to an embedding."""
    kind = "bf16" if hasattr(layer, "stays_bf16") else weights
    product = make_product(layer.weight, layer.bias, kind, codes_of([layer], kind), files)
    layer.forward = product  # type: ignore[method-assign, assignment]
    sharing = [
        module for module in model.modules() if module is not layer and module._parameters.get("weight") is layer.weight
    ]
    scales = [(module, scale) for module in sharing if (scale := scale_of(module)) is not None]
    tied = [module for module, _ in scales]
    if files is None or (tied and not isinstance(product, native.Product)):
        return
    for embedding, scale in scales:
        assert isinstance(product, native.Product)
        embedding.forward = EmbeddingLookup(product, scale)
    for module in (layer, *tied):
        release_weight(module, files)


def _shorten(module: nn.Module) -> bool:
    """Replace the forward of a known module without a matmul of its own by one with fewer operations."""
    return _fuse_norm(module) if type(module).__name__.endswith("RMSNorm") else group_experts(module)


def _fuse_norm(norm: nn.Module) -> bool:
    """Use the fused norm if its result equals this module's."""
    weight, eps = getattr(norm, "weight", None), eps_of(norm)
    if not isinstance(weight, Tensor | None) or eps is None:
        return False
    if weight is not None and weight.device.type != "cpu":
        return False
    style = STYLES[0] if weight is None else style_of([norm])
    if style is None:
        return False
    kind = torch.float32 if weight is None else weight.dtype
    has_kernel = native.is_built if kind == torch.float32 else native.available and kind == torch.bfloat16
    if style != STYLES[0] and not has_kernel:
        return False
    scale = None if weight is None else style.scale(weight)

    def forward(x: Tensor) -> Tensor:
        if has_kernel and x.dtype == kind and x.is_cpu and x.is_contiguous():
            return native.rms_norm(x, scale, eps, rounds=style.rounds)
        return rms_norm(x, x.shape[-1:], scale, eps) if weight is None or style == STYLES[0] else style(x, weight, eps)

    dtype, size = (torch.bfloat16, 16) if weight is None else (weight.dtype, len(weight))
    rounding = max(2 * torch.finfo(dtype).eps, 1e-6)
    with torch.no_grad():
        probe = torch.linspace(-2, 3, 4 * size, dtype=dtype).view(4, -1)
        agrees = torch.allclose(forward(probe).float(), norm(probe).float(), rtol=rounding, atol=rounding)
    if agrees:
        norm.forward = forward
    return agrees
