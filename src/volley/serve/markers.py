"""Markers in Lark grammars: a marker may be one special token or ordinary tokens that spell it.

A special token is not text for a grammar, so the grammar names it by its id. Any other added token counts as its text.
"""

import json
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

TERMINALS = ("TEXT: /(?s:.+)/", "ANY: /(?s:.*)/")
"""Terminals that the rules of :meth:`Markers.up_to` use."""


class Markers:
    """Special tokens of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        """Read the special tokens. Without a tokenizer every marker is text."""
        self._ids: dict[str, int] = special_tokens(tokenizer)
        longest = sorted(filter(None, self._ids), key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, longest)) + ")") if longest else None

    def literal(self, text: str) -> str:
        """Return a text as a Lark expression in which each marker is its special token or its text."""
        return " ".join(self._spelt(part) for part in self._parts(text)) or '""'

    def up_to(self, name: str, end: str, *, passing: Sequence[str] = ()) -> list[str]:
        """Return rules by which ``name`` is any text up to ``end``, which is not empty.

        The special tokens ``passing`` may occur in that text. The rules need :data:`TERMINALS`.
        """
        first, *rest = self._parts(end)
        behind = "".join(f" {self._spelt(part)}" for part in rest)
        rules = [f"{name}_spelt[suffix={json.dumps(first)}]: ANY"]
        ways = [f"{name}_spelt"]
        if first in self._ids:
            ways.append(f"TEXT? {self._token(first)}")
        before = ""
        if passing:
            before = f"{name}_before* "
            rules.append(f"{name}_before: TEXT? {_tokens([self._ids[one] for one in passing])}")
        return [f"{name}: {before}({' | '.join(ways)}){behind}", *rules]

    def first_of(self, text: str) -> str | None:
        """Return the marker that a text begins with: a special token, or a word in brackets."""
        first = next(iter(self._parts(text)), "")
        if first in self._ids:
            return first
        found = re.match(r"<[^<>\s]+>|\[[^\[\]\s]+\]", text)
        return found[0] if found else None

    def others(self, *markers: str) -> list[str]:
        """Return all special tokens except ``markers``."""
        return [one for one in self._ids if one and one not in markers]

    def free(self, passing: Sequence[str]) -> str:
        """Return a Lark expression for any text in which the special tokens ``passing`` may occur. It needs :data:`TERMINALS`."""
        return f"(TEXT? {_tokens([self._ids[one] for one in passing])})* TEXT?" if passing else "TEXT?"

    def _parts(self, text: str) -> list[str]:
        return [part for part in (self._special.split(text) if self._special else [text]) if part]

    def _token(self, marker: str) -> str:
        return _tokens([self._ids[marker]])

    def _spelt(self, part: str) -> str:
        return f"({self._token(part)} | {json.dumps(part)})" if part in self._ids else json.dumps(part)


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the ids of a tokenizer's special tokens by text; ``all_special_tokens`` lists only those with a role."""
    if tokenizer is None:
        return {}
    added = {str(token): int(index) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = {str(token): int(tokenizer.convert_tokens_to_ids(token)) for token in tokenizer.all_special_tokens}
    return named | added


def _tokens(ids: Sequence[int]) -> str:
    """Return an expression for one of several tokens; consecutive ids become a range."""
    runs = [[index for _, index in run] for _, run in groupby(enumerate(sorted(ids)), lambda pair: pair[1] - pair[0])]
    return "<[" + ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) + "]>"
