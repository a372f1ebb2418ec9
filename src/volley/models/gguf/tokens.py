"""Tokens of a GGUF file: their types, and the tokens that end a text or a turn.

Like llama.cpp, volley recognises many end tokens by their text, whatever their type in the file.
"""

from volley.models.gguf.file import GGUFFile

TOKENS = "tokenizer.ggml.tokens"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
_ENDS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<eos>", "<turn|>",
    "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
}  # fmt: skip
_END_IF_CONTROL = "</s>"  # an HTML tag in other vocabularies
_BY_TEXT = {*_ENDS, _END_IF_CONTROL}
_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_SENTENCEPIECE = {"bos": 1, "eos": 2, "unknown": 0}  # defaults of files without these keys
_END_OF_A_MESSAGE, _ENDS_OF_A_TURN = "<|end|>", ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})


class Tokens:
    """Texts and types of a file's tokens."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        stored = file.strings(TOKENS) if file.num_tokens else []
        self.texts = [text or f"[EMPTY_{token}]" for token, text in enumerate(stored)]
        self.types = _types(file)
        for token in _ends(file, {token: text for token, text in enumerate(stored) if text in _BY_TEXT}):
            self.types[token] = CONTROL

    def named(self, name: str) -> int | None:
        """Return the token that the file calls ``name``, such as ``bos``; ``None`` if it is missing or outside the vocabulary."""
        return _named(self._file, name)


def stop_tokens(file: GGUFFile) -> list[int]:
    """Tokens that end a text or a turn."""
    named = {token for key in _KEYS if (token := _named(file, key)) is not None}
    found = file.find_strings(TOKENS, _BY_TEXT) if file.num_tokens else {}
    return sorted(named.union(_ends(file, found)))


def _named(file: GGUFFile, name: str) -> int | None:
    usual = _SENTENCEPIECE if file.metadata.get("tokenizer.ggml.model") == "llama" else {}
    found = file.metadata.get(f"tokenizer.ggml.{name}_token_id", usual.get(name))
    return int(found) if found is not None and found < file.num_tokens else None


def _types(file: GGUFFile) -> list[int]:
    return list(file.metadata.get("tokenizer.ggml.token_type") or [NORMAL] * file.num_tokens)


def _ends(file: GGUFFile, found: dict[int, str]) -> list[int]:
    """Return which of the tokens ``found`` by their texts end a text or a turn."""
    if _END_IF_CONTROL in found.values():
        types = _types(file)
        found = {token: text for token, text in found.items() if text in _ENDS or types[token] == CONTROL}
    texts = set(found.values())
    if any(ends <= texts for ends in _ENDS_OF_A_TURN):
        found = {token: text for token, text in found.items() if text != _END_OF_A_MESSAGE}
    return list(found)
