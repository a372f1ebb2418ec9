"""Quantised checkpoints: their configs, and transformers' model with its weights decoded.

Weights are decoded to the model's dtype, so every method runs on every device, in the memory of the dense model. A layer that
quantises its inputs continues to, with the ``forward`` of the method's library.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CompressedTensorsConfig,
    Mxfp4Config,
    PretrainedConfig,
    PreTrainedModel,
)

from volley.errors import CheckpointError, UnsupportedModelError, unknown_key
from volley.models.quantised.decoded import Twins, decode_tensors, has_experts, round_inputs, settle, stack_experts
from volley.models.quantised.packed import FORMATS, dense_tensors, open_tensors
from volley.models.quantised.scaled import decoded_float8

log = getLogger(__name__)

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "compressed-tensors": ("compressed_tensors",),
    "fp8": (),
    "mxfp4": ("accelerate",),
    "bitsandbytes": ("accelerate", "bitsandbytes"),
    "gptq": (),
    "awq": (),
}
"""Methods (``quant_method`` of a config) that volley loads, and the packages that each needs."""
_CONVERTERS = {
    "modelopt": "convert it with compressed-tensors' ModelOptNvfp4Converter",
    "modelopt_fp4": "convert it with compressed-tensors' ModelOptNvfp4Converter",
    "auto-round": "export it again in the format auto_gptq, auto_awq or llm_compressor",
}
_KV_SCALES = ("k_scale", "v_scale", "q_scale")
_FURTHER_TOKENS, _LAYER = re.compile(r"(^|\.)mtp\w*\."), re.compile(r"(^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class Quantisation:
    """Quantisation of a checkpoint; ``settings`` is the ``quantization_config`` of its config."""

    method: str
    settings: Mapping[str, Any]

    @property
    def weights(self) -> str:
        """Description of the weights: bits, type and groups."""
        return "; ".join(dict.fromkeys(_DESCRIBE[self.method](self.settings)))

    @property
    def inputs(self) -> str:
        """Description of the quantisation of layer inputs; empty if there is none."""
        if self.method != "compressed-tensors":
            return ""
        return "; ".join(dict.fromkeys(_arguments(group["input_activations"]) for group in _rounding(self.settings)))

    @property
    def left_out(self) -> Sequence[str]:
        """Names, or patterns of names, of modules that are not quantised."""
        keys = ("ignore", "modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules")
        return [str(name) for key in keys for name in self.settings.get(key) or ()]


def quantisation_of(config: Any) -> Quantisation | None:
    """Return the quantisation that a config names, or ``None``. An error names an unsupported method and the reason."""
    found = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if found is None:
        return None
    settings = dict(found) if isinstance(found, Mapping) else found.to_dict()
    method = str(settings.get("quant_method", "bitsandbytes" if settings.get("load_in_4bit") else "unnamed"))
    if method not in PACKAGES:
        remedy = _CONVERTERS.get(method, "take the unquantised checkpoint, or one of another method")
        known = unknown_key("quantisation", method, PACKAGES)
        raise UnsupportedModelError(
            f"the checkpoint is quantised by {method!r}, which volley does not load: {known}; {remedy}"
        )
    quantisation = Quantisation(method, settings)
    _check(quantisation)
    return quantisation


def check_packages(quantisation: Quantisation) -> None:
    """Refuse a checkpoint whose library is not installed."""
    missing = [name.replace("_", "-") for name in PACKAGES[quantisation.method] if find_spec(name) is None]
    if missing:
        raise UnsupportedModelError(
            f"a checkpoint quantised by {quantisation.method!r} needs {' and '.join(missing)}; "
            f"install it: pip install {' '.join(missing)}"
        )


def _check(quantisation: Quantisation) -> None:
    settings = quantisation.settings
    if quantisation.method in FORMATS:
        FORMATS[quantisation.method].check(settings)
    for group in _rounding(settings) if quantisation.method == "compressed-tensors" else ():
        inputs = group["input_activations"]
        if inputs.get("dynamic") is True and inputs.get("strategy") == "tensor":
            raise UnsupportedModelError(
                "the checkpoint rounds inputs with one scale for a whole batch, so a token's logits depend on the tokens "
                "beside it and speculation cannot be lossless; quantise it with a scale for each token or a static one"
            )


def load_model(
    kind: Any,
    path: str | Path,
    config: PretrainedConfig,
    dtype: torch.dtype | str,
    twins: Twins | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Call ``kind.from_pretrained`` with quantised weights decoded. ``kind`` is a model class of transformers, or an auto class.

    ``twins`` are two module trees over the same weights, whose compressed-tensors codes are decoded once. Raise
    ``CheckpointError`` if weights are missing or left over; transformers would only warn and use random ones.
    """
    quantisation = quantisation_of(config)
    options |= {"dtype": dtype, "config": config, "output_loading_info": True, "ignore_mismatched_sizes": True}
    if quantisation is None:
        model, report = kind.from_pretrained(path, **options)
    else:
        check_packages(quantisation)
        log.warning("%s: weights of %s (%s) are decoded", path, quantisation.method, quantisation.weights)
        model, report = _LOADERS[quantisation.method](kind, path, quantisation, options, twins)
    check_loaded(path, config, report, with_scales_of_kv=quantisation is not None)
    loaded: PreTrainedModel = model
    return loaded


