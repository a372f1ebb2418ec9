"""Arguments of calls in notations of their own, made JSON while they are written."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from volley.serve.formats import ParameterText

_WORDS = {"True": True, "False": False, "None": None}
"""What templates that print values of Python's make of JSON's."""


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema behind the references that lead to it inside ``root``; empty where they lead nowhere."""
    for _ in range(100):
        if not isinstance(schema, Mapping) or not isinstance(pointer := schema.get("$ref"), str):
            break
        schema = root
        for key in pointer.removeprefix("#").split("/")[1:]:
            name = key.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 8, seen: set[int] | None = None) -> set[str]:
    """The types that a value may have under a schema; empty if it does not say. Of parts inside parts down to ``depth``.

    Parts that were ``seen`` are left out: a schema may refer to itself, and to its parts in as many ways as it likes.
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
    """The length of the longest beginning of ``mark`` with which a text ends."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)


def _escaped(text: str) -> str:
    """A part of a string as JSON has it, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class _Arguments:
    """Feed it text; it gives the JSON that this brings. What follows the arguments is not read."""

    def __init__(self) -> None:
        self.is_done = False
        self._buffer = ""
        self._phase: Callable[[], str | None]  # takes text from the buffer and gives JSON. None: it needs more text

    def feed(self, text: str) -> str:
        self._buffer += text
        return "".join(self._steps())

    def _steps(self) -> Iterator[str]:
        while not self.is_done and (told := self._phase()) is not None:
            yield told

    def _up_to(self, mark: str, before: str = "") -> tuple[str | None, bool]:
        """Text up to ``mark``, or as much as cannot belong to it, and whether the mark was there.

        ``before`` is dropped once if it stands right before the mark.
        """
        end = self._buffer.find(mark)
        if end >= 0:
            text, self._buffer = self._buffer[:end].removesuffix(before), self._buffer[end + len(mark) :]
            return text, True
        held = max(_overlap(self._buffer, mark), _overlap(self._buffer, before + mark))
        text, self._buffer = self._buffer[: len(self._buffer) - held], self._buffer[len(self._buffer) - held :]
        return text or None, False


class TaggedArguments(_Arguments):
    """Each argument between tags. A text is told as it is written, any other value when its tag closes."""

    def __init__(self, tags: ParameterText, schema: Mapping[str, Any]) -> None:
        """``schema`` is that of the arguments: it tells which are texts."""
        super().__init__()
        self._close, self._before_close = tags.end.strip(), tags.end[: tags.end.startswith("\n")]
        middle = r"\s*".join(map(re.escape, re.split(r"(?<=>)\s*(?=<)", tags.middle.strip())))
        new_line = r"(?:\n|(?=[^\n]))" if tags.middle.endswith("\n") else ""
        name = f"{re.escape(tags.begin)}(?P<name>[^\n]+?){middle}{new_line}"
        self._next = re.compile(f"{name}|{re.escape(tags.after)}")
        self._schema = schema
        properties = schema.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._types: set[str] = set()
        self._separator = ""
        self._phase = self._begin

    @property
    def is_between(self) -> bool:
        """Whether no argument is open."""
        return self._phase in (self._begin, self._between)

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
        self._types = types_of(self._properties.get(name, {}), self._schema)
        is_text = self._types <= {"string"}
        self._phase = self._text if is_text else self._value
        told = f"{self._separator}{json.dumps(name, ensure_ascii=False)}: " + ('"' if is_text else "")
        self._separator = ", "
        return told

    def _text(self) -> str | None:
        text, is_whole = self._up_to(self._close, self._before_close)
        if text is None:
            return None
        self._phase = self._between if is_whole else self._text
        return _escaped(text) + ('"' if is_whole else "")

    def _value(self) -> str | None:
        if self._close not in self._buffer:
            return None
        self._phase = self._between
        return json.dumps(
            _read_as(self._up_to(self._close, self._before_close)[0] or "", self._types), ensure_ascii=False
        )


def _refuse(word: str) -> Any:
    raise ValueError(f"JSON has no {word}")


def _finite(number: str) -> float:
    return value if math.isfinite(value := float(number)) else _refuse(number)


def _read_as(text: str, types: set[str]) -> Any:
    """A value of one of ``types``, or the text as it is."""
    word = text.strip()
    try:
        value: Any = _WORDS[word] if word in _WORDS else json.loads(word, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return text
    own = _type_of(value)
    if own == "number" and "number" not in types and value.is_integer():
        own, value = "integer", int(value)
    return value if own in types or (own == "integer" and "number" in types) else text


class QuotedArguments(_Arguments):
    """JSON whose keys are bare and whose strings have quotes of their own. Words that are no JSON become strings."""

    _KEY, _WORD = re.compile(r'[^:,{}\[\]"<]+'), re.compile(r'[^,{}\[\]"<]+')
    _STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)

    def __init__(self, quote: str) -> None:
        super().__init__()
        self._quote = quote
        self._open: list[str] = []
        self._is_key = False  # whether a key may come next
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
        if end == len(self._buffer):  # it may go on
            return None
        word, self._buffer = self._buffer[:end].strip(), self._buffer[end:]
        try:
            is_json = not self._is_key and not isinstance(json.loads(word, parse_constant=_refuse), str)
        except ValueError:
            is_json = False
        return word if is_json else json.dumps(word, ensure_ascii=False)
