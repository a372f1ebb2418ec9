"""Descriptions of the architectures that are read from GGUF files: transformers' classes, keys, and tensors.

A description says what differs from Llama. ``changes`` undo what llama.cpp's converter does to the numbers of a weight, ``rows``
to the order of its rows, which blocks of codes survive.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from volley.errors import UnsupportedModelError
from volley.models.gguf.file import YARN, GGUFFile, Rows

Change = Callable[[Sequence[Tensor], Any], Tensor]
"""Makes a weight from the tensors that it is stored in, given the config."""
Order = Callable[[Any], Rows]
"""Puts the rows of a weight in transformers' order, given the config."""
Values = dict[str, Any]

FOLDER = "Give the model's Hugging Face folder instead"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"

_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _nothing(_file: GGUFFile) -> Values:
    return {}


@dataclass(frozen=True)
class Architecture:
    """How the files of an architecture are read."""

    config: str
    """Names of transformers' classes."""
    model: str
    values: Callable[[GGUFFile], Values] = _nothing
    """Values of the config beyond those that all have, or other ones."""
    names: Mapping[str, str] = field(default_factory=dict)
    """transformers' names of a layer's tensors, beyond Llama's. A tensor that is named with its ending stands for a whole weight;
    several of one name are its parts, in this order."""
    ends: Mapping[str, str] = field(default_factory=lambda: _ENDS)
    """Names of tensors that are of no layer."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """By the end of transformers' name."""
    rows: Mapping[str, Order] = field(default_factory=dict)
    rotates_part: bool = False
    """The rotary part of a head may be smaller than the head."""
    unchanging: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values that may stand in keys that are not read."""

    @property
    def layer_names(self) -> Mapping[str, str]:
        return {**_LLAMA, **self.names}


# -- changes -----------------------------------------------------------------------------------------------------------


def _less_one(parts: Sequence[Tensor], _config: Any) -> Tensor:
    """Undo adding one to a norm's weight, which transformers adds in its forward pass."""
    return parts[0] - 1


def _side_by_side(parts: Sequence[Tensor], _config: Any) -> Tensor:
    return torch.cat([*parts], dim=1)


def _as_row(parts: Sequence[Tensor], _config: Any) -> Tensor:
    return parts[0].reshape(1, -1)


def _as_channels(parts: Sequence[Tensor], _config: Any) -> Tensor:
    """A convolution for each channel."""
    return parts[0].unsqueeze(1)


_ONE_ADDED = {"norm.weight": _less_one}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}
_GATE_UP = {"mlp.experts.gate_up_proj": _side_by_side}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_SHARED_GATE = {"mlp.shared_expert_gate.weight": _as_row}


# -- rows --------------------------------------------------------------------------------------------------------------


def _halves(heads: str) -> Order:
    """Bring back the two halves of a head, which lie interleaved."""

    def order(config: Any) -> Rows:
        number = getattr(config, heads)

        def rows(data: NDArray[Any]) -> NDArray[Any]:
            split = data.reshape(number, len(data) // number // 2, 2, *data.shape[1:])
            return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(data.shape)

        return rows

    return order


_INTERLEAVED = {"self_attn.q_proj": _halves("num_attention_heads"), "self_attn.k_proj": _halves("num_key_value_heads")}


# -- values ------------------------------------------------------------------------------------------------------------


def rope(file: GGUFFile) -> Values:
    """transformers' rotary parameters; Llama 3's factors are a tensor."""
    base: Values = {"rope_type": "default", "rope_theta": float(file.get("rope.freq_base", 10_000.0))}
    kind = file.get("rope.scaling.type", "linear")  # older files have a factor alone
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path} scales rotary positions by {kind!r}; none, linear and yarn are supported. {FOLDER}"
        )
    factor = float(file.get("rope.scaling.factor", file.get("rope.scale_linear", 1.0)))
    given = {key: file.get(f"rope.scaling.{name}") for key, name in YARN.items()}
    context = file.get("rope.scaling.original_context_length")
    if kind == "none" or factor == 1.0:
        return base
    if kind == "linear":
        return {**base, "rope_type": "linear", "factor": factor}
    return {
        **base,
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": context or file.require("rope.scaling.original_context_length"),
        **{key: float(value) for key, value in given.items() if value is not None},
    }


def _rotary_part(file: GGUFFile) -> float:
    """Part of a head that is rotated."""
    size = file.get("attention.key_length") or file.require("embedding_length") // file.number("attention.head_count")
    return float(file.get("rope.dimension_count", size) / size)


def _biases(file: GGUFFile) -> Values:
    return {name: f"blk.0.{key}.bias" in file.names for name, key in _BIASES.items()}


_BIASES = {"attention_bias": "attn_q", "mlp_bias": "ffn_gate"}


def layer_types(file: GGUFFile, every: int) -> list[str]:
    """Which layers have a window: as the file says, or all but each ``every``-th."""
    number = file.require("block_count")
    said = file.get("attention.sliding_window_pattern", every)
    slides = said if isinstance(said, list) else [said == 0 or (layer + 1) % said != 0 for layer in range(number)]
    if not file.get("attention.sliding_window", 0):
        slides = [False] * number
    return ["sliding_attention" if one else "full_attention" for one in slides[:number]]


