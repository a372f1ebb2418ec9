"""Text and bytes of single tokens, as log-probabilities show them."""

import re
from collections.abc import Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""Bytes by the characters that stand for them in byte-level BPE vocabularies."""
_ONE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""Form of a single byte in vocabularies with byte fallback."""


class Spelling:
    """Text and bytes of one tokenizer's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        letter = list(tokenizer("a", add_special_tokens=False)["input_ids"])
        depends = self.text(letter * 2) != self.text(letter) * 2  # some drop the space before a first word
        self._before = letter if depends else []

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return str(self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))

    def one(self, token_id: int) -> str:
        """Return the text of one token within a sequence."""
        found = self._texts.get(token_id)
        if found is None:
            whole, before = self.text([*self._before, token_id]), self.text(self._before) if self._before else ""
            found = self._texts[token_id] = whole[len(before) :]
        return found

    def bytes(self, token_id: int) -> list[int] | None:
        """Return the UTF-8 bytes of one token, possibly part of a character, or ``None`` if the vocabulary does not say."""
        text = self.one(token_id)
        if "\ufffd" not in text:
            return list(text.encode())
        piece = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if found := _ONE_BYTE.fullmatch(piece):
            return [int(found[1], 16)]
        return [_BYTES[letter] for letter in piece] if all(letter in _BYTES for letter in piece) else None
