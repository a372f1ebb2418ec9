"""Codes of a quantised checkpoint, passed unchanged to the int8 and int4 kernels.

The kernels' int8 has a scale for each output or for 32 of its inputs, int4 one for 64 or 32 inputs; neither has zero points. So
they support GPTQ and compressed-tensors' ``pack-quantized`` and ``int-quantized`` weights that are symmetric, in the order of the
inputs, with groups of these sizes or multiples of them; scales for 32 inputs are fp16. Weights of other layers and formats are
decoded and quantised again.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from volley.models.quantised.packed import Stored, decode_layer, files_of_tensors, gptq_parts, unpack
from volley.models.quantised.scheme import Quantisation
from volley.models.quantised.small_floats import keep_small_floats, small_floats
from volley.native import GROUP, Codes, Weights
from volley.weights import FORMATS, PACK

_PACKINGS = ("pack-quantized", "int-quantized", "naive-quantized")


def agreeing(quantisation: Quantisation) -> Weights | None:
    """Return the weight format whose kernels support the codes of most layers, by the config."""
    settings = quantisation.settings
    if (found := small_floats(quantisation)) is not None:
        return found
    if quantisation.method == "gptq":
        size = settings.get("group_size", 128)
        plain = settings.get("sym") and not settings.get("desc_act")
        return _kernels(settings.get("bits"), None if size in (None, -1) else size) if plain else None
    groups = [group for group in (settings.get("config_groups") or {}).values() if group.get("weights")]
    kinds = {_of_group(group, settings.get("format")) for group in groups}
    return kinds.pop() if quantisation.method == "compressed-tensors" and len(kinds) == 1 else None


def _of_group(group: Mapping[str, Any], form: object) -> Weights | None:
    of = group["weights"]
    plain = of.get("type", "int") == "int" and of.get("symmetric", True) and not of.get("actorder")
    sizes = {"channel": None, "group": of.get("group_size")}
    packing = group.get("format") or form
    if not plain or group.get("input_activations") or of.get("strategy") not in sizes or packing not in _PACKINGS:
        return None
    return _kernels(of.get("num_bits"), sizes[of["strategy"]])


def _kernels(bits: object, size: int | None) -> Weights | None:
    """Return the weight format of codes of ``bits`` with a scale for ``size`` inputs (``None``: for all)."""
    if bits not in (4, 8) or (size is not None and size % PACK):
        return None
    return "int4" if bits == 4 else "int8"


def attach(model: nn.Module, folder: Path, quantisation: Quantisation, weights: Weights) -> int:
    """Attach readers of stored codes to linear layers if ``weights`` has the checkpoint's format; return how many got one."""
    if agreeing(quantisation) != weights:
        return 0
    if small_floats(quantisation) is not None:
        return keep_small_floats(model, folder, quantisation)
    decode = _decode_gptq if quantisation.method == "gptq" else _decode_compressed
    bits, known = (4 if weights == "int4" else 8), 0
    files = files_of_tensors(folder)
    for name, module in model.named_modules():
        mark = f"{name}.qweight" if quantisation.method == "gptq" else f"{name}.weight_scale"
        if type(module) is nn.Linear and mark in files:
            module.stored_codes = partial(decode_layer, files[mark], name, partial(decode, quantisation.settings, bits))  # type: ignore[assignment]
            known += 1
    return known


def _decode_compressed(_: Mapping[str, Any], bits: int, stored: Stored) -> Codes | None:
    codes = stored.get("weight", stored.get("weight_packed"))
    if codes is None or "weight_g_idx" in stored or stored.get("weight_zero_point", torch.zeros(1)).any():
        return None
    if codes.dtype == torch.int32:
        rows, columns = stored["weight_shape"].tolist()
        codes = (unpack(codes, bits) - 2 ** (bits - 1))[:rows, :columns].to(torch.int8)
    return _fitted(codes, stored["weight_scale"].float(), bits) if codes.dtype == torch.int8 else None


def _decode_gptq(settings: Mapping[str, Any], bits: int, stored: Stored) -> Codes | None:
    if not {"qzeros", "scales"} <= stored.keys():
        return None
    codes, zeros, in_order = gptq_parts(stored, settings)
    if (zeros != 2 ** (bits - 1)).any() or not torch.equal(stored.get("g_idx", in_order).long(), in_order):
        return None
    return _fitted((codes - 2 ** (bits - 1)).to(torch.int8), stored["scales"].T.float(), bits)


def _fitted(codes: Tensor, scales: Tensor, bits: int) -> Codes | None:
    """Return codes ``[out, in]`` with scales ``[out, groups]`` in the kernels' groups, if each group is a multiple of theirs."""
    inputs, groups = codes.shape[1], scales.shape[1]
    size, fine = inputs // groups, scales.half()
    if bits == 8 and groups == 1:
        return Codes(FORMATS["int8"], codes, scales[:, 0].contiguous())
    if bits == 4 and size % GROUP == 0:
        return Codes(FORMATS["int4"], codes, scales.repeat_interleave(size // GROUP, dim=1))
    if size % PACK or not torch.equal(fine.float(), scales):
        return None
    return Codes(FORMATS["Q4_0" if bits == 4 else "Q8_0"], codes, fine.repeat_interleave(size // PACK, dim=1))
