"""Grammars of whole answers: forced calls, strict arguments, and formats that apply only after reasoning."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from volley.decode.schemas import enforceable
from volley.errors import ConfigError
from volley.grammar import WHITESPACE, Grammar
from volley.serve.formats import AnswerFormat, CallText
from volley.serve.markers import TERMINALS, Markers
from volley.serve.messages import NamedTool, Tool, Tools

_SAYS_WHAT = {"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"}


def grammar_of_answer(
    form: AnswerFormat | None,
    tools: Tools,
    own: Grammar | None,
    tokenizer: Any,
    *,
    is_thinking: bool,
    is_answering: bool = False,
) -> Grammar | None:
    """Return the grammar of an answer, or ``None`` if anything is allowed.

    Forced calls allow only calls, whose arguments are JSON. Otherwise the answer may be a call or match ``own``. Strict
    tools constrain the text from the beginning of each call, if its arguments are JSON. ``is_thinking``: the prompt has opened
    reasoning, so the grammar applies after it. ``is_answering``: the prompt has opened the answer. Raises :class:`ConfigError`.
    """
    offered, markers = tools.offered, Markers(tokenizer)
    call = form.call if form is not None and offered else None
    marks = form.thinking if form is not None else None
    thinking = marks if is_thinking else None
    opens = form.answer if form is not None and own is not None else None
    if opens and is_answering and not tools.is_forced:
        return own
    start = "start: reasoning SPACE?" if thinking else "start: thought?" if opens and marks else "start:"
    if tools.is_forced:
        assert call is not None, "a format with calls is chosen where one is forced"
        if own is not None:
            raise ConfigError("a call is forced, so nothing else can be asked of the answer; leave one of both out")
        is_single = isinstance(tools.tool_choice, NamedTool) or not tools.parallel_tool_calls
        rules = [f"{start} calls", *_calls(call, offered, markers, is_single=is_single, binds_all=True)]
    elif own is not None and call is not None:
        calls = _calls(call, offered, markers, is_single=not tools.parallel_tool_calls, binds_all=False)
        rules = [f"{start} (calls | answer)", *calls, *_answer(own, opens, markers)]
    elif own is not None and (is_thinking or opens):
        rules = [f"{start} answer", *_answer(own, opens, markers)]
    elif call is not None and call.is_json and any(tool.function.strict for tool in offered):
        return _strict_anywhere(call, offered, markers)
    else:
        return own
    if thinking:
        end = thinking[1] + (opens[1] if opens else "")
        rules += [*markers.up_to("reasoning", end), "SPACE: /\\s+/"]
    elif opens and marks:
        begin, end = marks
        thought = f"thought: {markers.literal(begin)} thinking"
        rules += [thought, *markers.up_to("thinking", end + opens[1])]
    return Grammar.lark("\n".join([*rules, *TERMINALS]) + "\n")


def _answer(own: Grammar, opens: tuple[str, str] | None, markers: Markers) -> list[str]:
    """Return rules for an answer that matches ``own``, behind the text that opens it."""
    before = f"{markers.literal(opens[0])} form" if opens else "form"
    return [f"answer: {before}", f"form: {_in_lark(own)}"]


def _calls(call: CallText, tools: Sequence[Tool], markers: Markers, *, is_single: bool, binds_all: bool) -> list[str]:
    """Return rules for ``calls``: one call, or several if the format can write them."""
    more = "" if is_single or call.between is None else f" ({markers.literal(call.between)} call)*"
    return [f"calls: call{more}", *_call(call, call.begin, tools, markers, binds_all=binds_all)]


def _call(call: CallText, begin: str, tools: Sequence[Tool], markers: Markers, *, binds_all: bool) -> list[str]:
    """Return rules for ``call``, which begins with ``begin``."""
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    for index, tool in enumerate(tools):
        before = markers.literal(begin + tool.function.name + call.middle)
        behind = f" {markers.literal(call.end)}" if call.is_json else ""  # other arguments are any text up to it
        rules.append(f"call_{index}: {before} arguments_{index}{behind}")
    return rules + _arguments(call, tools, markers, binds_all=binds_all)


def _strict_anywhere(call: CallText, tools: Sequence[Tool], markers: Markers) -> Grammar | None:
    """Return a grammar of text with calls whose arguments follow their schemas, or ``None`` if a call's beginning is ambiguous.

    The format defines the beginning, or a call begins with a marker or at the start of the answer.
    """
    if call.anywhere:
        return _as_format_says(call, tools, markers)
    if (opening := markers.first_of(call.begin)) is not None:
        others = markers.others(opening)
        rules = [
            f"start: (opening call)* {markers.free(others)}",
            *markers.up_to("opening", opening, passing=others),
            *TERMINALS,
        ]
    elif call.begin.startswith("{") and call.between is None:
        opening = ""
        head = r'\s*(<\|python_tag\|>\s*)?\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:'
        rules = ["start: call | TEXT", f"TEXT: /(?s:.*)/ & ~/{head}(?s:.*)/"]
    else:
        return None
    calls = _call(call, call.begin.removeprefix(opening), tools, markers, binds_all=False)
    return Grammar.lark("\n".join([*rules, *calls]) + "\n")


def _as_format_says(call: CallText, tools: Sequence[Tool], markers: Markers) -> Grammar:
    """Return the format's own grammar of answers with calls in them."""
    rules = []
    for rule in call.anywhere:
        head, body = rule.split(": ", 1)
        if "{name}" in body:
            named = [body.replace("{name}", tool.function.name) for tool in tools]
            body = " | ".join(own.replace("{arguments}", f"arguments_{index}") for index, own in enumerate(named))
        rules.append(f"{head}: " + re.sub(r'"([^"]*)"', lambda found: markers.literal(found[1]), body))
    return Grammar.lark("\n".join([*rules, *_arguments(call, tools, markers, binds_all=False)]) + "\n")


def _arguments(call: CallText, tools: Sequence[Tool], markers: Markers, *, binds_all: bool) -> list[str]:
    """Return the rules ``arguments_0``, ``arguments_1`` and so on. Unless ``binds_all``, a tool that is not strict accepts any
    arguments if its schema cannot be expressed."""
    rules = []
    for index, tool in enumerate(tools):
        name = f"arguments_{index}"
        if not call.is_json:
            rules += markers.up_to(name, call.end, passing=markers.others(markers.first_of(call.end) or ""))
            continue
        schema = tool.schema_of_arguments
        try:  # arguments are an object, whether or not the schema says so
            rules.append(f"{name}: {in_json(schema if schema.keys() & _SAYS_WHAT else {'type': 'object', **schema})}")
        except ConfigError:
            if binds_all or tool.function.strict:
                raise
            rules.append(f"{name}: {in_json({'type': 'object'})}")
    return rules


def in_json(schema: Mapping[str, Any], whitespace: str = WHITESPACE) -> str:
    """Return a Lark expression for JSON under a schema. The expression allows the spaces that templates write: models answer
    worse without them."""
    spaces = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    return "%json " + json.dumps({**enforceable(dict(schema)), "x-guidance": spaces})


def _in_lark(grammar: Grammar) -> str:
    """Return a grammar as part of another one."""
    if grammar.kind == "json_schema":
        return in_json(json.loads(grammar.source), grammar.whitespace)
    if grammar.kind == "choice":
        return " | ".join(map(json.dumps, json.loads(grammar.source)))
    raise ConfigError(
        f"a {grammar.kind} grammar cannot be combined with tools or reasoning; use a JSON schema, or switch reasoning off "
        "with reasoning_effort none"
    )
