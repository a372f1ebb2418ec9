"""Read transformers' config of a target from a GGUF file, and map the file's tensors to the model's weights.

transformers reads GGUF files too, but guesses values that its config classes do not find (the head size of Qwen3, Llama 3's
scaled rotary frequencies). Here every number comes from the file, every key that describes the model must be read, and every
tensor must belong to a weight.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from volley.errors import CheckpointError, UnsupportedModelError
from volley.models.gguf.architectures import (
    ARCHITECTURES,
    FOLDER,
    LONG_FACTORS,
    SHORT_FACTORS,
    Architecture,
    Change,
    num_layers,
    rope,
)
from volley.models.gguf.file import UNREAD_SCALING, GGUFFile, Rows

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ROPE_FACTORS = "rope_freqs.weight"
_OF_NO_WEIGHT = {ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS}
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_WITHOUT_EFFECT = {
    *("vocab_size", "tensor_data_layout", "pooling_type", "rope.scaling.finetuned"),
    "rope.scaling.original_context_length",
}
_UNCHANGING: dict[str, tuple[Any, ...]] = {
    **UNREAD_SCALING,
    "attention.causal": (True,),
    **dict.fromkeys(
        (
            *(
                "expert_count",
                "expert_used_count",
                "expert_shared_count",
                "expert_group_count",
                "expert_group_used_count",
            ),
            *("leading_dense_block_count", "attention.sliding_window", "attention.clamp_kqv"),
            *("attn_logit_softcapping", "final_logit_softcapping", "attention.max_alibi_bias"),
        ),
        (0, 0.0),
    ),
    "expert_gating_func": (0, 1),
    **dict.fromkeys(("expert_weights_scale", "residual_scale", "embedding_scale", "logit_scale"), (0.0, 1.0)),
}
"""Neutral values of keys that are not read."""


def check_names(file: GGUFFile, missing: set[str], unknown: set[str]) -> None:
    """Refuse a file that lacks weights of the model, or has unknown ones."""
    parts = [f"lacks {', '.join(sorted(missing))}"] * bool(missing)
    parts += [f"has unknown {', '.join(sorted(unknown))}"] * bool(unknown)
    if parts:
        raise CheckpointError(f"{file.path} {' and '.join(parts)}; fetch or convert it again")


def described(file: GGUFFile) -> Architecture:
    """Return the description of a file's architecture; an unknown one raises an error that names the known ones."""
    if file.architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path} holds a model of architecture {file.architecture!r}; volley reads GGUF files of "
            f"{', '.join(ARCHITECTURES)}. {FOLDER}"
        )
    return ARCHITECTURES[file.architecture]


def read_config(file: GGUFFile) -> "PretrainedConfig":
    """Return transformers' config of a file of a known architecture."""
    from transformers import AutoConfig

    values = config_values(file)
    return AutoConfig.for_model(**values)


