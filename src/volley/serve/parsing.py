"""Takes an answer apart while it arrives: reasoning, content and tool calls, with the arguments as they are written.

transformers' ``ResponseParser`` finds the regions. Calls that are JSON are read here, character by character, so that a client
gets the arguments before the call is complete; other notations are converted when a call closes.
"""

import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers.utils.chat_parsing import ResponseParser

from volley.serve.formats import AnswerFormat

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer. A ``call`` begins tool call ``index``; ``arguments`` are more of that call's JSON."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    """Of a call: the function's name."""
    index: int = 0
    call_id: str = ""


class AnswerParser:
    """Of one answer. Feed it text; :meth:`finish` gives what was held back.

    White space around reasoning and calls belongs to the format and is dropped; a text with neither stays as it is.
    """

    def __init__(
        self, form: AnswerFormat, prompt: str, tools: Sequence[Mapping[str, Any]] = (), *, with_calls: bool
    ) -> None:
        """``prompt`` is the text before the answer, of which the chat template may have written a part of the answer."""
        template = form.template(with_calls=with_calls)
        has_begun = template.start_anchor_re.search(prompt) is not None
        self._parser = ResponseParser(template, prefix=prompt if has_begun else "", tools=list(tools) or None)
        calls = template.fields.get("tool_calls")
        self._reads_calls = calls is not None and calls.content == "text"
        self._head = form.call.head if form.call else None
        self._region: str | None = None
        self._reader: CallReader | None = None
        self._raw, self._calls_before = "", 0  # of a region of calls that is open
        self._held = ""  # white space that is dropped if anything but content follows
        self._strips = False
        self._is_broken = False
        self.num_calls = 0
        for event in self._parser.initial_events:
            list(self._read(event))

    @property
    def is_thinking(self) -> bool:
        """Whether reasoning has begun and not ended."""
        return self._region == "thinking"

    def feed(self, text: str) -> list[Part]:
        if self._is_broken:
            return [Part("content", text)] if text else []
        return self._parse(lambda: self._parser.feed(text))

    def finish(self) -> list[Part]:
        parts = [] if self._is_broken else self._parse(lambda: self._parser.finalize()[1])
        return [*parts, Part("content", self._held)] if self._held else parts

    def _parse(self, read: Callable[[], Sequence[Event]]) -> list[Part]:
        try:
            events = read()
        except (ValueError, KeyError):  # what the model wrote is not in its format: it stays text
            self._is_broken, raw = True, self._raw
            return [Part("content", raw)] if raw else []
        return [part for event in events for part in self._read(event)]

    def _read(self, event: Event) -> Iterator[Part]:
        field, kind = event["field"], event["type"]
        if kind == "region_open":
            self._region, self._raw, self._calls_before = field, "", self.num_calls
            if field != "content":
                self._held, self._strips = "", True
            if field == "tool_calls" and self._reads_calls:
                self._reader = CallReader(self.num_calls, self._head)
        elif kind == "region_close":
            self._region = None
            if field == "tool_calls":
                yield from self._close_call(event["value"])
            if field != "content":
                self._held, self._strips = "", True
        elif field == "tool_calls":
            self._raw += event["text"]
            if self._reader is not None:
                yield from self._count(self._reader.feed(event["text"]))
        else:
            yield from self._text("reasoning" if field == "thinking" else "content", event["text"])

    def _text(self, kind: Literal["content", "reasoning"], text: str) -> Iterator[Part]:
        text = self._held + (text.lstrip() if self._strips else text)
        kept = text.rstrip()
        self._held = text[len(kept) :]
        if kept:
            self._strips = False
            yield Part(kind, kept)

    def _close_call(self, value: Any) -> Iterator[Part]:
        if self._reader is not None:
            self._reader = None
        else:
            for one in value if isinstance(value, list) else [value]:
                function = one.get("function", {}) if isinstance(one, dict) else {}
                if isinstance(function.get("name"), str) and isinstance(function.get("arguments"), dict):
                    arguments = json.dumps(function["arguments"], ensure_ascii=False)
                    yield from self._count(_whole_call(self.num_calls, function["name"], arguments))
        if self.num_calls == self._calls_before and self._raw:
            yield Part("content", self._raw)

    def _count(self, parts: Sequence[Part]) -> Sequence[Part]:
        self.num_calls += sum(part.kind == "call" for part in parts)
        return parts


def _whole_call(index: int, name: str, arguments: str) -> list[Part]:
    return [Part("call", name, index, _new_id()), Part("arguments", arguments, index)]


def _new_id() -> str:
    """Nine letters and digits, which is what Mistral's templates ask for and all others take."""
    return uuid.uuid4().hex[:9]


class CallReader:
    """Reads one region of calls as it is written: objects with ``name`` and ``arguments``, or a name and its arguments.

    What is no call gives no parts.
    """

    _ARGUMENTS = ("arguments", "parameters")
    _LONGEST_HEAD = 1000

    def __init__(self, index: int, head: str | None = None) -> None:
        """The first call has ``index``. ``head`` finds the ``name`` before arguments that are no key of an object."""
        self._index, self._head = index, re.compile(head) if head else None
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

    # Each phase takes text from the buffer, sets the next phase and gives parts. None: it needs more text.
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
        self._buffer, self._phase, self._after_arguments = self._buffer[found.end() :], self._value, self._junk
        return []

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
        if found is None or found[1] == len(self._buffer):  # a number may go on
            return None
        value, end = found
        self._buffer, self._phase = self._buffer[end:], self._next_key
        if self._key == "name":
            self._name = str(value)
            return [*self._begin(), *self._more(self._waiting)] if self._waiting else []
        if self._key in self._ARGUMENTS and isinstance(value, str):  # JSON as a string
            self._waiting = value
        return []

    def _arguments(self) -> list[Part]:
        """Characters of the arguments, up to the brace that closes them."""
        end = len(self._buffer)
        for place, character in enumerate(self._buffer):
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
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        return self._more(text)

    def _decoded(self) -> tuple[Any, int] | None:
        """The JSON value at the buffer's beginning and where it ends, once it is complete."""
        try:
            return self._decoder.raw_decode(self._buffer)
        except ValueError:
            return None

    def _begin(self) -> list[Part]:
        self._is_open = True
        return [Part("call", self._name, self._index, _new_id())]

    def _more(self, text: str) -> list[Part]:
        if not self._is_open:
            self._waiting += text
            return []
        return [Part("arguments", text, self._index)] if text else []
