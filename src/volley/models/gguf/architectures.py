"""Descriptions of the architectures that are read from GGUF files: transformers' names, keys, and tensors.

A description states the differences from Llama. llama.cpp's converter changes some weights: ``changes`` restore their numbers,
``rows`` the order of their rows. A reordering of rows leaves quantised blocks intact.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from volley.errors import UnsupportedModelError
from volley.models.gguf.file import YARN, GGUFFile, Rows

if TYPE_CHECKING:
    from torch import Tensor

Change = Callable[[Sequence["Tensor"], Any], "Tensor"]
"""Make a weight from the tensors that it is stored in, given the config."""
Order = Callable[[Any], Rows]
"""Put the rows of a weight in transformers' order, given the config."""
Values = dict[str, Any]

FOLDER = "Give the model's Hugging Face folder instead"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"

LLAMA = {
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
    """Description of an architecture: how its files are read."""

    model_type: str
    """transformers' type of the model, and the name of its class."""
    model: str
    values: Callable[[GGUFFile], Values] = _nothing
    """Values of the config that the architecture adds to the common ones, or replaces."""
    names: Mapping[str, str] = field(default_factory=dict)
    """transformers' names of a layer's tensors, beyond Llama's. A name with its ending stands for a whole weight. Several tensors
    with one name are the parts of a weight, in this order."""
    ends: Mapping[str, str] = field(default_factory=lambda: _ENDS)
    """Names of tensors outside of the layers."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """Functions that make weights, by the end of transformers' name."""
    whole: Collection[str] = ()
    """Tensors that hold a weight as it is, which a function makes of several tensors in other files."""
    rows: Mapping[str, Order] = field(default_factory=dict)
    rotates_part: bool = False
    """True if the rotary part of a head may be smaller than the head."""
    unchanging: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values that keys which are not read may have."""
    variant: Callable[[GGUFFile], tuple[str, str] | None] = lambda _file: None
    """Another type and class for some files."""

    def names_for(self, file: GGUFFile) -> tuple[str, str]:
        """Return transformers' type and class of the model in ``file``."""
        return self.variant(file) or (self.model_type, self.model)

    @property
    def layer_names(self) -> Mapping[str, str]:
        return {**LLAMA, **self.names}


# -- changes -----------------------------------------------------------------------------------------------------------


def _as_it_is(parts: Sequence["Tensor"], _config: Any) -> "Tensor":
    return parts[0]


def _less_one(parts: Sequence["Tensor"], _config: Any) -> "Tensor":
    """Undo adding one to a norm's weight, which transformers adds in its forward pass."""
    return parts[0] - 1


def _side_by_side(parts: Sequence["Tensor"], _config: Any = None) -> "Tensor":
    import torch  # not above: a file's config is read without it

    return torch.cat([*parts], dim=1)


def _as_row(parts: Sequence["Tensor"], _config: Any) -> "Tensor":
    return parts[0].reshape(1, -1)


def _as_channels(parts: Sequence["Tensor"], _config: Any) -> "Tensor":
    """Weight of a depthwise convolution."""
    return parts[0].unsqueeze(1)


_ONE_ADDED = {"norm.weight": _less_one}
_NORMS_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
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
    """Separate the two halves of a head, which are stored interleaved."""

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


def num_layers(file: GGUFFile) -> int:
    """Number of layers, without the last ones for multi-token prediction, which are not used."""
    return int(file.require("block_count")) - int(file.get("nextn_predict_layers", 0))


def layer_types(file: GGUFFile, every: int, usual_window: int = 0) -> list[str]:
    """Types of attention, layer by layer: sliding where the file says so, or in all layers but each ``every``-th."""
    number = num_layers(file)
    said = file.get("attention.sliding_window_pattern", every)
    slides = said if isinstance(said, list) else [said == 0 or (layer + 1) % said != 0 for layer in range(number)]
    if not file.get("attention.sliding_window", usual_window):
        slides = [False] * number
    return ["sliding_attention" if one else "full_attention" for one in slides[:number]]


def _gemma_2(file: GGUFFile) -> Values:
    return {
        "sliding_window": file.get("attention.sliding_window", 4096),
        "layer_types": layer_types(file, 2, usual_window=4096),
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
    """Return a head's size, or an even share of the width in models of 27 B, which only their depth tells apart."""
    heads = file.number("attention.head_count")
    even = int(file.require("embedding_length")) // heads
    return even if file.require("block_count") == layers_of_27b else int(file.get("attention.key_length", even))


def _phi_3(file: GGUFFile) -> Values:
    values = {**rope(file), "partial_rotary_factor": _rotary_part(file)}
    context = file.get("rope.scaling.original_context_length") or file.require("context_length")
    if LONG_FACTORS in file.names:
        values |= {
            "rope_type": "longrope",
            "short_factor": file.dense(SHORT_FACTORS).tolist(),
            "long_factor": file.dense(LONG_FACTORS).tolist(),
            "attention_factor": float(file.require("rope.scaling.attn_factor")),
            "original_max_position_embeddings": context,
            "factor": file.require("context_length") / context,
        }
    return {
        "rope_parameters": values,
        "original_max_position_embeddings": context,
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


def _gpt_oss(file: GGUFFile) -> Values:
    return {
        "num_local_experts": file.require("expert_count"),
        "num_experts_per_tok": file.require("expert_used_count"),
        "intermediate_size": file.require("expert_feed_forward_length"),
        "sliding_window": file.require("attention.sliding_window"),
        "layer_types": layer_types(file, 2),
        "rope_parameters": {**rope(file), "truncate": False},
    }


def _alternating(parts: Sequence["Tensor"], _config: Any) -> "Tensor":
    """Rows of gate and up, alternating: ``[experts, in, out]``."""
    import torch

    joined = torch.stack([*parts], dim=2).flatten(1, 2)
    return joined.transpose(1, 2) if joined.dim() == 3 else joined


def _transposed(parts: Sequence["Tensor"], _config: Any) -> "Tensor":
    return parts[0].transpose(1, 2)


def _lfm_2(file: GGUFFile) -> Values:
    said = file.require("attention.head_count_kv")
    heads = said if isinstance(said, list) else [said] * num_layers(file)
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if number else "conv" for number in heads],
        "norm_eps": file.require("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": file.require("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def _delta_net(file: GGUFFile) -> Values:
    """Values of hybrids with gated delta nets."""
    layers = num_layers(file)
    every = file.get("full_attention_interval", 4)
    recurs = file.get("attention.recurrent_layers", [(layer + 1) % every != 0 for layer in range(layers)])
    value_heads = file.require("ssm.time_step_rank")
    sections = [size for size in file.get("rope.dimension_sections", []) if size]
    rotary = {**rope(file), "partial_rotary_factor": _rotary_part(file)}
    return {
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurs[:layers]],
        "linear_conv_kernel_dim": file.require("ssm.conv_kernel"),
        "linear_num_key_heads": file.require("ssm.group_count"),
        "linear_key_head_dim": file.require("ssm.state_size"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": file.require("ssm.inner_size") // value_heads,
        "rope_parameters": rotary | ({"mrope_section": sections, "mrope_interleaved": True} if sections else {}),
    }


def _delta_net_with_experts(file: GGUFFile) -> Values:
    return {
        **_delta_net(file),
        **_experts(file),
        "shared_expert_intermediate_size": file.require("expert_shared_feed_forward_length"),
    }


def _log_of_negative(parts: Sequence["Tensor"], _config: Any) -> "Tensor":
    return (-parts[0]).log()


def _grouped(number: Callable[[Any], int] = lambda _config: 1, *, after_keys: bool = False) -> Order:
    """Sort value heads, which are stored in turns of the key heads, by key head; each has ``number`` rows."""

    def order(config: Any) -> Rows:
        keys, size = config.linear_num_key_heads, number(config)
        shared = config.linear_num_value_heads // keys
        first = 2 * keys * config.linear_key_head_dim if after_keys else 0

        def rows(data: NDArray[Any]) -> NDArray[Any]:
            tail = data[first:]
            heads = tail.reshape(shared, keys, size, *data.shape[1:]).swapaxes(0, 1).reshape(tail.shape)
            return np.concatenate([data[:first], heads])

        return rows

    return order


def _value_size(config: Any) -> int:
    return int(config.linear_value_head_dim)


def _grouped_inputs(parts: Sequence["Tensor"], config: Any) -> "Tensor":
    keys, size = config.linear_num_key_heads, config.linear_value_head_dim
    shared = config.linear_num_value_heads // keys
    (weight,) = parts
    return weight.reshape(len(weight), shared, keys, size).transpose(1, 2).reshape(weight.shape)


def _queries_to_gates(parts: Sequence["Tensor"], config: Any) -> "Tensor":
    """Return for each key head its queries, keys, values and gates; newer files store all queries first, then all keys, …"""
    keys, key = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // keys * config.linear_value_head_dim
    if len(parts) == 1:
        return parts[0]
    qkv, gates = parts
    kinds = [*qkv.split_with_sizes([keys * key, keys * key, keys * values]), gates]
    return _side_by_side([kind.reshape(keys, -1, kind.shape[1]) for kind in kinds]).flatten(0, 1)


_DELTA_NET = {
    "post_attention_norm": "post_attention_layernorm",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
_DELTA_NET_CHANGES = {
    "linear_attn.norm.weight": _as_it_is,
    "linear_attn.A_log": _log_of_negative,
    "linear_attn.conv1d.weight": _as_channels,
    **_ONE_ADDED,
}
_QWEN_35 = {
    **_DELTA_NET,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}
_QWEN_35_ROWS = {
    "linear_attn.in_proj_qkv": _grouped(_value_size, after_keys=True),
    "linear_attn.conv1d": _grouped(_value_size, after_keys=True),
    "linear_attn.in_proj_z": _grouped(_value_size),
    "linear_attn.in_proj_a": _grouped(),
    "linear_attn.in_proj_b": _grouped(),
    "linear_attn.A_log": _grouped(),
    "linear_attn.dt_bias": _grouped(),
}


def _latent(file: GGUFFile) -> Values:
    """Values of multi-head latent attention. Older files, which store it expanded, have no keys for its sizes."""
    rotary, heads = file.require("rope.dimension_count"), file.number("attention.head_count")
    key = file.get("attention.key_length_mla") or file.require("attention.key_length")
    value = file.get("attention.value_length_mla") or file.require("attention.value_length")
    for name in ("attention.key_length", "attention.value_length", "attention.head_count_kv"):
        file.get(name)
    scaling = rope(file)
    if scaling["rope_type"] == "yarn":
        mscale = round(file.get("rope.scaling.yarn_log_multiplier", 0.0) / 0.1, 6)
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale} if mscale else {}
    groups = file.get("expert_group_count", 1)
    return {
        "rope_parameters": scaling,
        "num_key_value_heads": heads,
        "head_dim": rotary,
        "kv_lora_rank": file.require("attention.kv_lora_rank"),
        "q_lora_rank": file.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": value,
        "first_k_dense_replace": file.get("leading_dense_block_count", 0),
        "n_routed_experts": file.require("expert_count"),
        "num_experts_per_tok": file.require("expert_used_count"),
        "n_shared_experts": file.require("expert_shared_count"),
        "moe_intermediate_size": file.number("expert_feed_forward_length"),
        "routed_scaling_factor": float(file.get("expert_weights_scale", 0.0)) or 1.0,
        "norm_topk_prob": bool(file.get("expert_weights_norm", False)),
        "n_group": groups,
        "topk_group": file.get("expert_group_used_count", 1),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "num_mtp_layers": 0,
    }


def _deepseek_3(file: GGUFFile) -> tuple[str, str] | None:
    """Type and class of V3 if router scores are sigmoids. A file without that key has sigmoids if it has biases of the scores."""
    has_biases = any(name.endswith(".exp_probs_b.bias") for name in file)
    is_sigmoid = file.get("expert_gating_func", 2 if has_biases else 1) == 2
    return ("deepseek_v3", "DeepseekV3ForCausalLM") if is_sigmoid else None


def _olmo_3(file: GGUFFile) -> tuple[str, str] | None:
    return ("olmo3", "Olmo3ForCausalLM") if file.get("attention.sliding_window", 0) else None


def _olmo(file: GGUFFile) -> Values:
    """Values of OLMo 3, whose sliding layers use unscaled rotary positions."""
    if _olmo_3(file) is None:
        return {}
    full = rope(file)
    local = {"rope_type": "default", "rope_theta": float(file.get("rope.freq_base_swa", full["rope_theta"]))}
    return {
        "sliding_window": file.require("attention.sliding_window"),
        "layer_types": layer_types(file, 4),
        "rope_parameters": {"sliding_attention": local, "full_attention": full},
    }


def _keys_and_values(parts: Sequence["Tensor"], config: Any) -> "Tensor":
    """Return for each head the rows of its keys, which are stored transposed, and of its values."""
    if len(parts) == 1:
        return parts[0]
    keys, values = parts
    return _side_by_side([keys.transpose(1, 2), values]).flatten(0, 1)


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _biases, rows=_INTERLEAVED),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _experts, _EXPERTS, changes=_GATE_UP),
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _qwen_2_moe,
        {**_EXPERTS, **_SHARED_EXPERT},
        changes={**_GATE_UP, **_SHARED_GATE},
    ),
    "gemma": Architecture("gemma", "GemmaForCausalLM", changes=_ONE_ADDED),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        _gemma_2,
        {**_NORMS_BEHIND, "ffn_norm": "pre_feedforward_layernorm"},
        changes=_ONE_ADDED,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _gemma_3,
        {**_NORMS_BEHIND, "ffn_norm": "pre_feedforward_layernorm"},
        changes=_ONE_ADDED,
    ),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        _phi_3,
        {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        rotates_part=True,
    ),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", _biases, rows=_INTERLEAVED),
    "granite": Architecture(
        "granite",
        "GraniteForCausalLM",
        _granite,
        rows=_INTERLEAVED,
        unchanging={"rope.scaling.finetuned": (True,)},
    ),
    "olmo2": Architecture(
        "olmo2",
        "Olmo2ForCausalLM",
        _olmo,
        _NORMS_BEHIND,
        variant=_olmo_3,
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _delta_net_with_experts,
        {
            **_DELTA_NET,
            **_EXPERTS,
            **_SHARED_EXPERT,
            "ssm_in.weight": "linear_attn.in_proj_qkvz.weight",
            "attn_qkv.weight": "linear_attn.in_proj_qkvz.weight",
            "attn_gate.weight": "linear_attn.in_proj_qkvz.weight",
            "ssm_ba": "linear_attn.in_proj_ba",
        },
        changes={
            "linear_attn.in_proj_qkvz.weight": _queries_to_gates,
            **_DELTA_NET_CHANGES,
            **_GATE_UP,
            **_SHARED_GATE,
        },
        whole=("ssm_in.weight",),
        rotates_part=True,
    ),
    "qwen35": Architecture(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        _delta_net,
        _QWEN_35,
        changes={"linear_attn.out_proj.weight": _grouped_inputs, **_DELTA_NET_CHANGES},
        rows=_QWEN_35_ROWS,
        rotates_part=True,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        _delta_net_with_experts,
        {**_QWEN_35, **_EXPERTS, **_SHARED_EXPERT},
        changes={
            "linear_attn.out_proj.weight": _grouped_inputs,
            **_DELTA_NET_CHANGES,
            **_GATE_UP,
            **_SHARED_GATE,
        },
        rows=_QWEN_35_ROWS,
        rotates_part=True,
    ),
    "lfm2": Architecture(
        "lfm2",
        "Lfm2ForCausalLM",
        _lfm_2,
        {
            "attn_norm": "operator_norm",
            "ffn_norm": "ffn_norm",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
            "shortconv.conv": "conv.conv",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
        },
        ends={**_ENDS, "token_embd_norm": "model.embedding_norm"},
        changes={"conv.conv.weight": _as_channels},
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        _gpt_oss,
        {
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
            "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
            "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
            "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
            "ffn_down_exps.weight": "mlp.experts.down_proj",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        changes={
            "mlp.experts.gate_up_proj": _alternating,
            "mlp.experts.gate_up_proj_bias": _alternating,
            "mlp.experts.down_proj": _transposed,
        },
    ),
    "deepseek2": Architecture(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        _latent,
        {
            **_EXPERTS,
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b.weight": "self_attn.kv_b_proj.weight",
            "attn_v_b.weight": "self_attn.kv_b_proj.weight",
            "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
            "ffn_up_shexp": "mlp.shared_experts.up_proj",
            "ffn_down_shexp": "mlp.shared_experts.down_proj",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        },
        changes={**_GATE_UP, "self_attn.kv_b_proj.weight": _keys_and_values},
        whole=("attn_kv_b.weight",),
        rotates_part=True,
        variant=_deepseek_3,
    ),
}
"""Descriptions by ``general.architecture``."""
