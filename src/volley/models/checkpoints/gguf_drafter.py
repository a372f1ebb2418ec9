"""Drafters in llama.cpp's GGUF form: architecture ``dflash``, with DSpark's Markov head if there is one.

The file also holds the target's tokens, because llama.cpp reads the size of the vocabulary and the mask token from them. Weights
keep their dtype; vectors are fp32. llama.cpp numbers a tap by the layer whose input it is, one more than volley.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from volley.errors import CheckpointError, ConfigError, UnsupportedModelError
from volley.files import replaced
from volley.models.checkpoints.checkpoint import Checkpoint, DrafterConfig, HeadConfig
from volley.models.gguf.architectures import LLAMA
from volley.models.gguf.file import UNREAD_SCALING, YARN, GGUFFile, is_gguf
from volley.models.gguf.header import gguf_package

ARCHITECTURE = "dflash"

_NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "head.markov_w1.weight": "markov_w1.weight",
    "head.markov_w2.weight": "markov_w2.weight",
    "d2t": "d2t",
}
_SIZES = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
}
"""Keys of sizes that every file has."""
_IGNORED = ("conf_proj.weight", "conf_proj.bias")
"""DSpark's confidence head, which volley does not read from GGUF files."""


def _names(config: DrafterConfig) -> dict[str, str]:
    """Return GGUF's names by volley's names."""
    layers = {
        f"layers.{index}.{own}.weight": f"blk.{index}.{theirs}.weight"
        for index in range(config.num_hidden_layers)
        for theirs, own in LLAMA.items()
    }
    return {**_NAMES, **layers}


def read_gguf(path: Path) -> Checkpoint:
    """Read a drafter from llama.cpp's file; quantised weights are decoded to fp32."""
    file = GGUFFile(path)
    if file.architecture != ARCHITECTURE:
        raise UnsupportedModelError(
            f"{path} holds a model of architecture {file.architecture!r}, not a drafter of {ARCHITECTURE!r}; "
            "give a drafter in GGUF or its folder"
        )
    if "selector_hidden.weight" in file.names:
        raise UnsupportedModelError(f"{path} is a DFlash 2 drafter; volley reads DFlash and DSpark drafters")
    config = _read_config(file)
    own = {theirs: name for name, theirs in _names(config).items()}
    unknown = sorted(name for name in file if name not in own and name not in _IGNORED)
    if unknown:
        raise CheckpointError(f"{path} has unknown {', '.join(unknown)}; convert the drafter again")
    tensors = {own[name]: file.dense(name) for name in file if name in own}
    if "d2t" in tensors:  # absolute ids in the file
        tensors["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))
    common = torch.bfloat16 if tensors.get("fc.weight", torch.empty(0)).dtype == torch.bfloat16 else torch.float32
    return Checkpoint(config, {k: v.to(common) if v.is_floating_point() else v for k, v in tensors.items()})


def _read_config(file: GGUFFile) -> DrafterConfig:
    layers, heads = file.require("block_count"), file.require("attention.head_count")
    head_dim = file.get("attention.key_length", file.require("embedding_length") // heads)
    file.refuse_unless_neutral(_unread(head_dim), "Give another drafter")
    window, sliding = file.get("attention.sliding_window"), file.get("attention.sliding_window_pattern")
    if file.get("attention.causal") is True:
        raise UnsupportedModelError(
            f"{file.path}: attention.causal is true; drafters with causal blocks are not supported"
        )
    head, rows = None, None
    if "markov_w1.weight" in file.names:
        head = HeadConfig(type="dspark", rank=file.shape("markov_w1.weight")[1])
    from_anchor = bool(file.get("sample_from_anchor", head is not None))
    if "output.weight" in file.names:
        rows = file.shape("output.weight")[0]
    vocab_size = file.get("vocab_size") or file.num_tokens
    mask = file.metadata.get("tokenizer.ggml.mask_token_id")
    if not vocab_size or mask is None:
        raise CheckpointError(f"{file.path} names no tokens or no mask token; convert the drafter again")
    return DrafterConfig(
        **{own: file.require(key) for own, key in _SIZES.items()},
        num_key_value_heads=file.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=vocab_size,
        num_target_layers=None,
        block_size=file.get("block_size", 16) + from_anchor,
        mask_token_id=mask,
        target_layer_ids=tuple(layer - 1 for layer in file.require("target_layers")),
        rms_norm_eps=_rounded(file.require("attention.layer_norm_rms_epsilon")),
        rope_theta=file.get("rope.freq_base", 10_000.0),
        rope_scaling=_read_scaling(file),
        sliding_window=window,
        layer_types=tuple(
            "sliding_attention" if slides else "full_attention" for slides in sliding or [False] * layers
        ),
        head=head,
        draft_vocab_size=rows,
        draft_window=file.get("draft_window"),
        sample_from_anchor=from_anchor,
        own_embedding="token_embd.weight" in file.names,
        final_logit_softcapping=_rounded(file.get("final_logit_softcapping", 0.0)),
    )


def _unread(head_dim: int) -> dict[str, tuple[Any, ...]]:
    """Return the neutral values of keys that llama.cpp computes with and volley's drafters lack."""
    return {
        "hidden_activation": ("silu",),
        "embedding_scale": (0.0, 1.0),
        "logit_scale": (0.0, 1.0),
        "attention.scale": (0.0, float(np.float32(head_dim**-0.5))),
        "attention.value_scale": (0.0, 1.0),
        "rope.dimension_count": (head_dim,),
        **UNREAD_SCALING,
    }


def _rounded(value: float) -> float:
    """Return the decimal number whose nearest fp32 number is ``value``."""
    return float(f"{value:.7g}")


def _read_scaling(file: GGUFFile) -> dict[str, Any] | None:
    kind = file.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path} scales rotary positions by {kind!r}; none, linear and yarn are supported"
        )
    scaling = {"rope_type": kind, "factor": _rounded(file.require("rope.scaling.factor"))}
    given = {key: file.get(f"rope.scaling.{name}") for key, name in YARN.items()}
    scaling |= {key: _rounded(value) for key, value in given.items() if value is not None}
    original = file.get("rope.scaling.original_context_length")
    return scaling if original is None else {**scaling, "original_max_position_embeddings": original}


