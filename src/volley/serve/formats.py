"""Formats of reasoning and tool calls, one JSON file each in ``formats/``, selected by the chat template.

A file holds transformers' ``response`` template (with the regions ``thinking``, ``tool_calls`` and ``content``), the markers of
``thinking``, and the form of a ``call`` that a grammar can force. A tokenizer's own ``response_template`` takes precedence.
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
    """Argument between tags: ``begin``, its name, ``middle``, the value, ``end``. ``after`` follows the last argument.

    A line break at the end of ``middle`` or the start of ``end`` is not part of the value.
    """

    begin: str
    middle: str
    end: str
    after: str


@dataclass(frozen=True)
class CallText:
    """Text of a call: ``begin``, the name, ``middle``, the arguments, ``end``. Arguments are JSON by default."""

    begin: str
    middle: str
    end: str
    between: str | None = None
    """Separator of several calls in one answer; ``None``: at most one call is allowed."""
    head: str | None = None
    """Regular expression that finds the name before the arguments if it is not a key of the JSON."""
    parameter: ParameterText | None = None
    """Form of one argument if the arguments stand between tags."""
    quote: str | None = None
    """Quote around strings if the arguments are JSON with bare keys."""
    anywhere: tuple[str, ...] = ()
    """Lark grammar of answers with calls, if ``begin`` does not distinguish a call from other text. A rule with ``{name}``
    becomes one alternative per tool; ``{arguments}`` is replaced by the rule of that tool's arguments."""

    @property
    def is_json(self) -> bool:
        return self.parameter is None and self.quote is None


@dataclass(frozen=True)
class AnswerFormat:
    """Format of the answers of one model family."""

    name: str
    response: Mapping[str, Any]
    """Response template as transformers defines it."""
    call: CallText | None = None
    thinking: tuple[str, str] | None = None
    """Markers that open and close reasoning."""
    answer: tuple[str, str] | None = None
    """Marker that opens an answer, and the text before it if reasoning came first; ``None``: no marker."""
    recognise: tuple[str, ...] = field(default=(), repr=False)
    """Texts that a chat template of this format contains."""
    unless: tuple[str, ...] = field(default=(), repr=False)
    """Texts that no chat template of this format contains."""

    @property
    def has_calls(self) -> bool:
        return "tool_calls" in self.response["fields"]

    @property
    def thinks_first(self) -> bool:
        """Return whether reasoning can open only at the beginning of an answer."""
        return "\\A" in self.response["fields"].get("thinking", {}).get("open_pattern", "")

    def is_of(self, template: str) -> bool:
        """Return whether a chat template is of this format."""
        return all(mark in template for mark in self.recognise) and not any(mark in template for mark in self.unless)

    def template(self, *, with_calls: bool) -> ResponseTemplate:
        """Return the response template for one answer. Without tools, text that looks like a call stays text."""
        fields = {name: own for name, own in self.response["fields"].items() if with_calls or name != "tool_calls"}
        return load_response_template({**self.response, "fields": fields})

    def markers(self) -> str:
        """Return a text that contains every marker of an answer verbatim; text before an answer's markers belongs to the
        prompt."""
        own = {name: value for name, value in self.response.items() if not name.startswith("start_anchor")}
        return json.dumps(own, ensure_ascii=False).replace("\\\\", "") + json.dumps(self.thinking)


@cache
def load_format(name: str) -> AnswerFormat:
    """Load one of volley's formats by name, or a format from a JSON file. Raises :class:`ConfigError`."""
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
    """Return a format with calls as plain JSON, for notations that no grammar can force, and with the reasoning of ``form``."""
    plain = load_format("plain")
    if form is None or form.thinking is None:
        return plain
    anchors = {name: value for name, value in form.response.items() if name.startswith("start_anchor")}
    fields = {"thinking": form.response["fields"]["thinking"], **plain.response["fields"]}
    return replace(plain, thinking=form.thinking, response={**anchors, "fields": fields})


def format_of(tokenizer: Any, template: str, choice: str = "auto") -> AnswerFormat | None:
    """Return the format that ``choice`` names: ``none``, a name, a file, or ``auto``, which detects it from the tokenizer and
    template."""
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
    """Return the format with the text before an answer taken from ``opening``, the end of a prompt, unless it is known.

    Reasoning that the template opens is thus recognised whatever the template calls the assistant.
    """
    if form is None or form.thinking is None or "start_anchor" not in form.response:
        return form
    anchor = opening.partition(form.thinking[0])[0]
    if not anchor.strip() or form.template(with_calls=True).start_anchor_re.search(opening) is not None:
        return form
    known = form.response["start_anchor"]
    anchors = [*([known] if isinstance(known, str) else known), anchor]
    return replace(form, response={**form.response, "start_anchor": anchors})
