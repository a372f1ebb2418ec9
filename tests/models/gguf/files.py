"""GGUF files of tiny random models, written with the ``gguf`` package as llama.cpp's converter would."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.conftest import CHAT_TEMPLATE
from volley.models.checkpoints.gguf_drafter import add_value

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
FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": lambda **changes: LlamaConfig(**{**SHAPE, **changes}),
    "qwen2": lambda **changes: Qwen2Config(**{**SHAPE, **changes}),
    "qwen3": lambda **changes: Qwen3Config(**{**SHAPE, "head_dim": 24, **changes}),
    "qwen3moe": lambda **changes: Qwen3MoeConfig(
        **{
            **SHAPE,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            **changes,
        }
    ),
}
HALVES = {
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q3_K": (108,),
    "Q2_K": (80, 82),
    "IQ4_XS": (0,),
    "IQ4_NL": (0,),
}
"""Where the fp16 numbers of a block lie, of types that the package cannot quantise to."""


def random_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """With every weight random, norms and biases included: one that is lost or exchanged is seen."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](**changes), attn_implementation="sdpa").eval()
    for name, weight in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
    return model.requires_grad_(False)


def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, the chat's markers, and a chat template."""
    specials, words = (
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"],
        [f"the then {n}\n" for n in range(99)],
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=specials, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(words, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def stored_name(name: str) -> str:
    """GGUF's name of a weight of transformers'."""
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "mlp.gate": "ffn_gate_inp",
        "mlp.experts.down_proj": "ffn_down_exps",
    }
    if name.endswith("experts.down_proj"):
        name += ".weight"
    stem, _, ending = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{names[part]}.{ending}"
    return f"{names[stem]}.{ending}"


def row_order(rows: int, heads: int) -> list[int]:
    """Row 2i of a head is row i of its first half, row 2i + 1 row i of its second: how files of Llama store queries and keys."""
    size = rows // heads
    return [head * size + half * (size // 2) + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]


def heads_of(config: Any, family: str, name: str) -> int | None:
    """Heads of the weight ``name`` if its rows are stored in another order."""
    if family != "llama":
        return None
    return config.num_attention_heads if "q_proj" in name else config.num_key_value_heads if "k_proj" in name else None


def stored_weights(model: PreTrainedModel, family: str) -> dict[str, NDArray[Any]]:
    """Every weight in fp32, by GGUF's names and in its order."""
    config, found = model.config, dict[str, NDArray[Any]]()
    for name, tensor in model.state_dict().items():
        weight = tensor.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            layer, half = name.split(".")[2], weight.shape[1] // 2
            found[f"blk.{layer}.ffn_gate_exps.weight"] = weight[:, :half]
            found[f"blk.{layer}.ffn_up_exps.weight"] = weight[:, half:]
            continue
        heads = heads_of(config, family, name)
        found[stored_name(name)] = weight if heads is None else weight[row_order(len(weight), heads)]
    return found


def fill(model: PreTrainedModel, family: str, stored: Mapping[str, Tensor]) -> None:
    """Give ``model`` the weights of a file, one row at a time where their order differs."""
    for name, weight in model.state_dict().items():
        found, heads = stored[stored_name(name)], heads_of(model.config, family, name)
        for row, place in enumerate(row_order(len(found), heads) if heads else range(len(found))):
            weight[place] = found[row]


def random_blocks(shape: tuple[int, ...], kind: str, generator: np.random.Generator) -> NDArray[np.uint8]:
    """Rows of such a type: any bytes are valid codes, only the fp16 numbers must be small."""
    columns, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rows = generator.integers(0, 256, (*shape[:-1], shape[-1] // columns * size), dtype=np.uint8)
    blocks = rows.reshape(-1, size)
    for place in HALVES[kind]:
        small = generator.uniform(0.5e-4, 1.5e-4, (len(blocks), 1)).astype(np.float16)
        blocks[:, place : place + 2] = small.view(np.uint8)
    return rows


def encode(name: str, weight: NDArray[Any], kind: str, generator: np.random.Generator) -> NDArray[Any]:
    """``weight`` as ``kind``; norms and biases stay in fp32."""
    if weight.ndim < 2 or kind == "F32":
        return np.ascontiguousarray(weight, dtype=np.float32)
    if kind in HALVES:
        return random_blocks(weight.shape, kind, generator)
    found: NDArray[Any] = gguf.quantize(np.ascontiguousarray(weight, np.float32), GGMLQuantizationType[kind])
    return found


def write_model(
    path: Path,
    model: PreTrainedModel,
    family: str,
    kind: str | Callable[[str], str] = "F32",
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    split: str = "gpt-2",
    keys: Mapping[str, Any] | None = None,
    extra: Mapping[str, NDArray[Any]] | None = None,
    tensors_a_part: int = 0,
) -> Path:
    """Write ``model``; ``kind`` may depend on the tensor's name, ``keys`` change or (``None``) leave out keys of the family.

    With ``tensors_a_part`` the first of several parts is returned.
    """
    config, writer = model.config, GGUFWriter(path, family, split_max_tensors=tensors_a_part)
    rope = config.rope_parameters
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", None),
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope["rope_theta"],
        "expert_count": getattr(config, "num_experts", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        **(keys or {}),
    }
    for key, value in values.items():
        if value is not None:
            add_value(writer, key if key.startswith("split.") else f"{family}.{key}", value)
    generator = np.random.default_rng(0)
    for name, weight in stored_weights(model, family).items():
        chosen = kind if isinstance(kind, str) else kind(name)
        plain = weight.ndim < 2 or chosen == "F32"
        data = encode(name, weight, chosen, generator)
        writer.add_tensor(name, data, raw_dtype=None if plain else GGMLQuantizationType[chosen])
    for name, weight in (extra or {}).items():
        writer.add_tensor(name, weight)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer, split)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if tensors_a_part else path


def add_tokenizer(
    writer: GGUFWriter, tokenizer: Any, split: str = "gpt-2", *, tokens: Sequence[str] = (), merges: Sequence[str] = ()
) -> None:
    """A byte-level BPE tokenizer with its merges, special and other added tokens, and chat template; ``tokens`` come last."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    texts = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])] + [*tokens]
    types = dict.fromkeys(tokenizer.all_special_tokens, 3)
    types |= {str(token): 3 if token.special else 4 for token in tokenizer.added_tokens_decoder.values()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(texts)
    writer.add_token_types([types.get(token, 1) for token in texts])
    own = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer.add_token_merges([*own, *merges])
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def decoded(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file as the package decodes it: the reference."""
    reader = gguf.GGUFReader(path)
    return {t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
