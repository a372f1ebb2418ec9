"""Incremental conversion of tool-call arguments from a model's own notation to JSON."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import regex

from volley.serve.formats import ParameterText

_WORDS = {"True": True, "False": False, "None": None}
"""Python literals that some templates print in place of JSON's."""


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow a schema's references inside ``root``; return an empty schema if they lead nowhere."""
    for _ in range(100):
        if not isinstance(schema, Mapping) or not isinstance(pointer := schema.get("$ref"), str):
            break
        schema = root
        for key in pointer.removeprefix("#").split("/")[1:]:
            name = key.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 8, seen: set[int] | None = None) -> set[str]:
    """Return the types that a schema allows, or an empty set if it does not say. Nested schemas are read down to ``depth``.

    Schemas already ``seen`` are skipped, because a schema may refer to itself and to its parts any number of times.
    """
    schema, seen = resolved(schema, root), set() if seen is None else seen
    if id(schema) in seen:
        return set()
    seen.add(id(schema))
    declared, values = schema.get("type"), schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(declared, str | list):
        types = {declared} if isinstance(declared, str) else {one for one in declared if isinstance(one, str)}
    elif isinstance(values, list):
        types = {_type_of(value) for value in values}
    else:
        types = {one for key, one in (("properties", "object"), ("items", "array")) if key in schema}
        for key in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(key)
            for part in parts if isinstance(parts, list) and depth else ():
                types |= types_of(part, root, depth - 1, seen)
    return types | ({"null"} if schema.get("nullable") and types else set())


