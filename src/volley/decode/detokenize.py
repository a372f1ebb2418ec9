"""Turn tokens into text as they arrive."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


def _pending(text: str) -> int:
    """Return how many replacement characters at the end of ``text`` may be parts of an unfinished character."""
    return min(3, len(text) - len(text.rstrip("\ufffd")))


def _decoder(tokenizer: PreTrainedTokenizerBase | None, skips: bool) -> Callable[[list[int]], str]:
    """Return the decode function of a tokenizer. A ``tokenizers`` backend is called directly, because transformers' checks
    double the time."""
    if tokenizer is None:
        return lambda _: ""
    kind: Any = type(tokenizer)
    own = PreTrainedTokenizerBase.decode, PreTrainedTokenizerFast._decode
    if own == (getattr(kind, "decode", None), getattr(kind, "_decode", None)):
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=skips)
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=skips, clean_up_tokenization_spaces=False))


class Detokenizer:
    """Turns a growing list of tokens into text, and never retracts a character."""

    # Tokens of context, and at most twice as many, that are decoded again with new ones, because merges and characters span
    # tokens.
    _CONTEXT = 6

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, *, skip_special_tokens: bool = True, before: Sequence[int] = ()
    ) -> None:
        """Continue the text of ``before``: some tokenizers drop the space in front of a first word."""
        self.decode = _decoder(tokenizer, skip_special_tokens)
        self._is_silent = tokenizer is None
        self._begin(before)

    def _begin(self, before: Sequence[int]) -> None:
        """Continue after these tokens, whose text was emitted."""
        self._token_ids = list(before[-self._CONTEXT :])
        while (known := self.decode(self._token_ids)).startswith("\ufffd"):  # not in the middle of a character
            del self._token_ids[0]
        if known.endswith("\ufffd"):  # perhaps part of a character: later text is decoded alone
            self._token_ids, known = [], ""
        self._start = 0  # index at which decoding begins
        self._known = known  # emitted text from there on
        self._last_whole = len(self._token_ids)  # tokens before this index are whole characters
        self._whole = list[int]()  # all such indices after the start

    def push(self, token_id: int, *, last: bool = False) -> str:
        """Return the new text that ``token_id`` completes; empty while a multi-byte character is unfinished."""
        if self._is_silent:
            return ""
        text = self.decode([*self._token_ids[self._start :], token_id])  # if this raises, nothing has changed
        self._token_ids.append(token_id)
        if text.endswith("\ufffd") and not last and len(self._token_ids) - self._last_whole < 4:
            return ""  # a character has four bytes at most
        held = 0 if last else _pending(text)
        new, self._known = text[len(self._known) : len(text) - held], text[: len(text) - held]
        if not held:
            self._last_whole = len(self._token_ids)
            self._whole.append(self._last_whole)
        if len(self._token_ids) - self._start >= 2 * self._CONTEXT:
            latest = len(self._token_ids) - self._CONTEXT
            before = [
                at for at in self._whole if at < len(self._token_ids)
            ]  # not the end, so that some context is left
            self._start = min(before, key=lambda at: (at > latest, abs(at - latest)), default=latest)
            self._whole = [at for at in self._whole if at > self._start]
            text = self.decode(self._token_ids[self._start :])
            self._known = text[: len(text) - held]
        return new

    def push_all(self, token_ids: list[int], *, last: bool = False) -> str:
        """Return the text of :meth:`push` for each token. They are decoded in one call if no character is unfinished at their
        end."""
        if self._is_silent:
            return ""
        if len(token_ids) > self._CONTEXT:
            text = self.decode(self._token_ids[self._start :] + token_ids)
            if last or not text.endswith("\ufffd"):
                new = text[len(self._known) :]
                self._begin(token_ids)
                return new
        end = len(token_ids) - 1
        return "".join(self.push(token, last=last and place == end) for place, token in enumerate(token_ids))

    def flush(self) -> str:
        """Return the rest of an unfinished character, at the end of a text."""
        if self._is_silent:
            return ""
        text = self.decode(self._token_ids[self._start :])
        new, self._known = text[len(self._known) :], text
        return new

    def peek(self, token_ids: Sequence[int | None], masked: str) -> str:
        """Return the text that ``token_ids`` would add, with ``masked`` for each unknown one. The state does not change."""
        context, done = self._token_ids[self._start :], self._known
        text = ""
        for is_masked, run in groupby(token_ids, lambda token: token is None):
            tokens = list(run)
            known = context + [token for token in tokens if token is not None]
            text += masked * len(tokens) if is_masked else self.decode(known)[len(done) :]
            context, done = [], ""
        return text