def _predicts_further_tokens(key: str, config: PretrainedConfig) -> bool:
    """Return whether a weight belongs to layers for multi-token prediction: it has "mtp" in its name, or a layer number beyond
    the model's last. transformers knows these numbers for some published models only."""
    text: Any = config.get_text_config()
    further, layer = getattr(text, "num_nextn_predict_layers", None) or 0, _LAYER.search(key)
    return bool(_FURTHER_TOKENS.search(key)) or (
        layer is not None and 0 <= int(layer[2]) - text.num_hidden_layers < further
    )


def check_loaded(
    path: str | Path, config: PretrainedConfig, report: Mapping[str, Any], *, with_scales_of_kv: bool = False
) -> None:
    """Refuse a checkpoint whose weights differ from the model's, by transformers' loading report.

    Layers for multi-token prediction are not used. Neither are scales of K/V, because volley quantises K/V itself.
    """
    unused = {key for key in report["unexpected_keys"] if _predicts_further_tokens(key, config)}
    if unused:
        log.info("%s: its layers that predict further tokens (MTP) are left unused", path)
    for name, stored, own in sorted(report["mismatched_keys"]):
        raise CheckpointError(
            f"{path}: {name} has shape {tuple(stored)}, where config.json makes it {tuple(own)}; fetch both again, or put right "
            "what was changed in config.json"
        )
    missing = sorted(report["missing_keys"])
    extra = sorted(set(report["unexpected_keys"]) - unused)
    if with_scales_of_kv:
        extra = [key for key in extra if key.rpartition(".")[2] not in _KV_SCALES]
    if missing or extra:
        parts = [f"lacks {_some(missing)}"] * bool(missing) + [f"has {_some(extra)}, which its model does not"] * bool(
            extra
        )
        raise CheckpointError(
            f"{path} {' and '.join(parts)}; fetch it again, or convert it to a format that transformers reads"
        )


def _some(keys: Sequence[str]) -> str:
    return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")


# -- methods ------------------------------------------------------------------------------------------------------------

Loaded = tuple[PreTrainedModel, Mapping[str, Any]]


def _load_compressed(
    kind: Any, path: str | Path, quantisation: Quantisation, options: dict[str, Any], twins: Twins | None
) -> Loaded:
    opened = open_tensors(path)
    if twins is not None or has_experts(opened):
        decoded = decode_tensors(opened, quantisation.settings, _dtype(options), twins)
        if twins is not None:
            stack_experts(decoded.weights)
        model, report = _load_plain(kind, path, decoded.weights, options)
        round_inputs(model, quantisation.settings, decoded.rounding, twins)
        return model, report
    options["config"].quantization_config = {**quantisation.settings, "kv_cache_scheme": None}
    decode = CompressedTensorsConfig(dequantize=True)
    model, report = kind.from_pretrained(path, quantization_config=decode, **options)
    settle(model)
    return model, report


def _load_mxfp4(kind: Any, path: str | Path, _: Quantisation, options: dict[str, Any], __: Twins | None) -> Loaded:
    model, report = kind.from_pretrained(path, quantization_config=Mxfp4Config(dequantize=True), **options)
    return model.to(model.dtype), report  # experts are loaded in bf16


def _load_bitsandbytes(
    kind: Any, path: str | Path, _: Quantisation, options: dict[str, Any], __: Twins | None
) -> Loaded:
    model, report = kind.from_pretrained(path, **options)
    return model.dequantize(model.dtype), report


def _load_packed(
    kind: Any, path: str | Path, quantisation: Quantisation, options: dict[str, Any], _: Twins | None
) -> Loaded:
    dtype, settings = _dtype(options), quantisation.settings
    form = FORMATS.get(quantisation.method)
    tensors = decoded_float8(path, settings, dtype) if form is None else dense_tensors(path, form, settings, dtype)
    state = dict(tensors)
    zeros = {name for name, value in state.items() if name.endswith(".bias") and not value.any()}
    model, report = _load_plain(kind, path, state, options)
    # AutoGPTQ stores a bias for every layer, zeros if the model has none
    return model, {**report, "unexpected_keys": set(report["unexpected_keys"]) - zeros}


