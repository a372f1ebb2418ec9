"""Decode compressed-tensors checkpoints from their files into plain weights with the names of an unquantised checkpoint.

transformers decodes layer by layer in a model that it built. That fails for experts which the file stores one by one and the
model as one matrix, and for weights that two module trees share, because codes have other names than the tied weights. With
plain weights transformers stacks, renames and ties as always. The quantisation of layer inputs is restored afterwards. Stacked
experts do not quantise their inputs, because transformers has no such operation for them.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from volley.errors import CheckpointError

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<place>\d+)\.(?P<part>gate|up|down)_proj")
_SINGLE = re.compile(rf"{EXPERT.pattern}|.+\.experts\.\d+\.w[123]")
_ROUNDING = re.compile(r"(input|output)_(scale|zero_point|global_scale)")

Opened = Mapping[str, Any]
"""Open safetensors files by the names of their tensors."""


@dataclass(frozen=True)
class Twins:
    """Two module trees over the same weights, by their prefixes. Tensors whose names end in ``own`` are not shared."""

    first: str
    second: str
    own: str

    def shared(self, name: str) -> str:
        """Return the name in the first tree of a weight or module, if it is shared."""
        if not name.startswith(self.second) or name.endswith(self.own):
            return name
        return self.first + name.removeprefix(self.second)


@dataclass(frozen=True)
class Decoded:
    """Decoded ``weights`` by name, and for each quantised layer the scales of its inputs, if it has any."""

    weights: dict[str, Tensor]
    rounding: Mapping[str, Mapping[str, Tensor]]


def has_experts(names: Iterable[str], part: str = "weight_scale") -> bool:
    """Return whether experts are quantised one by one; with ``part`` "weight", whether they are stored one by one."""
    return any(name.endswith(f".{part}") and _SINGLE.fullmatch(name.removesuffix(f".{part}")) for name in names)


def decode_tensors(
    opened: Opened, settings: Mapping[str, Any], dtype: torch.dtype, twins: Twins | None = None
) -> Decoded:
    """Decode a checkpoint's quantised weights to ``dtype``, those that ``twins`` share once; others stay as they are.

    Raise CheckpointError if parts of a quantised layer are missing.
    """
    config = _config(settings)
    layers: dict[str, dict[str, str]] = defaultdict(dict)  # names in the file of each layer's parts
    for name in opened:
        shared = name if twins is None else twins.shared(name)
        if shared != name and shared in opened:
            _check_same(opened, name, shared)
            continue
        layer, _, part = shared.rpartition(".")
        layers[layer][part] = name
    weights: dict[str, Tensor] = {}
    rounding: dict[str, dict[str, Tensor]] = {}
    for layer, parts in layers.items():
        stored = {part: opened[name].get_tensor(name) for part, name in parts.items()}
        if "weight_scale" in stored:
            rounding[layer] = {part: stored.pop(part) for part in list(stored) if _ROUNDING.fullmatch(part)}
            stored = {"weight": _decode_layer(layer, stored, config).to(dtype)} | {
                part: value for part, value in stored.items() if not part.startswith("weight")
            }
        for part, value in stored.items():
            weights[f"{layer}.{part}"] = value
    return Decoded(weights, rounding)


def stack_experts(weights: dict[str, Tensor]) -> None:
    """Replace the weights of single experts by ``gate_up_proj [E, 2I, H]`` and ``down_proj [E, H, I]``."""
    found: dict[str, dict[tuple[int, str], str]] = defaultdict(dict)
    for name in weights:
        if match := EXPERT.fullmatch(name.removesuffix(".weight")):
            found[match["experts"]][int(match["place"]), match["part"]] = name
    for experts, names in found.items():
        places = range(1 + max(place for place, _ in names))
        lacking = [(place, part) for place in places for part in ("gate", "up", "down") if (place, part) not in names]
        if lacking:
            place, part = lacking[0]
            raise CheckpointError(f"the checkpoint lacks {experts}.{place}.{part}_proj; fetch it again")
        own = {key: weights.pop(name) for key, name in names.items()}
        weights[f"{experts}.gate_up_proj"] = torch.stack(
            [torch.cat([own[place, "gate"], own[place, "up"]]) for place in places]
        )
        weights[f"{experts}.down_proj"] = torch.stack([own[place, "down"] for place in places])


def round_inputs(
    model: PreTrainedModel,
    settings: Mapping[str, Any],
    rounding: Mapping[str, Mapping[str, Tensor]],
    twins: Twins | None = None,
) -> None:
    """Let layers that were quantised quantise their inputs as ``settings`` say, with the library's forward."""
    from compressed_tensors.quantization import apply_quantization_config

    def shared(name: str) -> str:
        return name if twins is None else twins.shared(name)

    coded = {name: module for name, module in model.named_modules() if shared(name) in rounding}
    apply_quantization_config(model, _config(settings), show_progress=False, allowed_modules=list(coded.values()))
    for name, module in coded.items():
        scales = {part: value for part, value in module.named_parameters(recurse=False) if _ROUNDING.fullmatch(part)}
        for part, empty in scales.items():
            if part not in rounding[shared(name)]:
                raise CheckpointError(f"the checkpoint lacks {name}.{part}; fetch it again")
            stored = rounding[shared(name)][part].to(empty.dtype).view(empty.shape)
            setattr(module, part, nn.Parameter(stored, requires_grad=False))
    settle(model)


