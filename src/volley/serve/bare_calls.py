"""Detection of tool calls without markers: an answer that is one JSON object with a tool's name and valid arguments.

Small models answer this way. Any other answer stays text.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import regex
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend
from referencing import Registry

from volley.serve.arguments import refuse_word
from volley.serve.call_reader import Part, new_call_id
from volley.serve.values import Strings

_ARGUMENTS = ("arguments", "parameters")
_KEYS = {"name", "type", "id", *_ARGUMENTS}
_FENCE = "```"
_MOST_REFERENCES = 10_000
_PATTERN_SECONDS = 0.1


class BareCalls:
    """Buffer that holds an answer back while it may be such an object, alone or in one JSON code fence."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Create a buffer. ``tools`` are the tools that may be called, in OpenAI's form."""
        functions = (tool["function"] for tool in tools)
        self._schemas = {function["name"]: function.get("parameters") or {} for function in functions}
        names = "|".join(regex.escape(json.dumps(name)) for name in self._schemas)
        first = rf'"name"\s*:\s*(?:{names})|"(?:{"|".join(_ARGUMENTS)})"\s*:'
        kind = r'(?:"type"\s*:\s*"function"\s*,\s*)?'
        self._head = regex.compile(rf"\s*({_FENCE}(?:json)?\s*)?(?=\{{\s*{kind}(?:{first}))")
        self._text = ""
        self._is_text = False  # the answer is certainly no such object
        self._strings: Strings | None = None  # strings of the object, once it has begun

    def feed(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts that need not be held back."""
        told: list[Part] = []
        for part in parts:
            if self._is_text or part.kind == "reasoning":
                told.append(part)
            elif part.kind == "content":
                self._text += part.text
                if not self._may_be_a_call():
                    told += self.release()
            else:
                told += [*self.release(), part]
        return told

    def finish(self, index: int) -> list[Part]:
        """Return what was held back: the call with index ``index``, or the text."""
        found = None if self._is_text else self._call()
        if found is None:
            return self.release()
        return [Part("call", found[0], index, new_call_id()), Part("arguments", found[1], index)]

    def release(self) -> list[Part]:
        """Return what was held back as text, and hold nothing back from now on."""
        self._is_text, text, self._text = True, self._text, ""
        return [Part("content", text)] if text else []

    def _may_be_a_call(self) -> bool:
        if self._strings is None:
            found = self._head.match(self._text, partial=True)
            if found is None or found.partial:
                return found is not None
            self._strings = Strings()
            self._strings.begin(found.end())
        if self._strings.hold(self._text, len(self._text)) or self._strings.depth:
            return True
        return self._object() is not None

    def _object(self) -> tuple[Any, bool] | None:
        """Return the complete object and whether the answer may end here, or ``None`` if other text surrounds it."""
        head = self._head.match(self._text)
        if head is None:
            return None
        try:
            value, end = json.JSONDecoder(strict=False, parse_constant=refuse_word).raw_decode(self._text, head.end())
        except (ValueError, RecursionError):
            return None
        rest, fence = self._text[end:].strip(), _FENCE if head[1] else ""
        return (value, rest == fence) if fence.startswith(rest) else None

    def _call(self) -> tuple[str, str] | None:
        """Return the tool's name and the arguments as JSON if the answer is such an object."""
        match self._object():
            case ({"name": str(name), **fields} as whole, True) if name in self._schemas and whole.keys() <= _KEYS:
                given = [fields[key] for key in _ARGUMENTS if key in fields]
            case _:
                return None
        if len(given) != 1 or fields.get("type", "function") != "function":
            return None
        try:
            arguments = json.loads(given[0], parse_constant=refuse_word) if isinstance(given[0], str) else given[0]
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            text.encode()
        except (ValueError, RecursionError):
            return None
        is_call = isinstance(arguments, dict) and is_valid(arguments, self._schemas[name])
        return (name, text) if is_call else None


def is_valid(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a value is valid under a schema, as far as bounded time without network access can tell."""
    references = 0

    def refer(validator: Any, reference: Any, instance: Any, own: Any) -> Iterator[ValidationError]:
        nonlocal references
        references += 1
        if references > _MOST_REFERENCES:
            raise RecursionError("too many references")
        yield from Draft202012Validator.VALIDATORS["$ref"](validator, reference, instance, own) or ()

    def match(validator: Any, pattern: str, instance: Any, own: Any) -> Iterator[ValidationError]:
        is_text = isinstance(instance, str)
        if is_text and not regex.search(pattern, instance, timeout=_PATTERN_SECONDS):
            yield ValidationError(f"{instance!r} does not match {pattern!r}")

    if "patternProperties" in json.dumps(schema):  # jsonschema's time for these patterns is unbounded
        return False
    try:
        checked = extend(Draft202012Validator, {"$ref": refer, "pattern": match})
        return bool(checked(schema, registry=Registry()).is_valid(value))
    except Exception:  # a client's schema may raise anything
        return False
