"""Tokenizer of a GGUF file, which splits text as llama.cpp does.

For byte-level BPE the file holds the tokens, the merges, and the name of one of llama.cpp's ways to split text into words. For
SentencePiece it holds a score for each token, and the merges follow from the scores.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from volley.errors import CheckpointError, UnsupportedModelError
from volley.models.gguf.file import GGUFFile
from volley.models.gguf.splits import SPLITS, Split, pre_tokenizer
from volley.models.gguf.tokens import CONTROL, UNKNOWN, USER_DEFINED, Tokens

_TEMPLATE = "tokenizer.chat_template"
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_NOT_STRIPPED = {"<unk>", "<s>", "<|endoftext|>"}  # of Phi-3


def load_gguf_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the file's tokenizer and chat templates."""
    file = GGUFFile(path)
    if not file.has_tokenizer:
        raise CheckpointError(
            f"{path} holds no tokenizer; convert the model again with its tokenizer files beside its weights"
        )
    tokens, kind = Tokens(file), file.metadata["tokenizer.ggml.model"]
    if kind == "gpt2":
        split = _split(file)
        backend, begins = _byte_level(file, tokens, split), split.begins
    elif kind == "llama":
        backend, begins = _sentencepiece(file, tokens), True
    else:
        raise UnsupportedModelError(
            f"{path} has a tokenizer of type {kind!r}; gpt2 (byte-level BPE) and llama (SentencePiece) are supported. "
            "Give the model's Hugging Face folder instead"
        )
    _add_spelled(backend, tokens, strips_right=_is_phi_3(file))
    named = {name: tokens.named(key) for name, key in _NAMED.items()}
    texts: dict[str, Any] = {name: tokens.texts[token] for name, token in named.items() if token is not None}
    found = PreTrainedTokenizerFast(
        tokenizer_object=_AsItIs(backend),
        add_bos_token="bos_token" in texts and bool(file.metadata.get("tokenizer.ggml.add_bos_token", begins)),
        add_eos_token="eos_token" in texts and bool(file.metadata.get("tokenizer.ggml.add_eos_token", False)),
        clean_up_tokenization_spaces=False,
        **texts,
    )
    found.name_or_path = str(file.path)
    found.chat_template = _templates(file)
    return found


class _AsItIs:
    """Wrapper that returns the tokenizer itself for a deep copy: transformers' copy goes through JSON and takes a second."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __deepcopy__(self, _: object) -> Tokenizer:
        return self._backend


def _split(file: GGUFFile) -> Split:
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise UnsupportedModelError(
            f"{file.path} has a tokenizer that splits text as {name!r}; known are {', '.join(sorted(SPLITS))}. "
            "Give the model's Hugging Face folder instead"
        )
    return SPLITS[name]


def _byte_level(file: GGUFFile, tokens: Tokens, split: Split) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in file.strings("tokenizer.ggml.merges")]
    backend = Tokenizer(_bpe(file, tokens, merges, ignore_merges=split.takes_whole_words))
    backend.pre_tokenizer = pre_tokenizer(split)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GGUFFile, tokens: Tokens) -> Tokenizer:
    """Build a SentencePiece tokenizer, which merges the two neighbours that make the best token first."""
    unknown = tokens.named("unknown")
    backend = Tokenizer(
        _bpe(
            file,
            tokens,
            _merges_by_score(tokens.texts, file.metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens.texts)),
            unk_token=None if unknown is None else tokens.texts[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    backend.normalizer = normalizers.Sequence([*[normalizers.Prepend("▁")] * prefixed, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *[decoders.Strip(" ", 1, 0)] * prefixed,
        ]
    )
    return backend


def _bpe(file: GGUFFile, tokens: Tokens, merges: list[Any], **options: Any) -> models.BPE:
    vocabulary = {text: token for token, text in enumerate(tokens.texts)}
    try:
        return models.BPE(vocabulary, merges, **options)
    except Exception as error:  # the package raises nothing narrower
        raise CheckpointError(
            f"{file.path}: its merges do not fit its tokens ({error}); fetch or convert it again"
        ) from None


def _merges_by_score(texts: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Return every pair of tokens that makes a third token, sorted by the third token's score, best first."""
    known = {text: text for text in texts}  # equal texts share memory
    return [
        (first, second)
        for token in sorted(range(len(texts)), key=scores.__getitem__, reverse=True)
        for place in range(len(texts[token]) - 1, 0, -1)
        if (first := known.get(texts[token][:place])) and (second := known.get(texts[token][place:]))
    ]


def _add_spelled(backend: Tokenizer, tokens: Tokens, *, strips_right: bool) -> None:
    """Add control, unknown and user-defined tokens, which are matched in text literally; user-defined ones are not special."""
    special, others = list[AddedToken](), list[AddedToken]()
    for text, kind in zip(tokens.texts, tokens.types, strict=False):
        if kind in (CONTROL, UNKNOWN, USER_DEFINED):
            strips = strips_right and text not in _NOT_STRIPPED
            added = AddedToken(text, rstrip=strips, normalized=False, special=kind != USER_DEFINED)
            (others if kind == USER_DEFINED else special).append(added)
    backend.add_special_tokens(special)
    backend.add_tokens(others)


def _is_phi_3(file: GGUFFile) -> bool:
    """Return whether special tokens absorb the spaces after them. llama.cpp too decides this by the model's name."""
    name = str(file.metadata.get("general.name", "")).lower()
    return "phi-3" in name or "phi3" in name


def _templates(file: GGUFFile) -> Any:
    """Return the chat template, or a dictionary of templates by name if the file has several."""
    named = {
        key.removeprefix(f"{_TEMPLATE}."): text
        for key, text in file.metadata.items()
        if key.startswith(f"{_TEMPLATE}.")
    }
    default = file.metadata.get(_TEMPLATE)
    return {**({} if default is None else {"default": default}), **named} if named else default
