"""Fewer and cheaper operations for bf16 models on a CPU. Only the instances' ``forward`` is replaced.

Decoder layers of the Llama and Qwen kind run on volley's own kernels (:mod:`volley.models.fused`). In others, projections
that read the same input (``q_proj, k_proj, v_proj``; ``gate_proj, up_proj``) become one product with a weight laid out for
the machine, and RMS norms written out in Python become one operation. What is replaced holds copies of the weights, which go
stale if these are trained further.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from volley import native
from volley.models.fused import LINEAR, FusedLayer
from volley.models.products import make_product
from volley.native import Weights

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def packing_pays(*weights: Tensor) -> bool:
    """Whether products with such weights are computed by oneDNN or volley, which lay them out."""
    on_cpu = all(w.device.type == "cpu" and w.dtype == torch.bfloat16 for w in weights)
    return on_cpu and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


class SharedProjection:
    """Several bias-free linear layers over one input, computed together when the first of them is asked."""

    def __init__(self, layers: Sequence[nn.Linear], weights: Weights = "bf16") -> None:
        self.together = make_product(torch.cat([layer.weight.detach() for layer in layers]), weights=weights)
        self.sizes = [layer.out_features for layer in layers]
        self.input: Tensor | None = None
        self.outputs: tuple[Tensor, ...] = ()

    def project(self, x: Tensor, index: int) -> Tensor:
        if x is not self.input:
            self.outputs = torch.split(self.together(x), self.sizes, dim=-1)
            self.input = x
        output = self.outputs[index]
        if index == len(self.sizes) - 1:  # layers are called in order, so no result outlives a pass
            self.input, self.outputs = None, ()
        return output


def accelerate(model: nn.Module, weights: Weights = "bf16", *, release: bool = False) -> bool:
    """Replace forwards in place where that pays; True if anything was replaced.

    Linear layers compute with ``weights`` of that kind. With ``release`` the weights that only they read are given up, layer
    by layer, so that memory holds each once; the model cannot be saved or trained any more.
    """
    if not packing_pays(*model.parameters()):
        return False
    done = _fuse_layers(model, weights, release)
    for module in model.modules():
        if module in done:
            continue
        for names in SIBLINGS:
            layers = [getattr(module, name, None) for name in names]
            if all(_is_plain(layer) for layer in layers):
                _share([layer for layer in layers if isinstance(layer, nn.Linear)], weights, release)
                done.update(layer for layer in layers if layer is not None)
    embeddings = [module for module in model.modules() if type(module) is nn.Embedding]
    for module in list(model.modules()):
        if module not in done and isinstance(module, nn.Linear) and _is_plain(module):
            _replace(module, [e for e in embeddings if e.weight is module.weight], weights, release)
        elif type(module).__name__.endswith("RMSNorm"):
            _fuse_norm(module)
    return True


def _is_plain(layer: object) -> bool:
    return type(layer) is nn.Linear and layer.bias is None


def weight_bytes(model: nn.Module) -> int:
    """Memory of a model's weights, of those included that replaced layers hold. A drafter's may be there twice."""
    held = sum(weight.nbytes for weight in model.parameters() if weight.device.type != "meta")
    products: set[native.Product] = set()
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, native.Product):
            products.add(forward)
        elif isinstance(forward, FusedLayer):
            products.update(forward.weights.products)
    fused: Any = getattr(model, "fused", None)
    for layer in fused[0] if fused else ():
        products.update(layer.products)
    return held + sum(product.nbytes for product in products)


def _fuse_layers(model: nn.Module, weights: Weights, release: bool) -> set[nn.Module]:
    """Fuse the decoder layers that can be; returns these and all modules in them."""
    done: set[nn.Module] = set()
    layers, rotary = getattr(_decoder(model), "layers", None), getattr(_decoder(model), "rotary_emb", None)
    if not (native.available and isinstance(layers, nn.ModuleList) and isinstance(rotary, nn.Module)):
        return done
    for layer in layers:
        fused = FusedLayer.of(layer, rotary, weights)
        if fused is None:
            continue
        layer.forward = fused
        done.update(layer.modules())
        if release:
            for name in LINEAR:
                _release(layer.get_submodule(name))
    return done


def _decoder(model: Any) -> Any:
    return model.get_decoder() if hasattr(model, "get_decoder") else model


def _release(layer: nn.Module) -> None:
    """Give up a layer's weight; its shape stays known."""
    weight = layer.get_parameter("weight")
    layer.weight = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)


def _share(layers: Sequence[nn.Linear], weights: Weights, release: bool) -> None:
    shared = SharedProjection(layers, weights)
    for index, layer in enumerate(layers):

        def forward(x: Tensor, index: int = index) -> Tensor:
            return shared.project(x, index)

        layer.forward = forward  # type: ignore[method-assign, assignment]
        if release:
            _release(layer)


def _replace(layer: nn.Linear, tied: Sequence[nn.Embedding], weights: Weights, release: bool) -> None:
    """One linear layer, whose weight may be that of an embedding as well."""
    product = make_product(layer.weight, weights=weights)
    layer.forward = product  # type: ignore[method-assign, assignment]
    if not release or (tied and not isinstance(product, native.Product)):
        return
    for embedding in tied:
        assert isinstance(product, native.Product)
        embedding.forward = product.rows  # type: ignore[method-assign, assignment]
    for module in (layer, *tied):
        _release(module)


def _fuse_norm(norm: nn.Module) -> None:
    """Use the fused norm if it computes what this module computes (Gemma's, for one, scales by 1 + weight)."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, Tensor) or not isinstance(eps, float):
        return
    scale, shape = weight.detach(), weight.shape

    def forward(x: Tensor) -> Tensor:
        if native.available and x.is_contiguous() and x.dtype == scale.dtype:
            return native.rms_norm(x, scale, eps)
        return rms_norm(x, shape, scale, eps)

    with torch.no_grad():
        probe = torch.linspace(-2, 3, 4 * shape[0], dtype=weight.dtype).view(4, -1)
        if torch.allclose(forward(probe).float(), norm(probe).float(), rtol=2**-6, atol=2**-6):
            norm.forward = forward
