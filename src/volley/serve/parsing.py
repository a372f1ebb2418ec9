"""Incremental parser of answers: reasoning, content, and tool calls with their arguments as they are written.

transformers' ``ResponseParser`` finds the regions. A :class:`CallReader` reads calls, so that clients receive arguments before a
call is complete. A tokenizer's own template may convert the arguments; these are sent when the call closes.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate

from volley.serve.bare_calls import BareCalls
from volley.serve.call_reader import CallReader, Part, new_call_id
from volley.serve.formats import AnswerFormat, CallText
from volley.serve.values import Strings, TaggedValues, Values

Event = Mapping[str, Any]


class PlainText:
    """Parser of one answer that is content alone: receives text; :meth:`finish` returns what was held back."""

    num_calls = 0
    reasoning_tokens = 0

    @property
    def is_thinking(self) -> bool:
        """Return whether reasoning is open."""
        return False

    @property
    def is_answering(self) -> bool:
        """Return whether an answer is open."""
        return False

    def read(self, texts: Sequence[str]) -> list[Part]:
        """Return the parts that the texts of new tokens add, and count reasoning tokens."""
        parts = []
        for text in texts:
            before = self.is_thinking
            parts += self.feed(text)
            self.reasoning_tokens += before or self.is_thinking
        return parts

    def feed(self, text: str) -> list[Part]:
        return [Part("content", text)] if text else []

    def finish(self) -> list[Part]:
        return []


class AnswerParser(PlainText):
    """Parser of one answer in a model's format.

    White space around reasoning and calls belongs to the format and is dropped. An answer with neither is unchanged.
    """

    def __init__(
        self,
        form: AnswerFormat,
        prompt: str,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        with_calls: bool,
        bare_calls: bool = False,
    ) -> None:
        """Create a parser. ``prompt`` is the text before the answer; the chat template may have opened the answer in it.

        With ``bare_calls`` an answer that is a call without markers counts as a call.
        """
        template = form.template(with_calls=with_calls)
        has_begun = template.start_anchor_re.search(prompt) is not None
        if form.thinking is not None and prompt.endswith(form.thinking[0]):
            prompt += "\n"  # a pattern at the very end might match more
        calls = template.fields.get("tool_calls")
        values = partial(_values_of, form.call, calls.content if calls else "")
        self._parser = _Regions(values, template, prefix=prompt if has_begun else "", tools=list(tools) or None)
        self._reads_calls = calls is not None and calls.content == "text"
        self._call = form.call
        functions = (tool["function"] for tool in tools)
        self._schemas = {function["name"]: function.get("parameters") or {} for function in functions}
        self._region: str | None = None
        self._reader: CallReader | None = None
        self._raw, self._calls_before = "", 0  # the open region of calls
        self._held = ""  # white space, dropped unless content follows
        self._strips = False
        self._is_broken = self._is_ending = False
        begun = [part for event in self._parser.initial_events for part in self._read(event)]
        self._held = ""  # it belongs to the prompt
        is_whole = not any(part.kind == "content" for part in begun)
        self._bare = BareCalls(tools) if bare_calls and tools and is_whole else None

    @property
    def is_thinking(self) -> bool:
        return self._region == "thinking"

    @property
    def is_answering(self) -> bool:
        return self._region == "content"

    def feed(self, text: str) -> list[Part]:
        parts = super().feed(text) if self._is_broken else self._parse(lambda: self._parser.feed(text))
        return parts if self._bare is None else self._bare.feed(parts)

    def finish(self) -> list[Part]:
        self._is_ending = True
        parts = [] if self._is_broken else self._parse(lambda: self._parser.finalize()[1])
        parts += [Part("content", self._held)] if self._held else []
        if self._bare is not None:
            parts = self._bare.feed(parts)
            parts += self._count(self._bare.finish(self.num_calls))
        return parts

    def _parse(self, read: Callable[[], Sequence[Event]]) -> list[Part]:
        try:
            events = read()
        except (ValueError, KeyError):  # text that does not match the format stays text
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
                self._reader = CallReader(self.num_calls, self._call, self._schemas)
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
            yield from self._count(self._reader.close())
            self._reader = None
        else:
            for one in value if isinstance(value, list) else [value]:
                function = one.get("function", {}) if isinstance(one, dict) else {}
                if isinstance(function.get("name"), str) and isinstance(function.get("arguments"), dict):
                    arguments = json.dumps(function["arguments"], ensure_ascii=False)
                    yield from self._count(_whole_call(self.num_calls, function["name"], arguments))
        is_cut = self._is_ending and self._calls_before > 0  # another call had begun
        if self.num_calls == self._calls_before and self._raw and not is_cut:
            yield Part("content", self._raw)

    def _count(self, parts: Sequence[Part]) -> Sequence[Part]:
        self.num_calls += sum(part.kind == "call" for part in parts)
        return parts


class _Regions(ResponseParser):  # type: ignore[misc]
    """Parser of transformers, changed so that text inside a call's values cannot end the region of calls."""

    def __init__(self, values: Callable[[], Values | None], template: ResponseTemplate, **options: Any) -> None:
        self._pos: int
        self._new_values = values
        self._values: Values | None = None  # values of the open region of calls
        super().__init__(template, **options)

    def _open_explicit(self, events: list[Event], field: Any, match: Any) -> None:
        super()._open_explicit(events, field, match)
        if field.name == "tool_calls" and (values := self._new_values()) is not None:
            values.begin(self._pos)
            self._values = values

    def _reset_to_implicit(self) -> None:
        super()._reset_to_implicit()
        self._values = None

    def _scan(self, watch: Any, eos: bool) -> tuple[Any, int]:
        start: int = self._pos
        while True:
            best, pending = super()._scan(watch, eos)
            if best is None or self._values is None or not self._values.hold(self._buffer, best[2].end()):
                self._pos = start
                return best, pending
            self._pos = best[2].start() + 1


def _values_of(call: CallText | None, content: str) -> Values | None:
    """Return the tracker of values in a region of calls, or ``None`` if the notation is unknown."""
    if content not in ("text", "json"):
        return None
    if call is not None and call.parameter is not None:
        return TaggedValues(call.parameter)
    return Strings(call.quote) if call is not None and call.quote is not None else Strings()


def _whole_call(index: int, name: str, arguments: str) -> list[Part]:
    return [Part("call", name, index, new_call_id()), Part("arguments", arguments, index)]
