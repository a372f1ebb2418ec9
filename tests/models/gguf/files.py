"""GGUF files of tiny random models, written with the ``gguf`` package as llama.cpp's converter would."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.conftest import CHAT_TEMPLATE
from tests.models.gguf.converted import VOCAB, keys_of, parts, stored_weights
from volley.models.checkpoints.gguf_drafter import add_value

HALVES = {
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q3_K": (108,),
    "Q2_K": (80, 82),
    "IQ4_XS": (0,),
    "IQ4_NL": (0,),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    "IQ1_M": (),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""Offsets of a block's fp16 numbers, of types that the package cannot quantise to."""


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    specials: list[str],
    splits: pre_tokenizers.PreTokenizer,
    **named: str,
) -> PreTrainedTokenizerFast:
    """Train byte-level BPE, with a chat template. ``named`` are the roles of special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = splits, decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, the chat's markers, and a chat template."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
    words = [f"the then {n}\n" for n in range(99)]
    splits = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return train_bpe(words, VOCAB, specials, splits, eos_token="<|im_end|>")


def fill(model: PreTrainedModel, family: str, stored: Mapping[str, Tensor]) -> None:
    """Give ``model`` the weights of a file, one row at a time where their order differs."""
    for name, weight in model.state_dict().items():
        ((key, order),) = parts(family, name, torch.arange(len(weight)), model.config).items()
        for row, place in enumerate(order.tolist()):
            weight[place] = stored[key][row]


def random_blocks(shape: tuple[int, ...], kind: str, generator: np.random.Generator) -> NDArray[np.uint8]:
    """Rows of such a type: any bytes are valid codes, only the fp16 numbers must be small."""
    columns, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rows = generator.integers(0, 256, (*shape[:-1], shape[-1] // columns * size), dtype=np.uint8)
    blocks = rows.reshape(-1, size)
    if kind == "TQ2_0":  # its pairs of bits are three digits
        blocks[:, :64] &= ~(blocks[:, :64] >> 1 & blocks[:, :64] & 0x55)
    if kind == "IQ1_M":  # its scale lies in the last four bits of four numbers
        blocks[:, 49::2] = blocks[:, 49::2] & 0x0F | np.array([0, 0x80, 0x60, 0], np.uint8)
    for place in HALVES[kind]:
        small = generator.uniform(0.5e-4, 1.5e-4, (len(blocks), 1)).astype(np.float16)
        blocks[:, place : place + 2] = small.view(np.uint8)
    return rows


def encode(weight: NDArray[Any], kind: str, generator: np.random.Generator) -> NDArray[Any]:
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
    extra: Mapping[str, Tensor | None] | None = None,
    tensors_a_part: int = 0,
) -> Path:
    """Write ``model``; ``kind`` may depend on the tensor's name, ``keys`` and ``extra`` change or (``None``) leave out keys and
    tensors of the family.

    With ``tensors_a_part`` the first of several parts is returned.
    """
    writer = GGUFWriter(path, family, split_max_tensors=tensors_a_part)
    for key, value in {**keys_of(family, model.config), **(keys or {})}.items():
        if value is not None:
            add_value(writer, key if key.startswith("split.") else f"{family}.{key}", value)
    generator = np.random.default_rng(0)
    for name, weight in {**stored_weights(model, family), **(extra or {})}.items():
        if weight is None:
            continue
        chosen = kind(name) if callable(kind) else "F32" if name in (extra or {}) else kind
        plain = weight.dim() < 2 or chosen == "F32"
        data = encode(weight.float().numpy(), chosen, generator)
        writer.add_tensor(name, data, raw_dtype=None if plain else GGMLQuantizationType[chosen])
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer, split)
    finish(writer)
    return next(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if tensors_a_part else path


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_matrices(
    path: Path,
    model: PreTrainedModel,
    family: str,
    kind: str | Callable[[str], str],
    *,
    extra: Mapping[str, Tensor | None] | None = None,
) -> Path:
    """Write ``model`` with the type ``kind``, which may depend on the tensor's name, for matrices whose rows are whole blocks,
    those of experts included."""
    weights = {**stored_weights(model, family), **(extra or {})}

    def kind_of(name: str) -> str:
        chosen, weight = kind if isinstance(kind, str) else kind(name), weights[name]
        assert weight is not None
        is_plain = weight.dim() < 2 or weight.shape[-1] % gguf.GGML_QUANT_SIZES[GGMLQuantizationType[chosen]][0]
        return "F32" if is_plain or "ffn_gate_inp" in name or name.endswith(".bias") else chosen

    return write_model(path, model, family, kind_of, extra=extra)


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