def write_gguf(path: Path, checkpoint: Checkpoint, target: str, tokenizer: Any) -> None:
    """Write the file ``path``, with the tokens of ``target``: a GGUF file, or a folder whose ``tokenizer`` is given."""
    package, config = gguf_package(), checkpoint.config
    tokens = _tokens_of_file(GGUFFile(target)) if is_gguf(target) else _tokens_of(tokenizer, target, config)
    with replaced(path) as temporary:
        writer = package.GGUFWriter(temporary, ARCHITECTURE)
        writer.add_name(f"{config.num_hidden_layers}-layer drafter")
        for key, value in _keys(config).items():
            add_value(writer, f"{ARCHITECTURE}.{key}", value)
        for key, value in {**tokens, "tokenizer.ggml.mask_token_id": config.mask_token_id}.items():
            add_value(writer, key, value)
        for name, tensor in _stored(checkpoint):
            kind = package.GGMLQuantizationType.BF16 if tensor.dtype == torch.bfloat16 else None
            data = tensor.contiguous().view(torch.uint8) if tensor.dtype == torch.bfloat16 else tensor.contiguous()
            writer.add_tensor(name, data.numpy(), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


_SCALING = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", *YARN}


def obstacles_in_gguf(config: DrafterConfig) -> list[str]:
    """Return the settings of a drafter that llama.cpp's ``dflash`` cannot store."""
    scaling = config.rope_scaling or {}
    kind, unknown = scaling.get("rope_type", "default"), sorted(scaling.keys() - _SCALING)
    found = [f"llama.cpp's drafters cannot scale rotary positions by {kind!r}"] * (
        kind not in ("default", "linear", "yarn")
    )
    return found or [f"llama.cpp's drafters have no place for {name} of rope_scaling" for name in unknown]


def _keys(config: DrafterConfig) -> dict[str, Any]:
    scaling, slides = config.rope_scaling or {}, [kind == "sliding_attention" for kind in config.layer_types]
    keys: dict[str, Any] = {
        **{key: getattr(config, own) for own, key in _SIZES.items()},
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_theta),
        "vocab_size": config.vocab_size,
        "block_size": config.block_size - config.sample_from_anchor,
        "target_layers": [tap + 1 for tap in config.target_layer_ids],
    }
    if scaling:
        keys["rope.scaling.type"] = scaling["rope_type"]
        keys["rope.scaling.factor"] = float(scaling["factor"])
        if "original_max_position_embeddings" in scaling:
            keys["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
        keys |= {f"rope.scaling.{name}": float(scaling[key]) for key, name in YARN.items() if key in scaling}
    if config.sliding_window:
        keys |= {"attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": slides}
        keys["attention.causal"] = False
    if config.final_logit_softcapping:
        keys["final_logit_softcapping"] = float(config.final_logit_softcapping)
    if config.draft_window:
        keys["draft_window"] = config.draft_window
    if config.head is not None or config.sample_from_anchor:
        keys |= {"sample_from_anchor": config.sample_from_anchor, "has_confidence_head": False}
    return keys


def _stored(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    names = _names(checkpoint.config)
    for name, tensor in checkpoint.tensors.items():
        if name == "d2t":
            yield "d2t", tensor + torch.arange(len(tensor))
        else:
            yield names[name], tensor.float() if tensor.dim() < 2 else tensor


def add_value(writer: Any, key: str, value: Any) -> None:
    """Add a key to a ``gguf.GGUFWriter``, in the type of ``value``: bool, int, float, text or a list of one of these."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _tokens_of_file(file: GGUFFile) -> dict[str, Any]:
    if not file.has_tokenizer:
        raise CheckpointError(f"{file.path} holds no tokenizer; convert the target again with its tokenizer files")
    named = {**file.metadata, **{key: file.strings(key) for key in file.string_keys}}
    return {key: value for key, value in named.items() if key.startswith("tokenizer.")}


def _tokens_of(tokenizer: Any, target: str, config: DrafterConfig) -> dict[str, Any]:
    """Return the keys of a byte-level BPE tokenizer; llama.cpp splits no text with a drafter's, so it needs no split rule."""
    model: Mapping[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise ConfigError(
            f"{target} has a tokenizer that is not byte-level BPE; convert the target to GGUF and give that file as target"
        )
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    special = {*tokenizer.added_tokens_decoder}
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [by_id.get(index, f"[PAD{index}]") for index in range(config.vocab_size)],
        "tokenizer.ggml.token_type": [
            5 if index not in by_id else 3 if index in special else 1 for index in range(config.vocab_size)
        ],  # unused, control, normal
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
    }
    return {key: value for key, value in found.items() if value is not None and value != []}