def config_values(file: GGUFFile) -> dict[str, Any]:
    """Return the values of transformers' config of a file of a known architecture."""
    known = described(file)
    if file.architecture in ("llama", "qwen2", "granite") and file.get("expert_count", 0):
        raise UnsupportedModelError(
            f"{file.path} holds a {file.architecture} model with experts, such as Mixtral; of these volley reads qwen2moe "
            f"and qwen3moe. {FOLDER}"
        )
    own, has_experts = known.values(file), bool(file.get("expert_count", 0))
    hidden, heads = file.require("embedding_length"), file.number("attention.head_count")
    head_dim = own.get("head_dim") or file.get("attention.key_length", hidden // heads)
    same = {"attention.value_length": "v_head_dim" not in own, "rope.dimension_count": not known.rotates_part}
    for key in (key for key, must in same.items() if must):
        if file.get(key, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{file.path}: {key} is {file.get(key)} with heads of {head_dim}; only equal sizes are supported. {FOLDER}"
            )
    model_type, model = known.names_for(file)
    values = {
        "model_type": model_type,
        "architectures": [model],
        "vocab_size": file.shape("token_embd.weight")[0] if "token_embd.weight" in file.names else 0,
        "hidden_size": hidden,
        "intermediate_size": file.number("feed_forward_length", 0 if has_experts else None),
        "num_hidden_layers": num_layers(file),
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("num_key_value_heads") or file.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.require("context_length"),
        "rms_norm_eps": file.require("attention.layer_norm_rms_epsilon"),
        "rope_parameters": own.get("rope_parameters") or rope(file),
        "tie_word_embeddings": "output.weight" not in file.names,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": None,
        **own,
    }
    _check_read(file, known)
    return values


def _check_read(file: GGUFFile, known: Architecture) -> None:
    """Refuse a file with a key that describes the model and was not read."""
    unchanging = {**_UNCHANGING, **known.unchanging}
    for key in file.unread_keys():
        value, usual = file.get(key), unchanging.get(key, ())
        if key not in (_WITHOUT_EFFECT - known.unchanging.keys()) and value not in usual:
            raise UnsupportedModelError(
                f"{file.path}: {file.architecture}.{key} is {value!r}, which is not supported: volley does not read this key "
                f"of {file.architecture} files. {FOLDER}"
            )


def scale_frequencies(file: GGUFFile, model: "PreTrainedModel") -> None:
    """Divide the rotary frequencies by the file's factors (Llama 3.1 and later)."""
    if ROPE_FACTORS not in file.names:
        return
    rotary = model.get_submodule("model.rotary_emb")
    for name in ("inv_freq", "original_inv_freq"):
        buffer = rotary.get_buffer(name)
        buffer /= file.dense(ROPE_FACTORS).to(buffer)


def own_name(file: GGUFFile, name: str) -> str:
    """Return transformers' name of a tensor; an error if the model has no such weight."""
    known = described(file)
    found = _place(known, name)
    if found is None:
        raise UnsupportedModelError(
            f"{file.path} has a tensor {name}, for which {known.names_for(file)[1]} has no place; {FOLDER[0].lower()}{FOLDER[1:]}"
        )
    return found


def _place(known: Architecture, name: str) -> str | None:
    layer = _LAYER.fullmatch(name)
    names = known.layer_names if layer else known.ends
    own = layer[2] if layer else name
    stem, _, ending = own.rpartition(".")
    if own in names:
        found = names[own]
    elif stem in names and ending in ("weight", "bias"):
        found = f"{names[stem]}.{ending}"
    else:
        return None
    return f"model.layers.{layer[1]}.{found}" if layer else found


def weight_names(file: GGUFFile) -> dict[str, tuple[str, ...]]:
    """Return the file's tensors that make up each weight, by transformers' name of the weight."""
    order = {own: place for place, own in enumerate(described(file).layer_names)}
    layers = num_layers(file)
    found: dict[str, tuple[str, ...]] = {}
    for name in file:
        layer = _LAYER.fullmatch(name)
        predicts_further = layer is not None and layers <= int(layer[1]) < file.require("block_count")
        if name not in _OF_NO_WEIGHT and not predicts_further:
            own = own_name(file, name)
            found[own] = (*found.get(own, ()), name)
    return {
        own: tuple(sorted(names, key=lambda name: order.get(name.split(".", 2)[-1], 0))) for own, names in found.items()
    }


def row_order(architecture: str, name: str, config: Any) -> Rows | None:
    """Return the function that puts the rows of a tensor in transformers' order; ``None`` if they already are."""
    known = ARCHITECTURES[architecture]
    found = _of(known.rows, _place(known, name))
    return found(config) if found else None


def change_of(architecture: str, name: str) -> Change | None:
    """Return the function that makes a weight from its stored tensors; ``None`` if the weight is stored as it is."""
    return _of(ARCHITECTURES[architecture].changes, name)


def is_changed(file: GGUFFile, name: str) -> bool:
    """Return whether a tensor is not stored as the weight that it belongs to is."""
    known = ARCHITECTURES.get(file.architecture)
    return (
        known is not None
        and name.split(".", 2)[-1] not in known.whole
        and _of(known.changes, _place(known, name)) is not None
    )


_Entry = TypeVar("_Entry")


def _of(table: Mapping[str, _Entry], name: str | None) -> _Entry | None:
    """Return the entry whose key ends ``name``, or ends the part of ``name`` before its last dot."""
    if name is None:
        return None
    return next(
        (value for key, value in table.items() if name.endswith(key) or name.rpartition(".")[0].endswith(key)), None
    )
