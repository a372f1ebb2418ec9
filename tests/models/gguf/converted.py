"""Tiny random models as llama.cpp's converter stores them: the keys and tensors of their files.

``tests/llamacpp`` compares these files with the converter's own.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import transformers as tf
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCAB = 272
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GEMMA: dict[str, Any] = {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 8}
ROTARY: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
ROUTED: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED: dict[str, Any] = {**ROUTED, "shared_expert_intermediate_size": 40}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "head_dim": 32,
    "num_hidden_layers": 5,
}
QUARTER: dict[str, Any] = {**ROTARY, "partial_rotary_factor": 0.25}
AXES: dict[str, Any] = {**QUARTER, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
YARN: dict[str, Any] = {
    **ROTARY,
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
LONG: dict[str, Any] = {
    **ROTARY,
    "rope_type": "longrope",
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 256,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
Case = tuple[str, Any, dict[str, Any]]
CASES: dict[str, Case] = {
    "gemma": ("gemma", tf.GemmaConfig, {"head_dim": 24}),
    "gemma2": ("gemma2", tf.Gemma2Config, GEMMA),
    "gemma3": ("gemma3", tf.Gemma3TextConfig, {**GEMMA, "num_hidden_layers": 7}),
    "phi3": ("phi3", tf.Phi3Config, {"sliding_window": 8, "original_max_position_embeddings": 512}),
    "phi3 for long contexts": (
        "phi3",
        tf.Phi3Config,
        {"rope_parameters": LONG, "original_max_position_embeddings": 256},
    ),
    "smollm3": ("smollm3", tf.SmolLM3Config, {"num_hidden_layers": 5}),
    "granite": (
        "granite",
        tf.GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.125,
            "attention_bias": True,
        },
    ),
    "olmo2": ("olmo2", tf.Olmo2Config, {}),
    "olmo3": (
        "olmo2",
        tf.Olmo3Config,
        {
            "sliding_window": 8,
            "num_hidden_layers": 5,
            "rope_parameters": {"full_attention": {**ROTARY, "rope_theta": 5e4}, "sliding_attention": ROTARY},
        },
    ),
    "qwen2moe": ("qwen2moe", tf.Qwen2MoeConfig, SHARED),
    "qwen3next": ("qwen3next", tf.Qwen3NextConfig, {**DELTA, **SHARED, "rope_parameters": QUARTER}),
    "qwen35": ("qwen35", tf.Qwen3_5TextConfig, {**DELTA, "rope_parameters": AXES}),
    "qwen35moe": ("qwen35moe", tf.Qwen3_5MoeTextConfig, {**DELTA, **SHARED, "rope_parameters": AXES}),
    "lfm2": (
        "lfm2",
        tf.Lfm2Config,
        {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    ),
    "gpt-oss": (
        "gpt-oss",
        tf.GptOssConfig,
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "intermediate_size": 64,
        },
    ),
    "deepseek2": ("deepseek2", tf.DeepseekV2Config, {**LATENT, "q_lora_rank": 24}),
    "deepseek2 without a projection of queries": ("deepseek2", tf.DeepseekV2Config, {**LATENT, "q_lora_rank": None}),
    "deepseek3": (
        "deepseek2",
        tf.DeepseekV3Config,
        {
            **LATENT,
            "q_lora_rank": 24,
            "n_group": 2,
            "topk_group": 1,
            "num_mtp_layers": 0,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
}
"""Architectures, configs and their options by name, of files that differ from Llama's."""
LIKE_LLAMA: dict[str, Case] = {
    "llama": ("llama", tf.LlamaConfig, {}),
    "llama with biases": ("llama", tf.LlamaConfig, {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", tf.Qwen2Config, {}),
    "qwen3": ("qwen3", tf.Qwen3Config, {"head_dim": 24}),
    "qwen3moe": (
        "qwen3moe",
        tf.Qwen3MoeConfig,
        {**ROUTED, "head_dim": 16, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
}
EVERY = {**CASES, **LIKE_LLAMA}


def random_model(case: str, **changes: Any) -> PreTrainedModel:
    """With every weight random: norms, biases, sinks, states and routers included; ``changes`` are made to the config."""
    torch.manual_seed(0)
    _, kind, own = EVERY[case]
    config = kind(**copy.deepcopy({**SHAPE, **own, **changes}))
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for name, weight in model.state_dict().items():
        if "norm" in name or weight.dim() == 1:
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
        elif "conv" not in name and (weight.dim() > 2 or "router" in name or name.endswith("gate.weight")):
            torch.nn.init.normal_(weight, 0.0, 0.2)
    return model


# -- keys --------------------------------------------------------------------------------------------------------------


def keys_of(architecture: str, own: Any) -> dict[str, Any]:
    """Return the keys of the file, without the architecture's prefix."""
    full = own.rope_parameters.get("full_attention", own.rope_parameters)
    keys = {
        "context_length": own.max_position_embeddings,
        "embedding_length": own.hidden_size,
        "block_count": own.num_hidden_layers,
        "feed_forward_length": own.intermediate_size,
        "attention.head_count": own.num_attention_heads,
        "attention.head_count_kv": own.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": getattr(own, "rms_norm_eps", None) or own.norm_eps,
        "rope.freq_base": full["rope_theta"],
        **_OWN.get(architecture, lambda _: {})(own),
    }
    if full["rope_type"] == "yarn":
        names = {"factor": "factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        keys |= {f"rope.scaling.{name}": full.get(key) for key, name in names.items()}
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.original_context_length": full["original_max_position_embeddings"],
        }
    return keys


def _gemma(own: Any) -> dict[str, Any]:
    return {
        "attention.key_length": own.head_dim,
        "attention.value_length": own.head_dim,
        "attention.sliding_window": own.sliding_window,
    }


def _gemma_2(own: Any) -> dict[str, Any]:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {**_gemma(own), **{key: getattr(own, key) for key in caps}}


def _phi_3(own: Any) -> dict[str, Any]:
    rotary, size = own.rope_parameters, own.hidden_size // own.num_attention_heads
    keys = {
        "rope.dimension_count": int(size * rotary["partial_rotary_factor"]),
        "rope.scaling.original_context_length": own.original_max_position_embeddings,
        "attention.sliding_window": own.sliding_window or 0,
    }
    if "long_factor" in rotary:
        scale = own.max_position_embeddings / own.original_max_position_embeddings
        keys["rope.scaling.attn_factor"] = float(
            np.sqrt(1 + np.log(scale) / np.log(own.original_max_position_embeddings))
        )
    return keys


def _granite(own: Any) -> dict[str, Any]:
    return {
        "vocab_size": own.vocab_size,
        "rope.dimension_count": own.hidden_size // own.num_attention_heads,
        "attention.scale": own.attention_multiplier,
        "embedding_scale": own.embedding_multiplier,
        "residual_scale": own.residual_multiplier,
        "logit_scale": own.logits_scaling,
    }


def _olmo(own: Any) -> dict[str, Any]:
    if not hasattr(own, "layer_types"):
        return {}
    slides = [kind == "sliding_attention" for kind in own.layer_types]
    return {
        "rope.freq_base_swa": own.rope_parameters["sliding_attention"]["rope_theta"],
        "attention.sliding_window": own.sliding_window,
        "attention.sliding_window_pattern": slides,
    }


def _mixture(own: Any) -> dict[str, Any]:
    shared = getattr(own, "shared_expert_intermediate_size", None)
    return {
        "expert_count": own.num_experts,
        "expert_used_count": own.num_experts_per_tok,
        "expert_feed_forward_length": own.moe_intermediate_size,
        "expert_shared_feed_forward_length": shared,
    }


def _delta_net(own: Any) -> dict[str, Any]:
    sections = own.rope_parameters.get("mrope_section")
    return {
        "attention.key_length": own.head_dim,
        "attention.value_length": own.head_dim,
        "rope.dimension_count": own.head_dim // 4,
        **({"rope.dimension_sections": [*sections, 0]} if sections else {}),
        "ssm.conv_kernel": own.linear_conv_kernel_dim,
        "ssm.state_size": own.linear_key_head_dim,
        "ssm.group_count": own.linear_num_key_heads,
        "ssm.time_step_rank": own.linear_num_value_heads,
        "ssm.inner_size": own.linear_num_value_heads * own.linear_value_head_dim,
        "full_attention_interval": 4,
    }


def _lfm_2(own: Any) -> dict[str, Any]:
    heads = [own.num_key_value_heads * (kind == "full_attention") for kind in own.layer_types]
    return {"attention.head_count_kv": heads, "shortconv.l_cache": own.conv_L_cache, "vocab_size": own.vocab_size}


def _gpt_oss(own: Any) -> dict[str, Any]:
    return {
        **_gemma(own),
        "expert_count": own.num_local_experts,
        "expert_used_count": own.num_experts_per_tok,
        "expert_feed_forward_length": own.intermediate_size,
    }


def _deepseek(own: Any) -> dict[str, Any]:
    is_third = own.model_type == "deepseek_v3"
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": own.kv_lora_rank + own.qk_rope_head_dim,
        "attention.value_length": own.kv_lora_rank,
        "attention.key_length_mla": own.qk_nope_head_dim + own.qk_rope_head_dim,
        "attention.value_length_mla": own.v_head_dim,
        "attention.kv_lora_rank": own.kv_lora_rank,
        **({"attention.q_lora_rank": own.q_lora_rank} if own.q_lora_rank else {}),
        "rope.dimension_count": own.qk_rope_head_dim,
        "leading_dense_block_count": own.first_k_dense_replace,
        "expert_count": own.n_routed_experts,
        "expert_used_count": own.num_experts_per_tok,
        "expert_shared_count": own.n_shared_experts,
        "expert_feed_forward_length": own.moe_intermediate_size,
        "expert_weights_scale": own.routed_scaling_factor,
        **(
            {
                "expert_group_count": own.n_group,
                "expert_group_used_count": own.topk_group,
                "expert_weights_norm": own.norm_topk_prob,
                "expert_gating_func": 2,
                "rope.scaling.yarn_log_multiplier": 0.1 * own.rope_parameters["mscale_all_dim"],
            }
            if is_third
            else {}
        ),
    }


def _like_llama(own: Any) -> dict[str, Any]:
    return {"attention.key_length": getattr(own, "head_dim", None)}


_OWN: dict[str, Callable[[Any], dict[str, Any]]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), _like_llama),
    "qwen3moe": lambda own: {**_like_llama(own), **_mixture(own)},
    "gemma": lambda own: {"attention.key_length": own.head_dim, "attention.value_length": own.head_dim},
    "gemma2": _gemma_2,
    "gemma3": lambda own: {**_gemma(own), "rope.freq_base_swa": 10_000.0},
    "phi3": _phi_3,
    "granite": _granite,
    "olmo2": _olmo,
    "qwen2moe": _mixture,
    "qwen3next": lambda own: {**_delta_net(own), **_mixture(own)},
    "qwen35": _delta_net,
    "qwen35moe": lambda own: {**_delta_net(own), **_mixture(own)},
    "lfm2": _lfm_2,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek,
}

# -- tensors -----------------------------------------------------------------------------------------------------------

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.out_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert{s}.{part}_proj": f"ffn_{part}_shexp" for s in ("", "s") for part in ("gate", "up", "down")},
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
}
_NORM_BEHIND = {"gemma2", "gemma3", "olmo2", "qwen3next", "qwen35", "qwen35moe", "gpt-oss"}
"""Architectures whose files call it the norm behind attention, wherever it stands."""
_ONE_ADDED = {"gemma", "gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe"}
_INTERLEAVED = {"llama", "smollm3", "granite"}