def _gemma_2(file: GGUFFile) -> Values:
    layers, window = file.require("block_count"), file.get("attention.sliding_window", 4096)
    return {
        "sliding_window": window,
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)],
        "attn_logit_softcapping": _cap(file, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _cap(file, "final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scale(file, layers_of_27b=46),
    }


def _gemma_3(file: GGUFFile) -> Values:
    window = file.get("attention.sliding_window", 0)
    local = {"rope_type": "default", "rope_theta": float(file.get("rope.freq_base_swa", 10_000.0))}
    return {
        "sliding_window": window or None,
        "layer_types": layer_types(file, 6),
        "rope_parameters": {"sliding_attention": local, "full_attention": rope(file)},
        "final_logit_softcapping": _cap(file, "final_logit_softcapping", 0.0),
        "query_pre_attn_scalar": _query_scale(file, layers_of_27b=62),
    }


def _cap(file: GGUFFile, key: str, usual: float) -> float | None:
    return float(file.get(key, usual)) or None


def _query_scale(file: GGUFFile, layers_of_27b: int) -> int:
    """The size of a head, but in the models of 27 B, which no key tells apart, that of an even share of the width."""
    heads = file.number("attention.head_count")
    even = int(file.require("embedding_length")) // heads
    return even if file.require("block_count") == layers_of_27b else int(file.get("attention.key_length", even))


def _phi_3(file: GGUFFile) -> Values:
    values = {**rope(file), "partial_rotary_factor": _rotary_part(file)}
    context = file.get("rope.scaling.original_context_length")
    if LONG_FACTORS in file.names:
        values |= {
            "rope_type": "longrope",
            "short_factor": file.dense(SHORT_FACTORS).tolist(),
            "long_factor": file.dense(LONG_FACTORS).tolist(),
            "attention_factor": float(file.require("rope.scaling.attn_factor")),
            "original_max_position_embeddings": context,
        }
    return {
        "rope_parameters": values,
        "original_max_position_embeddings": context or file.require("context_length"),
        "sliding_window": file.get("attention.sliding_window", 0) or None,
    }


def _granite(file: GGUFFile) -> Values:
    size = file.require("embedding_length") // file.number("attention.head_count")
    return {
        **_biases(file),
        "attention_multiplier": float(file.get("attention.scale", 0.0)) or size**-0.5,
        "embedding_multiplier": float(file.get("embedding_scale", 0.0)) or 1.0,
        "residual_multiplier": float(file.get("residual_scale", 0.0)) or 1.0,
        "logits_scaling": float(file.get("logit_scale", 0.0)) or 1.0,
    }


def _experts(file: GGUFFile) -> Values:
    return {
        "num_experts": file.require("expert_count"),
        "num_experts_per_tok": file.require("expert_used_count"),
        "moe_intermediate_size": file.require("expert_feed_forward_length"),
        "norm_topk_prob": bool(file.get("expert_weights_norm", True)),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen_2_moe(file: GGUFFile) -> Values:
    inner = file.shape("blk.0.ffn_down_exps.weight")[2]
    return {
        "num_experts": file.require("expert_count"),
        "num_experts_per_tok": file.require("expert_used_count"),
        "moe_intermediate_size": file.get("expert_feed_forward_length", inner),
        "shared_expert_intermediate_size": file.get("expert_shared_feed_forward_length")
        or file.shape("blk.0.ffn_down_shexp.weight")[1],
        "norm_topk_prob": bool(file.get("expert_weights_norm", False)),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


ARCHITECTURES = {
    "llama": Architecture("LlamaConfig", "LlamaForCausalLM", _biases, rows=_INTERLEAVED),
    "qwen2": Architecture("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3moe": Architecture("Qwen3MoeConfig", "Qwen3MoeForCausalLM", _experts, _EXPERTS, changes=_GATE_UP),
    "qwen2moe": Architecture(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        _qwen_2_moe,
        {**_EXPERTS, **_SHARED_EXPERT},
        changes={**_GATE_UP, **_SHARED_GATE},
    ),
    "gemma2": Architecture(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        _gemma_2,
        {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        changes=_ONE_ADDED,
    ),
    "gemma3": Architecture(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        _gemma_3,
        {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        changes=_ONE_ADDED,
    ),
    "phi3": Architecture(
        "Phi3Config",
        "Phi3ForCausalLM",
        _phi_3,
        {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        rotates_part=True,
    ),
    "smollm3": Architecture("SmolLM3Config", "SmolLM3ForCausalLM", _biases, rows=_INTERLEAVED),
    "granite": Architecture(
        "GraniteConfig",
        "GraniteForCausalLM",
        _granite,
        rows=_INTERLEAVED,
        unchanging={"rope.scaling.finetuned": (True,)},
    ),
    "olmo2": Architecture(
        "Olmo2Config",
        "Olmo2ForCausalLM",
        names={"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    ),
}
"""Descriptions by ``general.architecture``."""