def _type_of(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest prefix of ``mark`` that ``text`` ends with."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)


def _escaped(text: str) -> str:
    """Return part of a string with JSON's escapes, without quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class _Arguments:
    """Incremental parser: receives text and returns the JSON that became known. Text behind the arguments is ignored."""

    def __init__(self) -> None:
        self.is_done = False
        self._buffer = ""
        self._phase: Callable[[], str | None]  # reads the buffer and returns JSON; None: more text is needed

    def feed(self, text: str) -> str:
        self._buffer += text
        return "".join(self._steps())

    def _steps(self) -> Iterator[str]:
        while not self.is_done and (told := self._phase()) is not None:
            yield told

    def _up_to(self, mark: str) -> tuple[str | None, bool]:
        """Return the text up to ``mark``, or as much as cannot be part of it, and whether the mark was found."""
        end = self._buffer.find(mark)
        if end >= 0:
            text, self._buffer = self._buffer[:end], self._buffer[end + len(mark) :]
            return text, True
        held = _overlap(self._buffer, mark)
        text, self._buffer = self._buffer[: len(self._buffer) - held], self._buffer[len(self._buffer) - held :]
        return text or None, False


class TaggedArguments(_Arguments):
    """Arguments that stand between tags. A string is returned as it is written, any other value when its tag closes.

    A closing tag counts only if the next argument or the text that ends the last one follows; otherwise it is part of the value.
    If the notation puts the tag on a line of its own, it counts only there, unless the value began on the opening tag's line.
    """

    def __init__(self, tags: ParameterText, schema: Mapping[str, Any]) -> None:
        """Create a parser. ``schema`` describes the arguments; it says which of them are strings."""
        super().__init__()
        self._tags = tags
        middle = r"\s*".join(map(re.escape, re.split(r"(?<=>)\s*(?=<)", tags.middle.strip())))
        new_line = r"(?:(?P<line>\n)|(?=[^\n]))" if tags.middle.endswith("\n") else "(?P<line>)"
        name = rf"{re.escape(tags.begin)}(?P<name>[^\n]+?){middle}{new_line}"
        self._next = re.compile(f"{name}|{re.escape(tags.after)}")
        self._has_lines = tags.end.startswith("\n")
        tag, follows = re.escape(tags.end.strip()), rf"(?=\s*(?:{re.escape(tags.begin)}|{re.escape(tags.after)}))"
        before = r"\n?" if self._has_lines else ""
        self._anywhere, self._at_once = regex.compile(before + tag + follows), regex.compile(tag + follows)
        self._on_a_line = regex.compile(rf"\n{tag}{follows}")
        self._at_the_end, self._line_at_the_end = re.compile(rf"{tag}\s*\Z"), re.compile(rf"\n{tag}\s*\Z")
        self._schema = schema
        properties = schema.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._types: set[str] = set()
        self._separator = ""
        self._is_lenient = not self._has_lines  # a closing tag counts anywhere
        self._is_whole = False  # no part of the value has been taken from the buffer yet
        self._seen = 0  # no closing tag begins before this index of the buffer
        self._held: int | None = None  # index of a tag that closes the value if closing tags count anywhere
        self._phase = self._begin

    @property
    def is_between(self) -> bool:
        """Return whether no argument is open."""
        return self._phase in (self._begin, self._between)

    def end(self) -> str:
        """Return the JSON that the call's end adds, even if the text behind the last argument is missing."""
        told = ""
        if not self.is_between and not self.is_done and not self._line_at_the_end.search(self._buffer):
            self._is_lenient, self._has_lines = True, False
            self._seen, self._held = self._seen if self._held is None else self._held, None
            told = self.feed("")
        if self.is_between or self._at_the_end.search(self._buffer):
            told += self.feed(self._tags.after)
        return told

    def _begin(self) -> str:
        self._phase = self._between
        return "{"

    def _between(self) -> str | None:
        found = self._next.search(self._buffer)
        if found is None:
            return None
        self._buffer, name = self._buffer[found.end() :], found["name"]
        if name is None:
            self.is_done = True
            return "}"
        self._is_lenient = not self._has_lines or found["line"] is None
        self._is_whole, self._seen, self._held = True, 0, None
        self._types = types_of(self._properties.get(name, {}), self._schema)
        is_text = self._types <= {"string"}
        self._phase = self._text if is_text else self._value
        told = f"{self._separator}{json.dumps(name, ensure_ascii=False)}: " + ('"' if is_text else "")
        self._separator = ", "
        return told

    def _text(self) -> str | None:
        end = self._closing()
        if end is not None:
            self._phase = self._between
            return _escaped(self._take(*end)) + '"'
        certain = self._seen if self._held is None else self._held
        return _escaped(self._take(certain, certain)) if certain else None

    def _value(self) -> str | None:
        end = self._closing()
        if end is None:
            return None
        self._phase = self._between
        return json.dumps(_read_as(self._take(*end), self._types), ensure_ascii=False)

    def _take(self, end: int, after: int) -> str:
        """Return the text up to ``end`` and continue the buffer at ``after``."""
        text, self._buffer = self._buffer[:end], self._buffer[after:]
        self._is_whole = self._is_whole and not after
        self._seen = max(0, self._seen - after)
        self._held = None if self._held is None else self._held - after
        return text

    def _closing(self) -> tuple[int, int] | None:
        """Return the ends of the value and of its closing tag, or ``None`` if no closing tag begins before ``_seen``."""
        anywhere = self._anywhere.search(self._buffer, self._seen, partial=True) if self._held is None else None
        if self._is_lenient:
            found = anywhere
        else:
            if anywhere is not None and not anywhere.partial:
                self._held = anywhere.start()
            if self._is_whole and self._seen == 0 and (found := self._at_once.match(self._buffer, partial=True)):
                return None if found.partial else found.span()
            found = self._on_a_line.search(self._buffer, self._seen, partial=True)
        if found is not None and not found.partial:
            span: tuple[int, int] = found.span()
            return span
        self._seen = min(one.start() if one is not None else len(self._buffer) for one in (found, anywhere))
        return None


def refuse_word(word: str) -> Any:
    """Refuse NaN and the infinities, which Python reads."""
    raise ValueError(f"JSON has no {word}")


def _finite(number: str) -> float:
    return value if math.isfinite(value := float(number)) else refuse_word(number)


def _read_as(text: str, types: set[str]) -> Any:
    """Return the text as a value of one of ``types``, or unchanged."""
    word = text.strip()
    try:
        value: Any = (
            _WORDS[word] if word in _WORDS else json.loads(word, parse_constant=refuse_word, parse_float=_finite)
        )
    except (ValueError, RecursionError):
        return text
    own = _type_of(value)
    if own == "number" and "number" not in types and value.is_integer():
        own, value = "integer", int(value)
    return value if own in types or (own == "integer" and "number" in types) else text


class QuotedArguments(_Arguments):
    """JSON with bare keys and with string quotes of its own. Words that are not JSON become strings."""

    _KEY, _WORD = re.compile(r'[^:,{}\[\]"<]+'), re.compile(r'[^,{}\[\]"<]+')
    _STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)

    def __init__(self, quote: str) -> None:
        super().__init__()
        self._quote = quote
        self._open: list[str] = []
        self._is_key = False  # a key may come next
        self._phase = self._outside

    def _outside(self) -> str | None:
        self._buffer = self._buffer.lstrip()
        if not self._buffer or (len(self._buffer) < len(self._quote) and self._quote.startswith(self._buffer)):
            return None
        if self._buffer.startswith(self._quote):
            self._buffer, self._phase = self._buffer[len(self._quote) :], self._string
            return '"'
        mark = self._buffer[0]
        if mark == '"':
            return self._plain_string()
        if mark not in "{[]},:":
            return self._word()
        self._buffer = self._buffer[1:]
        if mark in "{[":
            self._open.append(mark)
        elif mark in "]}":
            self._open.pop()
            self.is_done = not self._open
        self._is_key = mark in "{," and bool(self._open) and self._open[-1] == "{"
        return mark + " " if mark in ",:" else mark

    def _string(self) -> str | None:
        text, is_whole = self._up_to(self._quote)
        if text is None:
            return None
        self._phase = self._outside if is_whole else self._string
        return _escaped(text) + ('"' if is_whole else "")

    def _plain_string(self) -> str | None:
        found = self._STRING.match(self._buffer)
        if found is None:
            return None
        self._buffer = self._buffer[found.end() :]
        try:
            text = json.loads(found[0], strict=False)
        except ValueError:
            text = found[0][1:-1]
        return json.dumps(text, ensure_ascii=False)

    def _word(self) -> str | None:
        found = (self._KEY if self._is_key else self._WORD).match(self._buffer)
        end = found.end() if found else 1
        if end == len(self._buffer):  # more of it may follow
            return None
        word, self._buffer = self._buffer[:end].strip(), self._buffer[end:]
        try:
            is_json = not self._is_key and not isinstance(json.loads(word, parse_constant=refuse_word), str)
        except ValueError:
            is_json = False
        return word if is_json else json.dumps(word, ensure_ascii=False)
