"""Check whether a target is batch-invariant: a token's logits are the same bits, whatever else is in the pass."""

import copy
import logging
from pathlib import Path
from typing import Any

import torch

from volley import native
from volley.config import DecodingConfig
from volley.errors import ConfigError, UnsupportedModelError
from volley.memory.kv_store import KVStore, make_store
from volley.models.layers.accelerate import accelerate
from volley.models.quantised.scheme import quantisation_of
from volley.models.targets.loading import auto_class, choose_weights, load_config
from volley.models.targets.recurrent import RECURRENT_LAYERS
from volley.models.targets.target import Target
from volley.native import Weights

log = logging.getLogger("volley")
_LAYERS = 2  # layers of the model that is tried

_AS_IT_IS = "leave exact out: greedy output may then differ from plain decoding if two logits are nearly equal"


def why_inexact(target: Target, store: KVStore, config: DecodingConfig) -> tuple[str, str] | None:
    """Return why logits may depend on the batch, and the remedy; ``None`` if the whole target runs on volley's kernels."""
    if not native.available or target.device.type != "cpu":
        return (f"volley's kernels do not run here ({target.device}; they need an x86-64 CPU with AVX2)", _AS_IT_IS)
    if str(target.dtype) != "torch.bfloat16":
        name = str(target.dtype).removeprefix("torch.")
        return f"in {name} PyTorch chooses the order of a sum by the shape of the pass", "load the target in bf16"
    if config.kv_dtype != "auto":
        return f"PyTorch's operations read {config.kv_dtype} K/V", "use kv_dtype='auto'"
    if target.fused is None or not target.fused.serves(store) or not target.ends_are_fused:
        return (
            f"not all of {type(target.model).__name__} runs on volley's kernels, which take layers like those of Llama, Mistral, "
            "Mixtral, Qwen2, Qwen3 and its MoE, Gemma 2 and 3, Phi-3, SmolLM3, Granite, OLMo 2 and gpt-oss, with heads of 16 · n "
            "and inputs of 32 · n numbers (of 64 · n for weights that are quantised at load)",
            _AS_IT_IS,
        )
    return None


def check_exact(target: Target, store: KVStore, config: DecodingConfig) -> str | None:
    """Return the reason of :func:`why_inexact`. Raises ConfigError if there is one and ``config.exact`` is set."""
    found = why_inexact(target, store, config)
    if found is None:
        log.info("answers are exact: a token's logits do not depend on what else is in the pass")
        return None
    reason, remedy = found
    if config.exact:
        raise ConfigError(f"exact=True cannot be kept: {reason}; {remedy}")
    log.info("answers are not exact: %s", reason)
    return reason


def foresee_exactness(path: str | Path) -> str:
    """Tell from a model's config whether it would be batch-invariant in bf16 on a CPU. Two layers are tried with made-up
    weights.

    Raises UnsupportedModelError if these layers are not supported.
    """
    config = copy.deepcopy(load_config(path))
    weights = choose_weights(path, "auto", torch.device("cpu"), torch.bfloat16)
    quantisation = quantisation_of(config)
    if quantisation is not None and quantisation.inputs:
        return "no: PyTorch's operations round the inputs of its layers"
    if quantisation is not None:
        del config.quantization_config
    text = config.get_text_config()
    if RECURRENT_LAYERS & set(getattr(text, "layer_types", None) or ()):
        return "no: PyTorch's operations run its recurrent layers"
    try:
        return _try_layers(config, weights)
    except UnsupportedModelError:
        raise
    except Exception as error:  # some families cannot be shortened, each in its own way
        return f"not known before it is loaded ({error})"


def _try_layers(config: Any, weights: Weights) -> str:
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = min(text.num_hidden_layers, _LAYERS), 64, None
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:_LAYERS]
    for name in ("num_experts", "num_local_experts"):
        if getattr(text, name, None):
            setattr(text, name, min(getattr(text, name), 2 * text.num_experts_per_tok))
    model = auto_class(config).from_config(config, dtype=torch.bfloat16).eval()
    accelerate(model, weights, release=True)
    target = Target(model)
    store = make_store("auto", target.kv_shapes, 16, target.dtype, target.device)
    found = why_inexact(target, store, DecodingConfig())
    return f"yes, with {weights} weights" if found is None else f"no: {found[0]}"
