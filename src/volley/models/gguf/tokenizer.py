"""The tokenizer of a GGUF file: transformers builds it, and what it does not look at is put right.

GGUF names the tokens, the merges and one of llama.cpp's ways to split text. Text is tokenised as llama.cpp tokenises it.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from volley.errors import CheckpointError, UnsupportedModelError
from volley.models.gguf.file import CONTROL, TOKEN_TYPES, TOKENS, GGUFFile

_LLAMA_3 = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken"
}  # fmt: skip
"""Ways to split text whose vocabularies hold whole words that their merges do not reach, and whose texts have a first token."""

_TEMPLATES = "tokenizer.chat_templates"
"""Names of chat templates beside the default one."""
_USER_DEFINED = 4  # the other type of tokens that are found in text as they are spelled


def load_gguf_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The file's tokenizer and chat template."""
    file = GGUFFile(path)
    if not file.has_tokenizer:
        raise CheckpointError(
            f"{path} holds no tokenizer; convert the model again with its tokenizer files beside its weights"
        )
    kind, split = file.metadata["tokenizer.ggml.model"], file.metadata.get("tokenizer.ggml.pre", "default")
    _check(file.path, kind, split)
    tokenizer = _built(file)
    if kind == "gpt2":
        tokenizer = _spelled_out(tokenizer, file)
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
    if _TEMPLATES in file.string_keys:
        named = {name: file.metadata.get(f"tokenizer.chat_template.{name}") for name in file.strings(_TEMPLATES)}
        own = {"default": tokenizer.chat_template, **named}
        tokenizer.chat_template = {name: template for name, template in own.items() if template}
    if tokenizer.eos_token is not None:
        tokenizer.add_eos_token = bool(file.metadata.get("tokenizer.ggml.add_eos_token", False))
    found: PreTrainedTokenizerBase = tokenizer
    return found


def _built(file: GGUFFile) -> Any:
    """transformers' tokenizer of the file, which it is given alone: it prefers a ``tokenizer.json`` beside it.

    An AutoTokenizer gives the same, and looks for the model's type first, with the package's reader, which takes seconds.
    """
    with TemporaryDirectory() as folder:
        link = Path(folder) / "model.gguf"
        link.symlink_to(file.path.absolute())
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=link.name)
    tokenizer.name_or_path = str(file.path)
    return tokenizer


def _spelled_out(tokenizer: Any, file: GGUFFile) -> Any:
    """With tokens such as DeepSeek's ``<｜User｜>`` as they are spelled, whose characters are not those that stand for bytes.

    transformers takes them for bytes: it cuts them into pieces, and gives those that begin or end a text a second number. It also
    adds GPT-2's ``<|endoftext|>`` where a vocabulary has none.
    """
    tokens, of_bytes = file.strings(TOKENS), set(pre_tokenizers.ByteLevel.alphabet())
    types = file.metadata.get(TOKEN_TYPES) or [1] * len(tokens)
    respelled = {
        index: token
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, _USER_DEFINED) and not of_bytes.issuperset(token)
    }
    if not respelled and len(tokenizer) <= len(tokens):
        return tokenizer
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    model, known = state["model"], set(respelled.values())
    model["vocab"] = {token: index for token, index in model["vocab"].items() if index not in respelled}
    model["vocab"] |= {token: index for index, token in respelled.items()}
    options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [one for one in state["added_tokens"] if one["content"] not in known and one["id"] < len(tokens)]
    added += [
        {"id": index, "content": token, "special": types[index] == CONTROL, **options}
        for index, token in respelled.items()
    ]
    state["added_tokens"] = sorted(added, key=lambda one: int(one["id"]))
    own = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    own = {name: token for name, token in own.items() if token in model["vocab"]}
    found = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), **own)
    found.chat_template = tokenizer.chat_template
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
