"""The tokenizer of a GGUF file: transformers builds it, and what it does not look at is put right.

GGUF names the tokens, the merges and one of llama.cpp's ways to split text. Text is tokenised as llama.cpp tokenises it.
"""

from pathlib import Path
from typing import Any

from tokenizers import normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from volley.errors import CheckpointError, UnsupportedModelError
from volley.models.gguf.file import GGUFFile

_LLAMA_3 = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken"
}  # fmt: skip
"""Ways to split text whose vocabularies hold whole words that their merges do not reach, and whose texts have a first token."""


def load_gguf_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The file's tokenizer and chat template."""
    file = GGUFFile(path)
    if not file.has_tokenizer:
        raise CheckpointError(
            f"{path} holds no tokenizer; convert the model again with its tokenizer files beside its weights"
        )
    kind, split = file.metadata["tokenizer.ggml.model"], file.metadata.get("tokenizer.ggml.pre", "gpt-2")
    _check(file.path, kind, split)
    tokenizer: Any = AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name)
    backend = tokenizer.backend_tokenizer
    if kind == "gpt2" and split in _LLAMA_3:
        backend.model.ignore_merges = True
    if kind == "llama":
        first = [normalizers.Prepend("▁")] if file.metadata.get("tokenizer.ggml.add_space_prefix", True) else []
        backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
        backend.pre_tokenizer = None
    if tokenizer.bos_token is not None:
        usual = kind == "llama" or split in _LLAMA_3
        tokenizer.add_bos_token = bool(file.metadata.get("tokenizer.ggml.add_bos_token", usual))
    if tokenizer.eos_token is not None:
        tokenizer.add_eos_token = bool(file.metadata.get("tokenizer.ggml.add_eos_token", False))
    found: PreTrainedTokenizerBase = tokenizer
    return found


def _check(path: Path, kind: str, split: str) -> None:
    """Refuse a way of splitting text that would silently become GPT-2's."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"{path} has a tokenizer of type {kind!r}; gpt2 (byte-level BPE) and llama (SentencePiece) are supported. "
            "Give the model's Hugging Face folder instead"
        )
    known = {*GGUF_PRE_TOKENIZER_SPLITS, "gpt-2"}
    if kind == "gpt2" and split not in known:
        raise UnsupportedModelError(
            f"{path} has a tokenizer that splits text as {split!r}; known are {', '.join(sorted(known))}. "
            "Give the model's Hugging Face folder instead"
        )
