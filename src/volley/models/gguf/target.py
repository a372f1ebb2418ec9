"""What a GGUF file says of a target: transformers' config, and which of its weights each tensor is.

transformers reads GGUF files too, but guesses what its config classes do not find (the head size of Qwen3, Llama 3's scaled
rotary frequencies). Here every number comes from the file, and every tensor of the file must have a place.
"""

import re
from typing import Any

import numpy as np
import transformers
from numpy.typing import NDArray
from transformers import PretrainedConfig, PreTrainedModel

from volley.errors import CheckpointError, UnsupportedModelError
from volley.models.gguf.file import UNREAD_SCALING, YARN, GGUFFile, Rows
from volley.models.gguf.tokens import Tokens

CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
}
"""transformers' classes by the file's architecture."""

_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_LAYER = {
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
    "ffn_gate_inp": "mlp.gate",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_DOWN_EXPERTS = "ffn_down_exps"
_GATE_EXPERTS, _UP_EXPERTS = "ffn_gate_exps", "ffn_up_exps"  # one tensor in transformers
ROPE_FACTORS = "rope_freqs.weight"
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def check_names(file: GGUFFile, missing: set[str], unknown: set[str]) -> None:
    """Refuse a file that lacks weights of the model, or has others."""
    parts = [f"lacks {', '.join(sorted(missing))}"] * bool(missing)
    parts += [f"has unknown {', '.join(sorted(unknown))}"] * bool(unknown)
    if parts:
        raise CheckpointError(f"{file.path} {' and '.join(parts)}; fetch or convert it again")


def read_config(file: GGUFFile) -> PretrainedConfig:
    """transformers' config of a file of a known architecture; an error that names the known ones otherwise."""
    if file.architecture not in CLASSES:
        raise UnsupportedModelError(
            f"{file.path} holds a model of architecture {file.architecture!r}; volley reads GGUF files of "
            f"{', '.join(CLASSES)}. Give the model's Hugging Face folder instead"
        )
    if file.architecture in ("llama", "qwen2") and file.get("expert_count", 0):
        raise UnsupportedModelError(
            f"{file.path} holds a {file.architecture} model with experts, such as Mixtral; of these volley reads qwen3moe. "
            "Give the model's Hugging Face folder instead"
        )
    hidden, heads = file.require("embedding_length"), file.require("attention.head_count")
    head_dim = file.get("attention.key_length", hidden // heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if file.get(key, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{file.path}: {key} is {file.get(key)} with heads of {head_dim}; only equal sizes are supported. "
                "Give the model's Hugging Face folder instead"
            )
    values = {
        "vocab_size": file.shape("token_embd.weight")[0] if "token_embd.weight" in file.names else 0,
        "hidden_size": hidden,
        "intermediate_size": file.require("feed_forward_length"),
        "num_hidden_layers": file.require("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.require("context_length"),
        "rms_norm_eps": file.require("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file),
        "tie_word_embeddings": "output.weight" not in file.names,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": None,
    }
    if file.architecture == "llama":
        values |= {name: f"blk.0.{key}.bias" in file.names for name, key in _LLAMA_BIASES.items()}
    if file.architecture == "qwen3moe":
        values |= {
            "num_experts": file.require("expert_count"),
            "num_experts_per_tok": file.require("expert_used_count"),
            "moe_intermediate_size": file.require("expert_feed_forward_length"),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    config: PretrainedConfig = getattr(transformers, CLASSES[file.architecture][0])(**values)
    config.architectures = [CLASSES[file.architecture][1]]
    return config


_LLAMA_BIASES = {"attention_bias": "attn_q", "mlp_bias": "ffn_gate"}


def _rope(file: GGUFFile) -> dict[str, Any]:
    """transformers' rotary parameters; Llama 3's factors are a tensor (:func:`scale_frequencies`)."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(file.get("rope.freq_base", 10_000.0))}
    kind = file.get("rope.scaling.type", "linear")  # older files have a factor alone
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path} scales rotary positions by {kind!r}; none, linear and yarn are supported. "
            "Give the model's Hugging Face folder instead"
        )
    file.refuse_unless_neutral(UNREAD_SCALING, "Give the model's Hugging Face folder instead")
    factor = float(file.get("rope.scaling.factor", file.get("rope.scale_linear", 1.0)))
    if kind == "none" or factor == 1.0:
        return rope
    if kind == "linear":
        return {**rope, "rope_type": "linear", "factor": factor}
    given = {key: file.get(f"rope.scaling.{name}") for key, name in YARN.items()}
    return {
        **rope,
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": file.require("rope.scaling.original_context_length"),
        **{key: float(value) for key, value in given.items() if value is not None},
    }


def scale_frequencies(file: GGUFFile, model: PreTrainedModel) -> None:
    """Divide the rotary frequencies by the file's factors, as Llama 3.1 and later have them."""
    if ROPE_FACTORS not in file.names:
        return
    rotary = model.get_submodule("model.rotary_emb")
    for name in ("inv_freq", "original_inv_freq"):
        buffer = rotary.get_buffer(name)
        buffer /= file.dense(ROPE_FACTORS).to(buffer)


def own_name(file: GGUFFile, name: str) -> str:
    """transformers' name of a tensor; an error if the model has no place for it."""
    layer = _LAYER.fullmatch(name)
    if layer is not None and layer[2] in _OF_LAYER:
        ending = "" if layer[2] == _DOWN_EXPERTS else f".{layer[3]}"
        return f"model.layers.{layer[1]}.{_OF_LAYER[layer[2]]}{ending}"
    stem, _, ending = name.rpartition(".")
    if stem in _WHOLE and ending in ("weight", "bias"):
        return f"{_WHOLE[stem]}.{ending}"
    raise UnsupportedModelError(
        f"{file.path} has a tensor {name}, for which {CLASSES[file.architecture][1]} has no place; "
        "give the model's Hugging Face folder instead"
    )


def weight_names(file: GGUFFile) -> dict[str, tuple[str, ...]]:
    """The file's tensors that make up each weight, by transformers' name of it."""
    found: dict[str, tuple[str, ...]] = {}
    for name in file:
        if f".{_GATE_EXPERTS}." in name:
            up = name.replace(_GATE_EXPERTS, _UP_EXPERTS)
            found[f"model.layers.{name.split('.')[1]}.mlp.experts.gate_up_proj"] = name, up
        elif name != ROPE_FACTORS and f".{_UP_EXPERTS}." not in name:
            found[own_name(file, name)] = (name,)
    return found


def row_order(architecture: str, name: str, config: Any) -> Rows | None:
    """How to bring back the rows of queries and keys, which files of Llama store with the two halves of a head interleaved."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if architecture != "llama" or heads is None:
        return None

    def order(data: NDArray[Any]) -> NDArray[Any]:
        split = data.reshape(heads, len(data) // heads // 2, 2, *data.shape[1:])
        return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(data.shape)

    return order


def stop_tokens(file: GGUFFile) -> list[int]:
    """Tokens that end a text or a turn."""
    return Tokens(file).ends()
