"""Positions of values within calls: a marker inside a value closes nothing."""

import re
from typing import Protocol

from volley.serve.arguments import TaggedArguments
from volley.serve.formats import ParameterText


class Values(Protocol):
    """Values of one region of calls."""

    def begin(self, start: int) -> None:
        """Begin the region at index ``start`` of the text."""
        ...

    def hold(self, text: str, end: int) -> bool:
        """Return whether a value is open behind a marker that ends at ``end``. ``end`` never decreases between calls."""
        ...


class Strings:
    """Values of JSON: strings in double quotes or in the notation's ``quotes``. Only strings inside objects and arrays count."""

    def __init__(self, *quotes: str) -> None:
        self._quotes = {'"': re.compile(r'\\.|"', re.DOTALL), **{one: re.compile(re.escape(one)) for one in quotes}}
        longest_first = sorted(self._quotes, key=len, reverse=True)
        self._outside = re.compile("|".join(map(re.escape, longest_first)) + r"|[{}\[\]]")
        self._longest = max(2, *map(len, self._quotes))
        self._quote, self.depth = "", 0

    def begin(self, start: int) -> None:
        self._at = start

    def hold(self, text: str, end: int) -> bool:
        while found := (self._quotes[self._quote] if self._quote else self._outside).search(text, self._at, end):
            mark, self._at = found[0], found.end()
            if self._quote:
                self._quote = "" if mark == self._quote else self._quote
            elif mark in "{[":
                self.depth += 1
            elif mark in "}]":
                self.depth = max(0, self.depth - 1)
            elif self.depth:
                self._quote = mark
        self._at = max(self._at, end - self._longest + 1)  # a marker may begin there
        return bool(self._quote)


class TaggedValues:
    """Values between tags."""

    def __init__(self, tags: ParameterText) -> None:
        self._arguments = TaggedArguments(tags, {})

    def begin(self, start: int) -> None:
        self._at = start

    def hold(self, text: str, end: int) -> bool:
        self._arguments.feed(text[self._at : end])
        self._at = end
        return not (self._arguments.is_between or self._arguments.is_done)
