"""Adaptation of conversations to what one chat template can render.

Templates accept different messages: some allow one call per message, ids of nine characters, one system message at the beginning,
or no calls at all. They refuse other messages or silently drop them. Each template is therefore probed once, before the first
request: small conversations are rendered, and if part of one is missing, a rewriting of the messages is adopted if it helps.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations, groupby, takewhile
from typing import Any

Message = dict[str, Any]
Way = Callable[[Sequence[Message]], list[Message]]
"""Function that rewrites a conversation without changing its meaning."""


def short_ids(messages: Sequence[Message]) -> list[Message]:
    """Replace ids of calls by nine letters and digits, as Mistral's templates require. Ids of that form are kept."""

    def short(call_id: str) -> str:
        is_short = re.fullmatch(r"[a-zA-Z0-9]{9}", call_id) is not None
        return call_id if is_short else hashlib.sha256(call_id.encode()).hexdigest()[:9]

    told = []
    for message in messages:
        own = _with_calls(message, lambda call: {**call, "id": short(call["id"])})
        if "tool_call_id" in own:
            own["tool_call_id"] = short(own["tool_call_id"])
        told.append(own)
    return told


def one_system(messages: Sequence[Message]) -> list[Message]:
    """Join the system messages at the beginning into one."""
    first = next((place for place, own in enumerate(messages) if own["role"] != "system"), len(messages))
    joined = "\n\n".join(own["content"] for own in messages[:first])
    return [*([{**messages[0], "content": joined}] if first else []), *messages[first:]]


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Write one call per message, each followed by its result. Reasoning and text stay with the first call."""
    told: list[Message] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        if len(message.get("tool_calls", ())) < 2:
            told.append(message)
            continue
        results = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.pop(0))
        before = message
        for call in message["tool_calls"]:
            told.append({**before, "tool_calls": [call]})
            told += [own for own in results if own["tool_call_id"] == call["id"]]
            before = {"role": "assistant", "content": ""}
        known = {call["id"] for call in message["tool_calls"]}
        told += [own for own in results if own["tool_call_id"] not in known]
    return told


def results_beside_calls(messages: Sequence[Message]) -> list[Message]:
    """Move results into the message of their calls, as ``tool_responses``: early templates of Gemma 4 read them there."""
    told: list[Message] = []
    for message in text_before_calls(messages):
        last = told[-1] if told else {}
        if message["role"] == "tool" and "tool_calls" in last:
            result = {"name": message.get("name", "unknown"), "response": message["content"]}
            told[-1] = {**last, "tool_responses": [*last.get("tool_responses", ()), result]}
        elif message["role"] == "assistant" and "tool_responses" in last and not message.get("tool_calls"):
            told[-1] = {**last, "content": message["content"]}  # the model continued in the same turn
        else:
            told.append(message)
    return told


def calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Write calls as JSON in the text of their message. Calls are forced in this form too if no format is known."""
    told = []
    for message in messages:
        own = dict(message)
        functions = [call["function"] for call in own.pop("tool_calls", ())]
        own["content"] = "\n".join([*filter(None, [own["content"]]), *(json.dumps(one) for one in functions)])
        told.append(own)
    return told


def tools_as_text(messages: Sequence[Message]) -> list[Message]:
    """Write calls as :func:`calls_as_text` does and results as user messages. Consecutive results become one message."""
    told: list[Message] = []
    for is_result, group in groupby(calls_as_text(messages), key=lambda own: own["role"] == "tool"):
        some = list(group)
        told += [{"role": "user", "content": "\n".join(own["content"] for own in some)}] if is_result else some
    return told


def arguments_as_text(messages: Sequence[Message]) -> list[Message]:
    """Write arguments as JSON text: DeepSeek's templates insert them unchanged between their markers."""
    return _with_arguments(messages, lambda own: own if isinstance(own, str) else json.dumps(own, ensure_ascii=False))


def no_content_beside_calls(messages: Sequence[Message]) -> list[Message]:
    """Set the content of messages that have calls and no text to ``None``: some templates render calls only then."""
    return [{**own, "content": own["content"] or None} if own.get("tool_calls") else dict(own) for own in messages]


def arguments_as_objects(messages: Sequence[Message]) -> list[Message]:
    """Wrap arguments that are not an object, because the model wrote none or was cut: some templates iterate over them."""
    return _with_arguments(messages, lambda own: {"arguments": own} if isinstance(own, str) else own)


