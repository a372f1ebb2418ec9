"""Fewer and cheaper operations for small bf16 models on a CPU, where a call costs more than its arithmetic.

Projections that read the same input (``q_proj, k_proj, v_proj``; ``gate_proj, up_proj``) become one product with a weight
that oneDNN has packed beforehand, and RMS norms written out in Python become one fused operation. Parameters stay as they
are; only the instances' ``forward`` is replaced, so the packed copies go stale if the weights are trained further.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_LARGEST_BYTES = 2**30  # beyond it a pass is bound by memory, not by calls, and packed copies would double it
_ROWS = 16  # the number of rows the weights are packed for; others work as well


def packing_pays(weights: Iterable[Tensor]) -> bool:
    """Whether products with such weights are bound by calls, and oneDNN can pack them."""
    weights = list(weights)
    small = all(w.device.type == "cpu" and w.dtype == torch.bfloat16 for w in weights)
    small = small and sum(w.nbytes for w in weights) <= _LARGEST_BYTES
    return small and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def pack(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The bias-free linear map of a copy of ``weight [out, in]`` in oneDNN's own layout."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)

    def project(x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        return product

    return project


class SharedProjection:
    """Several bias-free linear layers over one input, computed together when the first of them is asked."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.together = pack(torch.cat([layer.weight.detach() for layer in layers]))
        self.sizes = [layer.out_features for layer in layers]
        self.input: Tensor | None = None
        self.outputs: tuple[Tensor, ...] = ()

    def project(self, x: Tensor, index: int) -> Tensor:
        if x is not self.input:
            product = self.together(x)
            self.outputs = torch.split(product, self.sizes, dim=-1) if len(self.sizes) > 1 else (product,)
            self.input = x
        output = self.outputs[index]
        if index == len(self.sizes) - 1:  # layers are called in order, so no result outlives a pass
            self.input, self.outputs = None, ()
        return output


def accelerate(model: nn.Module) -> bool:
    """Replace forwards in place where that pays; True if anything was replaced."""
    if not packing_pays(model.parameters()):
        return False
    done: set[nn.Module] = set()
    for module in model.modules():
        for names in SIBLINGS:
            layers = [getattr(module, name, None) for name in names]
            if all(_is_plain(layer) for layer in layers):
                _share([layer for layer in layers if isinstance(layer, nn.Linear)])
                done.update(layer for layer in layers if layer is not None)
    for module in model.modules():
        if module not in done and isinstance(module, nn.Linear) and _is_plain(module):
            _share([module])
        elif type(module).__name__.endswith("RMSNorm"):
            _fuse_norm(module)
    return True


def _is_plain(layer: object) -> bool:
    return type(layer) is nn.Linear and layer.bias is None


def _share(layers: Sequence[nn.Linear]) -> None:
    shared = SharedProjection(layers)
    for index, layer in enumerate(layers):

        def forward(x: Tensor, index: int = index) -> Tensor:
            return shared.project(x, index)

        layer.forward = forward  # type: ignore[method-assign, assignment]


def _fuse_norm(norm: nn.Module) -> None:
    """Use the fused norm if it computes what this module computes (Gemma's, for one, scales by 1 + weight)."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, Tensor) or not isinstance(eps, float):
        return
    scale, shape = weight.detach(), weight.shape

    def forward(x: Tensor) -> Tensor:
        return rms_norm(x, shape, scale, eps)

    with torch.no_grad():
        probe = torch.linspace(-2, 3, 4 * shape[0], dtype=weight.dtype).view(4, -1)
        if torch.allclose(forward(probe).float(), norm(probe).float(), rtol=2**-6, atol=2**-6):
            norm.forward = forward
