"""FP8 and NVFP4 codes of a checkpoint, which the kernels widen to bf16 when they multiply.

A bf16 matmul with such a weight has the results of the decoded weight, bit for bit, and takes the memory of the file. So they are
kept whenever a model runs in bf16 on the kernels. Layers that round their inputs do so before, with the library's function.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from volley import native
from volley.models.layers.accelerate import release_weight
from volley.models.layers.experts import CodedExperts
from volley.models.layers.host_memory import MappedFiles
from volley.models.layers.products import RoundedInputs
from volley.models.quantised.decoded import Twins
from volley.models.quantised.packed import Stored, decode_layer, files_of_tensors
from volley.models.quantised.scheme import Quantisation
from volley.native import GROUP, Codes, Weights
from volley.weights import FORMATS

_SCALES = ("weight_scale", "weight_scale_inv")


def small_floats(quantisation: Quantisation) -> Weights | None:
    """Return the class of a config's weights if they are FP8 (int8) or NVFP4 (int4)."""
    groups = (quantisation.settings.get("config_groups") or {}).values()
    weights = [group["weights"] for group in groups if group.get("weights")]
    kinds = {
        (of.get("type"), of.get("num_bits"), of.get("group_size") if of.get("num_bits") == 4 else None)
        for of in weights
    }
    if quantisation.method == "compressed-tensors" and kinds == {("float", 4, 16)}:
        return "int4"
    return "int8" if quantisation.method == "fp8" or kinds == {("float", 8, None)} else None


def keep_small_floats(model: nn.Module, folder: Path, quantisation: Quantisation, twins: Twins | None = None) -> int:
    """Give linear layers the codes of their weights; return how many modules have some. Layers whose codes the kernels cannot
    hold keep their decoded weights.

    ``twins`` are two module trees over the same weights (DiffusionGemma); then experts that are stored one by one keep codes too.
    """
    if small_floats(quantisation) is None or not native.has_dot_products:
        return 0  # with AVX2 alone a pass over few tokens would take longer than over decoded weights
    places: dict[str, tuple[Path, str]] = {}
    for name, file in files_of_tensors(folder).items():
        layer, _, part = name.rpartition(".")
        if part in _SCALES:
            places[layer if twins is None else twins.shared(layer)] = file, layer
    known, decoded = 0, partial(decode, block=quantisation.settings.get("weight_block_size"))

    def reader(name: str) -> Callable[[], Codes | None] | None:
        shared = name if twins is None else twins.shared(name)
        return partial(decode_layer, *places[shared], decoded) if shared in places else None

    for name, module in model.named_modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.bfloat16 and (read := reader(name)):
            known += _keep(module, read)
        elif twins is not None and hasattr(module, "gate_up_proj") and reader(f"{name}.0.gate_proj"):
            known += _keep_experts(
                module, [reader(f"{name}.{i}.{part}") for i in range(len(module.down_proj)) for part in PARTS]
            )
    return known


PARTS = ("gate_proj", "up_proj", "down_proj")


def _keep(layer: nn.Linear, read: Callable[[], Codes | None]) -> bool:
    codes = read()
    if codes is None:
        return False
    if "forward" not in vars(layer):
        layer.stored_codes, layer.codes_are_wide = read, True  # type: ignore[assignment]
        return True
    bias = None if layer.bias is None else layer.bias.detach()
    product = native.Product(layer.weight, bias, "bf16", [(codes, layer.out_features)])
    layer.forward = RoundedInputs(layer, product)  # type: ignore[method-assign, assignment]
    release_weight(layer, MappedFiles())
    return True


def _keep_experts(experts: Any, readers: Sequence[Callable[[], Codes | None] | None]) -> bool:
    found = [None if read is None else read() for read in readers]
    codes = [own for own in found if own is not None]
    if len(codes) < len(found) or not CodedExperts.serves(experts):
        return False
    width, inner = experts.gate_up_proj.shape[2], experts.down_proj.shape[2]
    both = [(own, inner) for place, own in enumerate(codes) if place % 3 < 2]
    shape = torch.empty(2 * inner * len(experts.down_proj), width, device="meta")
    gate_up = native.Product(shape, None, "bf16", native.stacked(both))
    shape = torch.empty(width * len(experts.down_proj), inner, device="meta")
    down = native.Product(shape, None, "bf16", native.stacked((own, width) for own in codes[2::3]))
    experts.forward = CodedExperts(experts, gate_up, down)
    for name in ("gate_up_proj", "down_proj"):
        release_weight(experts, MappedFiles(), name)
    return True


def decode(stored: Stored, block: Sequence[int] | None = None) -> Codes | None:
    """Return codes in the kernels' formats of a layer's stored parts; ``None`` if these do not hold them exactly."""
    if (pairs := stored.get("weight_packed")) is not None:
        divisor, scales = stored.get("weight_global_scale"), stored["weight_scale"]
        fits = divisor is not None and pairs.dtype == torch.uint8 and scales.dtype == torch.float8_e4m3fn
        if not fits or "weight_zero_point" in stored or 2 * pairs.shape[1] != 16 * scales.shape[1]:
            return None
        whole = divisor.float().reshape(-1)[:1].expand(len(pairs)).contiguous()  # type: ignore[union-attr]
        return _fitted(Codes(FORMATS["NVFP4"], pairs, whole, None, scales.view(torch.uint8)), 2 * pairs.shape[1])
    codes = stored.get("weight")
    scale = next((stored[name] for name in _SCALES if name in stored), None)
    if codes is None or scale is None or codes.dtype != torch.float8_e4m3fn or codes.dim() != 2:
        return None
    rows, columns = codes.shape
    spread = _spread(scale, rows, columns, block)
    return None if spread is None else _fitted(Codes(FORMATS["FP8"], codes.view(torch.uint8), spread), columns)


def _fitted(codes: Codes, inputs: int) -> Codes | None:
    return codes if inputs % GROUP == 0 else None


def _spread(scale: Tensor, rows: int, columns: int, block: Sequence[int] | None) -> Tensor | None:
    """Return a scale for each output and 64 inputs, from one for a matrix, an output or a block; ``None`` for other shapes."""
    numbers = (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()
    groups = columns // GROUP
    if numbers.numel() == 1:
        return numbers.reshape(1, 1).expand(rows, groups).contiguous()
    if numbers.numel() == rows and numbers.shape[0] == rows:
        return numbers.reshape(rows, 1).expand(rows, groups).contiguous()
    high, wide = block or (128, 128)
    if numbers.dim() != 2 or wide % GROUP or numbers.shape != (-(-rows // high), -(-columns // wide)):
        return None
    spread = numbers.repeat_interleave(high, 0)[:rows].repeat_interleave(wide // GROUP, 1)
    return spread[:, :groups].contiguous()