def _with_arguments(messages: Sequence[Message], change: Callable[[Any], Any]) -> list[Message]:
    def changed(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": change(function["arguments"])}}

    return [_with_calls(message, changed) for message in messages]


def _with_calls(message: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [change(call) for call in calls]} if calls else dict(message)


def text_before_calls(messages: Sequence[Message]) -> list[Message]:
    """Move text beside calls into a message of its own before them."""
    told: list[Message] = []
    for message in messages:
        if message.get("tool_calls") and message["content"]:
            told += [{"role": "assistant", "content": message["content"]}, {**message, "content": ""}]
        else:
            told.append(message)
    return told


def text_as_thought(messages: Sequence[Message]) -> list[Message]:
    """Append text beside calls to the reasoning: gpt-oss's template has one place for both."""
    told = []
    for message in messages:
        own = dict(message)
        if own.get("tool_calls") and own["content"]:
            thought = "\n\n".join(filter(None, [own.get("thinking"), own["content"]]))
            own |= {"content": "", "thinking": thought, "reasoning_content": thought}
        told.append(own)
    return told


class Conversations:
    """Rewrites conversations so that a template can render them; others stay unchanged."""

    def __init__(self, render: Callable[..., str]) -> None:
        """Probe a template. ``render`` returns the text of ``tools`` and of messages as
        :func:`volley.serve.messages.for_template` returns them."""
        self._render = render
        self.ways: list[Way] = []
        for probe, texts, alternatives in _PROBES:
            if self._are_told(texts, self(probe)):
                continue
            for ways in alternatives:
                if self._are_told(texts, _put(self(probe), ways)):
                    self.ways += ways
                    break

    def __call__(self, messages: Sequence[Message]) -> list[Message]:
        return _put(messages, self.ways)

    def opening(self) -> str:
        """Return the text with which the template opens an answer after a user message and after a tool result alike; empty if
        unknown."""
        mark, endings = "Asked by volley", list[str]()
        for messages in ([{"role": "user", "content": mark}], [_ASKED, _answer(_A), _result(_A, mark)]):
            try:
                _, found, rest = self._render(self(messages)).rpartition(mark)
            except Exception:  # a template may raise anything
                continue
            endings += [rest[::-1]] * bool(found)
        alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*endings, strict=False))
        return "".join(letters[0] for letters in alike)[::-1]

    def _are_told(self, texts: Sequence[str], messages: list[Message]) -> bool:
        """Return whether the template renders all of ``texts`` as often as they occur."""
        try:
            text = self._render(messages, tools=[_OFFERED])
        except Exception:  # a template may raise anything
            return False
        if _PYTHON in text:
            return False
        return all(text.count(one) >= count for one, count in Counter(texts).items())


def _put(messages: Sequence[Message], ways: Sequence[Way]) -> list[Message]:
    """Return the messages rewritten by each of ``ways`` in turn."""
    told = list(messages)
    for way in ways:
        told = way(told)
    return told


def _call(letter: str) -> dict[str, Any]:
    function = {"name": f"probe_{letter}", "arguments": {"city": f"Place{letter}"}}
    return {"id": f"call_{letter * 24}", "type": "function", "function": function}


def _answer(*calls: dict[str, Any], text: str = "", **fields: str) -> Message:
    return {"role": "assistant", "content": text, "tool_calls": list(calls), **fields}


def _result(call: dict[str, Any], text: str) -> Message:
    return {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}


_OFFERED: dict[str, Any] = {
    "type": "function",
    "function": {"name": "offered", "description": "", "parameters": {"type": "object", "properties": {}}},
}
_ASKED: Message = {"role": "user", "content": "Asked"}
_A, _B = _call("a"), _call("b")
_PYTHON = repr(next(iter(_A["function"]["arguments"])))
"""Key as Python prints it: in a rendered prompt it shows that the template printed an object's ``repr``."""
_TOLD_A, _TOLD_B = ("probe_a", "Placea"), ("probe_b", "Placeb")
_CUT: dict[str, Any] = {"id": f"call_{'c' * 24}", "type": "function"}
_CUT["function"] = {"name": "probe_c", "arguments": '{"city": "Placec'}
_TOLD_CUT = ("probe_c", "Placec")
_FORMS_OF_CALLS: tuple[Way, ...] = (short_ids, arguments_as_text, no_content_beside_calls)
_PROBES: tuple[tuple[list[Message], tuple[str, ...], tuple[tuple[Way, ...], ...]], ...] = (
    (
        [{"role": "system", "content": "First."}, {"role": "system", "content": "Second."}, _ASKED],
        ("First.", "Second."),
        ((one_system,),),
    ),
    (
        [_ASKED, _answer(_A), _result(_A, "Resulta")],
        (*_TOLD_A, "Resulta"),
        (
            *(ways for number in (1, 2, 3) for ways in combinations(_FORMS_OF_CALLS, number)),
            (calls_as_text,),
            (tools_as_text,),
        ),
    ),
    ([_ASKED, _answer(_A), _result(_A, "Resulta")], (*_TOLD_A, "probe_a", "Resulta"), ((results_beside_calls,),)),
    (
        [_ASKED, _answer(_A, _B), _result(_A, "Resulta"), _result(_B, "Resultb")],
        (*_TOLD_A, *_TOLD_B, "Resultb"),
        ((one_call_each,), (one_call_each, no_content_beside_calls)),
    ),
    (
        [_ASKED, _answer(_A, text="Said.", thinking="Thought.", reasoning_content="Thought."), _result(_A, "Resulta")],
        ("Said.", *_TOLD_A, "Resulta"),
        ((text_as_thought,), (text_before_calls,), (text_before_calls, no_content_beside_calls)),
    ),
    ([_ASKED, _answer(_CUT), _result(_CUT, "Resultc")], (*_TOLD_CUT, "Resultc"), ((arguments_as_objects,),)),
)
"""Probes: a conversation, the texts that must be rendered, and the sequences of rewritings to try. The first that helps is
used."""
