"""Grammars of whole answers: calls that a request forces, strict arguments, and forms that begin only after reasoning."""

import json
import re
from collections.abc import Sequence
from typing import Any

from volley.errors import ConfigError
from volley.grammar import Grammar
from volley.serve.formats import AnswerFormat, CallText
from volley.serve.messages import NamedTool, Tool, Tools

_COMPACT = {"x-guidance": {"whitespace_flexible": False}}


def grammar_of_answer(
    form: AnswerFormat | None, tools: Tools, own: Grammar | None, tokenizer: Any, *, is_thinking: bool
) -> Grammar | None:
    """What an answer must be: calls where they are forced, else calls or ``own``, else ``own``; ``None``: anything.

    Strict tools that may be called at any place bind the text from the beginning of each call. ``is_thinking`` says that the
    prompt has opened reasoning: then whatever is asked for begins after it. Raises :class:`ConfigError`.
    """
    offered = tools.offered
    call = form.call if form is not None and offered else None
    call = call if call is not None and call.is_json else None
    rules: list[str] = []
    if tools.is_forced:
        assert call is not None, "a format with calls is chosen where one is forced"
        if own is not None:
            raise ConfigError("a call is forced, so nothing else can be asked of the answer; leave one of both out")
        is_single = isinstance(tools.tool_choice, NamedTool) or not tools.parallel_tool_calls
        rules += ["start: BEFORE calls", *_calls(call, offered, tokenizer, is_single=is_single)]
    elif own is not None and call is not None:
        calls = _calls(call, offered, tokenizer, is_single=not tools.parallel_tool_calls)
        rules += ["start: BEFORE (calls | answer)", *calls, f"answer: {_in_lark(own)}"]
    elif own is not None and is_thinking:
        rules += ["start: BEFORE answer", f"answer: {_in_lark(own)}"]
    elif call is not None and any(tool.function.strict for tool in offered):
        return _strict_anywhere(call, offered, tokenizer)
    else:
        return own
    thinking = form.thinking if form is not None and is_thinking else None
    before = "reasoning" if thinking else ""
    if thinking:
        rules.append(f"reasoning[suffix={json.dumps(thinking[1])}]: /(?s:.*)/")
        if _special_in(thinking[1], tokenizer):
            rules[-1] = f"reasoning: /(?s:.*)/ {_literal(thinking[1], tokenizer)}"
    return Grammar.lark("\n".join(rules).replace("BEFORE", before + " SPACE?" if before else "") + "\nSPACE: /\\s+/\n")


def _calls(call: CallText, tools: Sequence[Tool], tokenizer: Any, *, is_single: bool) -> list[str]:
    """Rules for ``calls``: one of the tools, or several where the format can write them."""
    names = " | ".join(f"call_{index}" for index in range(len(tools)))
    more = "" if is_single or call.between is None else f" ({_literal(call.between, tokenizer)} call)*"
    rules = [f"calls: call{more}", f"call: {names}"]
    for index, tool in enumerate(tools):
        before = _literal(call.begin + tool.function.name + call.middle, tokenizer)
        rules.append(f"call_{index}: {before} {_arguments(tool)} {_literal(call.end, tokenizer)}")
    return rules


def _strict_anywhere(call: CallText, tools: Sequence[Tool], tokenizer: Any) -> Grammar | None:
    """Text with calls in it, whose arguments follow their schemas; ``None`` if it cannot be told where a call begins.

    It begins with a special token that nothing else has, with a marker that is text, or with the answer itself.
    """
    special = _special_in(call.begin, tokenizer)
    own = next((token for token in special if call.begin.startswith(token)), None)
    marker = re.match(r"<\w+>|\[\w+\]", call.begin)
    if own is not None and own == call.begin:
        opening, number = own, tokenizer.convert_tokens_to_ids(own)
        rules = ["start: free (opening call free)*", f"opening: <[{number}]>", f"free: <[^{number}]>*"]
    elif marker is not None and not special:
        opening = marker[0]
        rules = ["start: (opening call)* TEXT", f"opening[suffix={json.dumps(opening)}]: TEXT", "TEXT: /(?s:.*)/"]
    elif call.begin.startswith("{") and call.between is None:
        opening = ""
        rules = ["start: call | TEXT", r'TEXT: /(?s:.*)/ & ~/\s*(<\|python_tag\|>\s*)?\{\s*"name"\s*:(?s:.*)/']
    else:
        return None
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        before = _literal(call.begin.removeprefix(opening) + tool.function.name + call.middle, tokenizer)
        rules.append(f"call_{index}: {before} {_arguments(tool)} {_literal(call.end, tokenizer)}")
    return Grammar.lark("\n".join(rules) + "\n")


def _arguments(tool: Tool) -> str:
    return "%json " + json.dumps(tool.schema_of_arguments | _COMPACT)


def _in_lark(grammar: Grammar) -> str:
    """A grammar as a part of another one."""
    if grammar.kind == "json_schema":
        return "%json " + json.dumps(json.loads(grammar.source) | _COMPACT)
    if grammar.kind == "choice":
        return " | ".join(map(json.dumps, json.loads(grammar.source)))
    raise ConfigError(
        f"a {grammar.kind} grammar cannot stand beside tools or behind reasoning; use a JSON schema, or switch reasoning off "
        "with reasoning_effort none"
    )


def _special_in(text: str, tokenizer: Any) -> list[str]:
    """Special tokens in a text, the longest first."""
    known = sorted({str(token) for token in tokenizer.all_special_tokens}, key=len, reverse=True)
    return [token for token in known if token in text]


def _literal(text: str, tokenizer: Any) -> str:
    """A text as Lark writes it; special tokens, which are no text, by their ids."""
    special = _special_in(text, tokenizer)
    parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
    spelt = [
        f"<[{tokenizer.convert_tokens_to_ids(part)}]>" if part in special else json.dumps(part)
        for part in parts
        if part
    ]
    return " ".join(spelt)
