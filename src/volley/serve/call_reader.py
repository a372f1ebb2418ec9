"""Incremental reader of tool calls: clients receive arguments before the call is complete."""

import json
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from volley.serve.arguments import QuotedArguments, TaggedArguments
from volley.serve.formats import CallText


@dataclass(frozen=True, slots=True)
class Part:
    """Part of an answer. ``call`` begins tool call ``index``; ``arguments`` are more JSON of that call."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    """Name of the function, if this is a call."""
    index: int = 0
    call_id: str = ""


def new_call_id() -> str:
    """Return a call id of nine letters and digits: Mistral's templates require this form and all others accept it."""
    return uuid.uuid4().hex[:9]


class CallReader:
    """Reader of one region of calls: objects with ``name`` and ``arguments``, or a name followed by its arguments.

    Text that is no call yields no parts.
    """

    _ARGUMENTS = ("arguments", "parameters")
    _LONGEST_HEAD = 1000

    def __init__(
        self, index: int, call: CallText | None = None, schemas: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Create a reader. The first call gets ``index``. ``schemas`` maps function names to the schemas of their arguments."""
        self._index, self._call, self._schemas = index, call, schemas or {}
        self._head = re.compile(call.head) if call and call.head else None
        self._translation: TaggedArguments | QuotedArguments | None = None
        self._buffer = ""
        self._decoder = json.JSONDecoder(strict=False)
        self._phase: Callable[[], list[Part] | None] = self._outside
        self._after_arguments = self._next_key
        self._key, self._name, self._waiting, self._is_open = "", "", "", False
        self._depth, self._in_string, self._escaped = 0, False, False

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while self._buffer and (found := self._phase()) is not None:
            parts += found
        return parts

    def close(self) -> list[Part]:
        """Finish at the end of the region or the answer. The text that closes the region may also end the arguments."""
        if self._call is None or self._call.parameter is None:
            return []
        if isinstance(self._translation, TaggedArguments):
            return self._more(self._translation.end())
        return self.feed(self._call.parameter.after)

    # Each phase reads the buffer, sets the next phase and returns parts. None: more text is needed.
    def _outside(self) -> list[Part] | None:
        self._buffer = self._buffer.lstrip(" \n\r\t[],;")
        if not self._buffer:
            return None
        self._name, self._waiting, self._is_open = "", "", False
        if self._buffer[0] == "{":
            self._buffer, self._phase = self._buffer[1:], self._next_key
        else:
            self._phase = self._junk if self._head is None else self._name_before
        return []

    def _junk(self) -> list[Part] | None:
        self._buffer = ""
        return None

    def _name_before(self) -> list[Part] | None:
        found = self._head.match(self._buffer) if self._head else None
        if found is None:
            if len(self._buffer) > self._LONGEST_HEAD:
                self._phase = self._junk
            return None
        self._name, self._key = found["name"], self._ARGUMENTS[0]
        self._buffer, self._after_arguments = self._buffer[found.end() :], self._junk
        assert self._call is not None, "it has the head"
        if self._call.parameter is not None:
            schema = self._schemas.get(self._name, {})
            self._translation = TaggedArguments(self._call.parameter, schema)
        elif self._call.quote is not None:
            self._translation = QuotedArguments(self._call.quote)
        else:
            self._phase = self._value
            return []
        self._phase = self._translated
        return [*self._begin(), *self._translated()]

    def _translated(self) -> list[Part]:
        assert self._translation is not None, "its notation is not JSON"
        text, self._buffer = self._translation.feed(self._buffer), ""
        if self._translation.is_done:
            self._phase = self._junk
        return self._more(text)

    def _next_key(self) -> list[Part] | None:
        self._buffer = self._buffer.lstrip(" \n\r\t,")
        if not self._buffer:
            return None
        if self._buffer[0] == "}":
            self._buffer, self._phase = self._buffer[1:], self._outside
            parts = [] if self._is_open or not self._name else [*self._begin(), *self._more(self._waiting or "{}")]
            self._index += self._is_open
            return parts
        found = self._decoded()
        rest = self._buffer[found[1] :].lstrip() if found else ""
        if found is None or not rest:
            return None
        self._key, self._buffer, self._phase = str(found[0]), rest[1:], self._value if rest[0] == ":" else self._junk
        return []

    def _value(self) -> list[Part] | None:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return None
        if self._key in self._ARGUMENTS and self._buffer[0] == "{":
            self._phase, self._depth = self._arguments, 0
            return self._begin() if self._name else []
        found = self._decoded()
        if found is None or found[1] == len(self._buffer):  # a number may have more digits
            return None
        value, end = found
        self._buffer, self._phase = self._buffer[end:], self._next_key
        if self._key == "name":
            self._name = str(value)
            return [*self._begin(), *self._more(self._waiting)] if self._waiting else []
        if self._key in self._ARGUMENTS and isinstance(value, str):  # JSON in a string
            self._waiting = value
        return []

    def _arguments(self) -> list[Part]:
        """Return text of the arguments up to the closing brace. Models leave line breaks in strings unescaped."""
        end, written = len(self._buffer), list[str]()
        for place, character in enumerate(self._buffer):
            is_raw = self._in_string and character < " "
            written.append(json.dumps(character)[1 + self._escaped : -1] if is_raw else character)
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = character == "\\", character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._phase, end = self._after_arguments, place + 1
                    break
        self._buffer = self._buffer[end:]
        return self._more("".join(written))

    def _decoded(self) -> tuple[Any, int] | None:
        """Return the JSON value at the start of the buffer and its end, once it is complete."""
        try:
            return self._decoder.raw_decode(self._buffer)
        except (ValueError, RecursionError):
            return None

    def _begin(self) -> list[Part]:
        self._is_open = True
        return [Part("call", self._name, self._index, new_call_id())]

    def _more(self, text: str) -> list[Part]:
        if not self._is_open:
            self._waiting += text
            return []
        return [Part("arguments", text, self._index)] if text else []