def settle(model: PreTrainedModel) -> None:
    """Turn decoded layers into plain ones, and cast all weights to the model's dtype.

    Layers that quantise inputs keep what they need for that, as buffers; parameters are weights only.
    """
    from compressed_tensors.offload import remove_dispatch
    from compressed_tensors.quantization import QuantizationMetadata

    remove_dispatch(model, onload_tensors=True)  # the library reads weights through a read-only cache
    for module in model.modules():
        scheme: Any = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        module.weight = nn.Parameter(module.get_parameter("weight").to(model.dtype), requires_grad=False)
        if scheme.input_activations is None and scheme.output_activations is None:
            QuantizationMetadata.clear_quantization(module)
            del module.quantization_status
            continue
        for name, value in list(module.named_parameters(recurse=False)):
            if name.startswith("weight_"):
                delattr(module, name)
            elif name not in ("weight", "bias"):
                delattr(module, name)
                module.register_buffer(name, value.data)
    for module in model.modules():
        if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
            del module.forward


def _config(settings: Mapping[str, Any]) -> "QuantizationConfig":
    from compressed_tensors.quantization import QuantizationConfig

    found: QuantizationConfig = QuantizationConfig.model_validate({**settings, "kv_cache_scheme": None})
    return found


def _check_same(opened: Opened, name: str, other: str) -> None:
    values = [opened[one].get_tensor(one) for one in (name, other)]
    if not torch.equal(*(value.view(torch.uint8) if value.is_floating_point() else value for value in values)):
        raise CheckpointError(
            f"{name} and {other} differ, where the model shares one weight; fetch the checkpoint again"
        )


def _decode_layer(layer: str, stored: Mapping[str, Tensor], config: "QuantizationConfig") -> Tensor:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format

    scheme = _scheme(layer, config)
    compressor = BaseCompressor.get_value_from_registry(
        str(getattr(form := scheme.format or infer_module_format(nn.Linear, scheme), "value", form))
    )
    needed = [part for part in compressor.compression_param_names(scheme) if part.startswith("weight")]
    if absent := [part for part in needed if part not in stored]:
        raise CheckpointError(f"the checkpoint lacks {layer}.{absent[0]}; fetch it again")
    weight: Tensor = compressor.decompress(dict(stored), scheme)["weight"]
    return weight


def _scheme(layer: str, config: "QuantizationConfig") -> "QuantizationScheme":
    """Return the scheme of a quantised layer: by its exact name, by a matching pattern, or by its layer type."""
    from compressed_tensors.utils.match import match_name

    ways: list[Callable[[str], bool]] = [
        lambda target: target == layer,
        lambda target: match_name(layer, target),
        lambda target: target in ("Linear", "Embedding"),
    ]
    for names in ways:
        for scheme in config.config_groups.values():
            if any(map(names, scheme.targets)):
                found: QuantizationScheme = scheme
                return found
    raise CheckpointError(f"the checkpoint has codes of {layer}, which no group of its quantization_config names")
