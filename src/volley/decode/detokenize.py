"""From tokens to text, as they come."""

from collections.abc import Sequence
from itertools import groupby

from transformers import PreTrainedTokenizerBase


class Detokenizer:
    """Turns a growing list of tokens into text without ever taking back a character."""

    _CONTEXT = 6  # tokens decoded again with the new ones, for merges and multi-byte characters across their border

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        self._token_ids: list[int] = []
        self._start = 0  # decoding begins here
        self._emitted = 0  # tokens whose text is out

    def _decode(self, token_ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        text = self._tokenizer.decode(token_ids, skip_special_tokens=self._skips, clean_up_tokenization_spaces=False)
        return str(text)

    def push(self, token_id: int, *, last: bool = False) -> str:
        """The new text that ``token_id`` completes; empty while a multi-byte character is unfinished."""
        self._token_ids.append(token_id)
        before = self._decode(self._token_ids[self._start : self._emitted])
        after = self._decode(self._token_ids[self._start :])
        if after.endswith("\ufffd") and not last:
            return ""
        self._emitted = len(self._token_ids)
        self._start = max(self._start, self._emitted - self._CONTEXT)
        return after[len(before) :]

    def peek(self, token_ids: Sequence[int | None], masked: str) -> str:
        """The text that ``token_ids`` would add, with ``masked`` for each that is not known; nothing of it is kept."""
        context, done = self._token_ids[self._start :], self._decode(self._token_ids[self._start : self._emitted])
        text = ""
        for is_masked, run in groupby(token_ids, lambda token: token is None):
            tokens = list(run)
            known = context + [token for token in tokens if token is not None]
            text += masked * len(tokens) if is_masked else self._decode(known)[len(done) :]
            context, done = [], ""
        return text