def row_order(rows: int, heads: int) -> list[int]:
    """Row 2i of a head is row i of its first half, row 2i + 1 row i of its second: how files of Llama store queries and keys."""
    size = rows // heads
    return [head * size + half * (size // 2) + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]


def _tiled(weight: Tensor, own: Any, *, dim: int = 0, size: int) -> Tensor:
    """Value heads in turns of their key heads."""
    keys = own.linear_num_key_heads
    return weight.unflatten(dim, (keys, -1, size)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def _delta_parts(architecture: str, part: str, weight: Tensor, own: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a gated delta net; value heads are in another order but in Qwen3-Next's files."""
    size = own.linear_value_head_dim
    first = 2 * own.linear_num_key_heads * own.linear_key_head_dim
    is_tiled = architecture != "qwen3next"

    def heads(weight: Tensor, size: int, first: int = 0, dim: int = 0) -> Tensor:
        if not is_tiled:
            return weight
        if first:
            return torch.cat([weight[:first], _tiled(weight[first:], own, size=size)])
        return _tiled(weight, own, dim=dim, size=size)

    name = part.removeprefix("linear_attn.").removesuffix(".weight")
    if name == "A_log":
        yield "ssm_a", heads(-weight.exp(), 1)
    elif name == "dt_bias":
        yield "ssm_dt.bias", heads(weight, 1)
    elif name == "in_proj_qkvz":
        keys, key = own.linear_num_key_heads, own.linear_key_head_dim
        value = own.linear_num_value_heads // keys * size
        kinds = weight.unflatten(0, (keys, -1)).split([key, key, value, value], dim=1)
        flat = [kind.flatten(0, 1) for kind in kinds]
        yield "attn_qkv.weight", torch.cat(flat[:3])
        yield "attn_gate.weight", flat[3]
    else:
        changed = {
            "conv1d": lambda: heads(weight.squeeze(1), size, first),
            "in_proj_qkv": lambda: heads(weight, size, first),
            "in_proj_z": lambda: heads(weight, size),
            "in_proj_a": lambda: heads(weight, 1),
            "in_proj_b": lambda: heads(weight, 1),
            "out_proj": lambda: heads(weight, size, dim=1),
        }.get(name, lambda: weight)()
        yield f"{_NAMES[f'linear_attn.{name}']}.weight", changed


def _layer_parts(architecture: str, part: str, weight: Tensor, own: Any) -> Iterator[tuple[str, Tensor]]:
    """A layer's tensors for a weight of transformers'."""
    stem, _, ending = part.rpartition(".")
    if part.startswith("linear_attn."):
        yield from _delta_parts(architecture, part, weight, own)
    elif part == "self_attn.sinks":
        yield "attn_sinks.weight", weight
    elif part == "mlp.gate.e_score_correction_bias":
        yield "exp_probs_b.bias", weight
    elif stem == "self_attn.kv_b_proj":
        split = weight.unflatten(0, (own.num_attention_heads, -1)).split([own.qk_nope_head_dim, own.v_head_dim], dim=1)
        yield "attn_k_b.weight", split[0].transpose(1, 2)
        yield "attn_v_b.weight", split[1]
    elif part.startswith("mlp.experts."):
        kind = "bias" if ending.endswith("_bias") else "weight"
        if architecture == "gpt-oss" and kind == "weight":
            weight = weight.transpose(1, 2)
        if "gate_up" not in ending:
            yield f"ffn_down_exps.{kind}", weight
        elif architecture == "gpt-oss":
            yield f"ffn_gate_exps.{kind}", weight[:, ::2]
            yield f"ffn_up_exps.{kind}", weight[:, 1::2]
        else:
            yield f"ffn_gate_exps.{kind}", weight[:, : weight.shape[1] // 2]
            yield f"ffn_up_exps.{kind}", weight[:, weight.shape[1] // 2 :]
    else:
        heads = {"self_attn.q_proj": own.num_attention_heads, "self_attn.k_proj": own.num_key_value_heads}
        if architecture in _INTERLEAVED and stem in heads:
            weight = weight[row_order(len(weight), heads[stem])]
        if stem == "conv.conv":
            weight = weight.squeeze(1)
        behind = stem == "post_attention_layernorm" and architecture in _NORM_BEHIND
        yield f"{'post_attention_norm' if behind else _NAMES[stem]}.{ending}", weight


def parts(architecture: str, name: str, weight: Tensor, own: Any) -> dict[str, Tensor]:
    """The file's tensors for a weight of transformers'."""
    if name.startswith("model.layers."):
        layer, part = name.removeprefix("model.layers.").split(".", 1)
        return {f"blk.{layer}.{key}": one for key, one in _layer_parts(architecture, part, weight, own)}
    stem, _, ending = name.rpartition(".")
    return {f"{_NAMES[stem]}.{ending}": weight}


def stored_weights(model: PreTrainedModel, architecture: str) -> dict[str, Tensor]:
    """Every tensor of the file."""
    own, found = model.config, dict[str, Tensor]()
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and own.tie_word_embeddings:
            continue
        if architecture in _ONE_ADDED and name.endswith("norm.weight") and "linear_attn.norm" not in name:
            weight = weight + 1
        found |= parts(architecture, name, weight, own)
    for length in ("short", "long"):
        if factors := own.rope_parameters.get(f"{length}_factor"):
            found[f"rope_factors_{length}.weight"] = torch.tensor(factors)
    return found