def _dtype(options: Mapping[str, Any]) -> torch.dtype:
    found: torch.dtype = options["config"].dtype or torch.float32 if options["dtype"] == "auto" else options["dtype"]
    return found


def _load_plain(kind: Any, path: str | Path, state: dict[str, Tensor], options: dict[str, Any]) -> Loaded:
    """Load a model from decoded or unquantised weights; transformers casts them, some to fp32.

    Single experts are stacked if transformers does not do it.
    """
    config, dtype = options["config"], _dtype(options)
    options.pop("device_map", None)
    chosen, text = _class_of(kind, config), config.get_text_config()
    if getattr(chosen, "config_class", None) is config.sub_configs.get("text_config", chosen):  # as auto classes do
        config = text
    for own in (options["config"], text):
        vars(own).pop("quantization_config", None)
    chosen_options = {**options, "config": config, "dtype": dtype}
    model, report = chosen.from_pretrained(None, state_dict=dict(state), **chosen_options)
    if any(name.endswith("experts.gate_up_proj") for name in report["missing_keys"]) and has_experts(state, "weight"):
        stack_experts(state)
        model, report = chosen.from_pretrained(None, state_dict=dict(state), **chosen_options)
    take_generation_config(model, path)
    return model, report


def take_generation_config(model: PreTrainedModel, path: str | Path) -> None:
    """Set a model's generation config to the checkpoint's, if it has one."""
    if model.can_generate():
        with suppress(OSError):
            model.generation_config = type(model.generation_config).from_pretrained(path)


def _class_of(kind: Any, config: PretrainedConfig) -> Any:
    """Return the class that an auto class chooses."""
    mapping = getattr(kind, "_model_mapping", None)
    return kind if mapping is None else mapping[type(config)]


_LOADERS: Mapping[str, Callable[..., Loaded]] = {
    "compressed-tensors": _load_compressed,
    "fp8": _load_packed,
    "mxfp4": _load_mxfp4,
    "bitsandbytes": _load_bitsandbytes,
    "gptq": _load_packed,
    "awq": _load_packed,
}


# -- descriptions -------------------------------------------------------------------------------------------------------


def _groups(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((settings.get("config_groups") or {}).values())


def _rounding(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the groups of compressed-tensors' settings that quantise inputs."""
    return [group for group in _groups(settings) if group.get("input_activations")]


def _arguments(of: Mapping[str, Any]) -> str:
    """Describe one of compressed-tensors' sets of arguments."""
    scale = str(of.get("strategy") or "tensor").replace("_", " ")
    size = f" of {of['group_size']}" if of.get("group_size") else ""
    blocks = f" of {' × '.join(map(str, of['block_structure']))}" if of.get("block_structure") else ""
    when = {True: ", found anew", "local": ", found anew"}.get(of.get("dynamic", False), "")
    zero = "" if of.get("symmetric", True) else ", with zero points"
    return f"{of.get('num_bits', 8)}-bit {of.get('type', 'int')}, a scale a {scale}{size}{blocks}{zero}{when}"


def _describe_compressed(settings: Mapping[str, Any]) -> list[str]:
    return [_arguments(group["weights"]) for group in _groups(settings) if group.get("weights")] or ["not quantised"]


def _describe_packed(settings: Mapping[str, Any]) -> list[str]:
    size = settings.get("group_size", 128)
    group = "a scale a channel" if size in (None, -1) else f"a scale a group of {size}"
    order = ", in order of activations" if settings.get("desc_act") else ""
    return [f"{settings.get('bits', 4)}-bit int, {group}{order}"]


def _describe_fp8(settings: Mapping[str, Any]) -> list[str]:
    size = settings.get("weight_block_size") or ()
    return ["8-bit float, a scale a " + (f"block of {' × '.join(map(str, size))}" if size else "tensor")]


def _describe_bitsandbytes(settings: Mapping[str, Any]) -> list[str]:
    if settings.get("load_in_8bit"):
        return ["8-bit int, a scale a channel"]
    return [f"4-bit {settings.get('bnb_4bit_quant_type', 'fp4')}, a scale a group of 64"]


_DESCRIBE: Mapping[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "compressed-tensors": _describe_compressed,
    "fp8": _describe_fp8,
    "mxfp4": lambda _: ["4-bit float, a scale a group of 32"],
    "bitsandbytes": _describe_bitsandbytes,
    "gptq": _describe_packed,
    "awq": _describe_packed,
}
