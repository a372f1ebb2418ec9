"""How a model writes reasoning and tool calls: formats as data, one JSON file each in ``formats/``, chosen by the chat template.

A file has transformers' ``response`` template (its regions are ``thinking``, ``tool_calls`` and ``content``), the markers of
``thinking``, and what a ``call`` looks like for calls that a grammar forces. A tokenizer's own ``response_template`` comes first.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from volley.errors import ConfigError

_FOLDER = Path(__file__).parent / "formats"
_BY_PRECEDENCE = (
    *("qwen3_5", "glm4_5", "glm4_7", "gemma4", "hermes", "gpt_oss"),
    *("mistral", "mistral_list", "llama3", "thinking"),
)


@dataclass(frozen=True)
class ParameterText:
    """An argument between tags: ``begin``, its name, ``middle``, the value, ``end``; ``after`` stands behind the last one.

    A new line with which ``middle`` ends or ``end`` begins is no part of the value.
    """

    begin: str
    middle: str
    end: str
    after: str


@dataclass(frozen=True)
class CallText:
    """The text of a call: ``begin``, the name, ``middle``, the arguments, ``end``. Arguments are JSON unless told otherwise."""

    begin: str
    middle: str
    end: str
    between: str | None = None
    """What separates several calls of one answer; ``None``: there is one call at most."""
    head: str | None = None
    """The expression that finds the name before the arguments, where it is not a key of the JSON."""
    parameter: ParameterText | None = None
    """The arguments stand between tags, one by one."""
    quote: str | None = None
    """The arguments are JSON with bare keys, and this around texts."""
    anywhere: tuple[str, ...] = ()
    """A grammar of answers with calls in them, in Lark, where ``begin`` does not tell a call from anything else. Rules with
    ``{name}`` stand for one alternative of each tool, whose ``{arguments}`` they hold."""

    @property
    def is_json(self) -> bool:
        return self.parameter is None and self.quote is None


@dataclass(frozen=True)
class AnswerFormat:
    """How answers of one model family are taken apart."""

    name: str
    response: Mapping[str, Any]
    """transformers' response template."""
    call: CallText | None = None
    thinking: tuple[str, str] | None = None
    """What opens and what closes reasoning."""
    answer: tuple[str, str] | None = None
    """What opens an answer, and what stands before it where reasoning came first; ``None``: nothing does."""
    recognise: tuple[str, ...] = field(default=(), repr=False)
    """A chat template that has all of these is of this format,"""
    unless: tuple[str, ...] = field(default=(), repr=False)
    """and none of these."""

    @property
    def has_calls(self) -> bool:
        return "tool_calls" in self.response["fields"]

    @property
    def thinks_first(self) -> bool:
        """Whether reasoning opens at the beginning of an answer alone."""
        return "\\A" in self.response["fields"].get("thinking", {}).get("open_pattern", "")

    def is_of(self, template: str) -> bool:
        """Whether a chat template is of this format."""
        return all(mark in template for mark in self.recognise) and not any(mark in template for mark in self.unless)

    def template(self, *, with_calls: bool) -> ResponseTemplate:
        """The template for one answer; without tools what looks like a call is text."""
        fields = {name: own for name, own in self.response["fields"].items() if with_calls or name != "tool_calls"}
        return load_response_template({**self.response, "fields": fields})

    def markers(self) -> str:
        """The text in which every marker of an answer occurs as it is; those before it are the prompt's."""
        own = {name: value for name, value in self.response.items() if not name.startswith("start_anchor")}
        return json.dumps(own, ensure_ascii=False).replace("\\\\", "") + json.dumps(self.thinking)


@cache
def load_format(name: str) -> AnswerFormat:
    """One of volley's own formats by name, or the one in a JSON file. Raises :class:`ConfigError`."""
    file = _FOLDER / f"{name}.json" if name.isidentifier() else Path(name)
    if not file.exists():
        known = ", ".join(sorted(path.stem for path in _FOLDER.glob("*.json")))
        raise ConfigError(f"there is no answer format {name!r}; known: {known}, or give the path of a JSON file")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        thinking = data.get("thinking")
        own = AnswerFormat(
            name=file.stem,
            response=data["response"],
            call=_call_text(data["call"]) if data.get("call") else None,
            thinking=(thinking["open"], thinking["close"]) if thinking else None,
            answer=(data["answer"]["begin"], data["answer"]["next"]) if data.get("answer") else None,
            recognise=tuple(data.get("recognise", ())),
            unless=tuple(data.get("unless", ())),
        )
        own.template(with_calls=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"the answer format in {file} cannot be used: {error!r}; see docs/clients.md") from error
    return own


def _call_text(data: Mapping[str, Any]) -> CallText:
    parameter = data.get("parameter")
    own = {"parameter": ParameterText(**parameter) if parameter else None, "anywhere": tuple(data.get("anywhere", ()))}
    return CallText(**{**data, **own})


def plain_calls(form: AnswerFormat | None) -> AnswerFormat:
    """Calls as plain JSON, for models whose own notation no grammar can force, with the reasoning of their own ``form``."""
    plain = load_format("plain")
    if form is None or form.thinking is None:
        return plain
    anchors = {name: value for name, value in form.response.items() if name.startswith("start_anchor")}
    fields = {"thinking": form.response["fields"]["thinking"], **plain.response["fields"]}
    return replace(plain, thinking=form.thinking, response={**anchors, "fields": fields})


def format_of(tokenizer: Any, template: str, choice: str = "auto") -> AnswerFormat | None:
    """The format that ``choice`` names: ``none``, a name, a file, or ``auto``, which asks the tokenizer and the chat template."""
    if choice == "none":
        return None
    if choice != "auto":
        return load_format(choice)
    own = getattr(tokenizer, "response_template", None)
    found = (load_format(name) for name in _BY_PRECEDENCE)
    known = next((one for one in found if one.is_of(template)), None)
    if own is None:
        return known
    thinking, answer = (known.thinking, known.answer) if known else (None, None)
    return AnswerFormat("tokenizer", own, None, thinking, answer)


def anchored(form: AnswerFormat | None, opening: str) -> AnswerFormat | None:
    """The format, which learns the text before an answer from ``opening``, the end of a prompt, if it knows none of it.

    So reasoning that the template opens is found whatever it calls the assistant.
    """
    if form is None or form.thinking is None or "start_anchor" not in form.response:
        return form
    anchor = opening.partition(form.thinking[0])[0]
    if not anchor.strip() or form.template(with_calls=True).start_anchor_re.search(opening) is not None:
        return form
    known = form.response["start_anchor"]
    anchors = [*([known] if isinstance(known, str) else known), anchor]
    return replace(form, response={**form.response, "start_anchor": anchors})
