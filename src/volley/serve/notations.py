"""Grammars of tool-call arguments in the model's notation: JSON, strings between tags, or JSON with bare keys."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from volley.decode.schemas import enforceable
from volley.errors import ConfigError
from volley.grammar import WHITESPACE
from volley.serve.arguments import resolved, types_of
from volley.serve.formats import CallText, ParameterText

_NOTES = {
    "$defs",
    "$id",
    "$schema",
    "default",
    "definitions",
    "deprecated",
    "description",
    "examples",
    "nullable",
    "title",
}
_SHAPES = {"$ref", "allOf", "anyOf", "const", "enum", "oneOf", "type"}
_LIMITS = {"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"}
_KEYWORDS = {
    "integer": _LIMITS,
    "number": _LIMITS,
    "string": {"minLength", "maxLength", "pattern"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
_SAYS_WHAT = {"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"}
_SCALARS = ("boolean", "integer", "null", "number")
_SCALAR = {"type": list(_SCALARS)}

Schema = Mapping[str, Any]
Literal = Callable[[str], str]
"""Function that returns a text as a Lark expression."""


def in_json(schema: Schema, whitespace: str = WHITESPACE) -> str:
    """Return a Lark expression for JSON under a schema. It allows the spaces that templates write: models answer worse without
    them."""
    spaces = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    return "%json " + json.dumps({**enforceable(dict(schema)), "x-guidance": spaces})


def arguments_in_lark(name: str, schema: Schema, call: CallText, literal: Literal) -> list[str]:
    """Return rules by which ``name`` (lower case) matches a call's arguments under ``schema``.

    Raises :class:`ConfigError` if the notation of the call cannot express the schema.
    """
    if call.is_json:  # arguments are an object, whether or not the schema says so
        return [f"{name}: {in_json(schema if schema.keys() & _SAYS_WHAT else {'type': 'object', **schema})}"]
    try:
        if call.parameter is not None:
            return _Tagged(name, schema, literal, call.parameter).arguments()
        assert call.quote is not None, "there is no other notation"
        return _Quoted(name, schema, literal, call.quote).arguments()
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the schema of a tool's parameters cannot be read ({error!r}); see json-schema.org"
        ) from None


def any_arguments_in_lark(name: str, call: CallText, literal: Literal) -> list[str]:
    """Return rules by which ``name`` matches any arguments."""
    rules = _Rules(name, {}, literal)
    if call.parameter is not None:
        tags = call.parameter
        key, value = rules.add(r"/[^<>\n]+/", is_terminal=True), rules.closed({}, tags.end)
        return [f"{name}: ({literal(tags.begin)} {key} {literal(tags.middle)} {value})*", *rules.rules]
    if call.quote is not None:
        key = rules.add(r'/[^:,{}\[\]"<\s][^:,{}\[\]"<]*/', is_terminal=True)
        value, pair = f"{name}_value", f"{name}_pair"
        return [
            f'{name}: "{{" ({pair} ("," {pair})*)? "}}"',
            f'{pair}: {key} ":" {value}',
            f'{value}: {name} | "[" ({value} ("," {value})*)? "]" | {rules.quoted({}, call.quote)} | {in_json(_SCALAR)}',
            *rules.rules,
        ]
    return [f"{name}: {in_json({'type': 'object'})}"]


def _unknown(keywords: set[str]) -> ConfigError:
    return ConfigError(
        f"the model's notation of calls cannot be constrained by {sorted(keywords)[0]!r}; leave that keyword out of the schema, "
        "leave out strict, or force the call with tool_choice"
    )


class _Rules:
    """Grammar rules of one schema."""

    def __init__(self, name: str, schema: Schema, literal: Literal) -> None:
        self.name, self.root, self.literal = name, schema, literal
        self.rules: list[str] = []
        self._count = 0

    def add(self, body: str, *, is_terminal: bool = False) -> str:
        """Add a rule and return its name."""
        self._count += 1
        name = f"{self.name}_{self._count}"
        self.rules.append(f"{name.upper() if is_terminal else name}: {body}")
        return name.upper() if is_terminal else name

    def closed(self, schema: Schema, end: str) -> str:
        """Return an expression for a string under ``schema`` and the ``end`` that closes it, which the string cannot contain."""
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        body = f"/(?s:.{{{low},{high}}})/" if low or high != "" else "/(?s:.*)/"
        if (pattern := schema.get("pattern")) is not None:
            body += f" & /{_anywhere(pattern)}/"
        mark = _quoted(end.strip())
        is_bounded = low or high != "" or pattern is not None  # which leaves a lexer no room for more
        before = (
            r"(?:|(?s:.*)\n)" if end.startswith("\n") and not is_bounded else "(?s:.*)"
        )  # such an end has a line of its own
        body = f"({body} & ~/{before}{mark}(?s:.*)/)"
        ways = [self.add(f"{body} {json.dumps(end)}", is_terminal=True)]
        if (literal := self.literal(end)) != json.dumps(end):  # a special token, which no terminal can contain
            ways.append(f"{self.add(body, is_terminal=True)} {literal}")
            if not schema.get("minLength") and "pattern" not in schema:
                ways.append(literal)
        return f"({' | '.join(ways)})"

    def quoted(self, schema: Schema, quote: str) -> str:
        """Return an expression for a quoted string under ``schema``."""
        return f"{self.literal(quote)} {self.closed(schema, quote)}"

    def _members(self, members: Sequence[tuple[str, bool]], between: str) -> str:
        """Return the rule for an object's members in order, each with whether it is required."""
        first = later = '""'
        for body, is_required in reversed(members):
            mark = "" if is_required else f" | {first}"
            ahead = f"{body} {later}{mark}"
            mark = "" if is_required else f" | {later}"
            behind = f"{between} {body} {later}{mark}"
            first, later = self.add(ahead), self.add(behind)
        return first

    def _properties(self, schema: Schema) -> list[tuple[str, Schema, bool]]:
        """Return the name and schema of each property, and whether it is required."""
        if isinstance(schema.get("additionalProperties"), Mapping):
            raise _unknown({"additionalProperties"})
        required = schema.get("required", [])
        properties = schema.get("properties", {})
        if missing := [name for name in required if name not in properties]:
            raise ConfigError(f"required names {missing[0]!r}, which is no property; add it to properties")
        return [(name, own, name in required) for name, own in properties.items()]

    def _own_object(self) -> Schema:
        schema = resolved(self.root, self.root)
        self._allow(schema, "object")
        if unknown := set(schema) & (_SHAPES - {"type", "$ref"}):
            raise _unknown(unknown)
        return schema

    def _allow(self, schema: Schema, *types: str) -> None:
        known = _NOTES | _SHAPES | {keyword for one in types for keyword in _KEYWORDS.get(one, set())}
        if unknown := set(schema) - known:
            raise _unknown(unknown)


class _Tagged(_Rules):
    """Rules for tagged arguments in the order of the schema. Values that are not strings are JSON."""

    def __init__(self, name: str, schema: Schema, literal: Literal, tags: ParameterText) -> None:
        super().__init__(name, schema, literal)
        self.tags = tags

    def arguments(self) -> list[str]:
        parts = []
        for name, own, is_required in self._properties(self._own_object()):
            part = self.add(f"{self.literal(self.tags.begin + name + self.tags.middle)} {self._value(own)}")
            parts.append(part if is_required else f"{part}?")
        body = " ".join(parts) or '""'
        return [*self.rules, f"{self.name}: {body}"]

    def _value(self, schema: Schema) -> str:
        """Return an expression for a value and the text that closes it."""
        own, end = resolved(schema, self.root), self.literal(self.tags.end)
        types = types_of(own, self.root)
        if "string" not in types and types:
            defs = {key: self.root[key] for key in ("$defs", "definitions") if key in self.root}
            return f"{in_json({**defs, **own})} {end}"
        if types - {"string", "null"}:
            raise ConfigError(
                "a text that may also be a number or a structure cannot be bound in the model's notation of calls"
            )
        text = self._string(own)
        return f"({text} | {self.literal('null' + self.tags.end)})" if "null" in types else text

    def _string(self, schema: Schema) -> str:
        chosen = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if chosen is not None:
            texts = [self.literal(text + self.tags.end) for text in chosen if isinstance(text, str)]
            return f"({' | '.join(texts)})"
        if set(schema) & {"allOf", "anyOf", "oneOf"}:
            parts = [resolved(part, self.root) for key in ("anyOf", "oneOf") for part in schema.get(key, [])]
            if "allOf" in schema or not parts:
                raise _unknown({"allOf"})
            return f"({' | '.join(self._string(part) for part in parts if types_of(part, self.root) != {'null'})})"
        self._allow(schema, "string")
        return self.closed(schema, self.tags.end)


class _Quoted(_Rules):
    """Rules for JSON with bare keys and its own quotes."""

    def __init__(self, name: str, schema: Schema, literal: Literal, quote: str) -> None:
        super().__init__(name, schema, literal)
        self.quote = quote
        self._of_references: dict[str, str] = {}

    def arguments(self) -> list[str]:
        return [f"{self.name}: {self._object(self._own_object())}", *self.rules]

    def _value(self, schema: Any) -> str:
        if isinstance(reference := schema.get("$ref"), str):
            if more := set(schema) - _NOTES - {"$ref"}:
                raise _unknown(more)
            return self._referred(reference)
        if "allOf" in schema:
            raise _unknown({"allOf"})
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            return f"({' | '.join(self.literal(self._spelt(value)) for value in values)})"
        for key in ("anyOf", "oneOf"):
            if key in schema:
                if more := set(schema) - _NOTES - {key}:
                    raise _unknown(more)
                return f"({' | '.join(map(self._value, schema[key]))})"
        types = sorted(types_of(schema, self.root)) or ["array", *_SCALARS, "object", "string"]
        scalars = [one for one in types if one in _SCALARS]
        self._allow(schema, *types)
        makers = {"string": self._string, "array": self._array, "object": self._object}
        parts = [maker(schema) for one, maker in makers.items() if one in types]
        if scalars:
            limits = {key: own for key, own in schema.items() if key in _LIMITS}
            parts.append(in_json({**limits, "type": scalars}))
        return f"({' | '.join(parts)})"

    def _referred(self, reference: str) -> str:
        if reference not in self._of_references:
            self._count += 1
            self._of_references[reference] = name = f"{self.name}_{self._count}"
            self.rules.append(f"{name}: {self._value(resolved({'$ref': reference}, self.root))}")
        return self._of_references[reference]

    def _spelt(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{key}:{self._spelt(own)}" for key, own in value.items()) + "}"
        return "[" + ",".join(map(self._spelt, value)) + "]" if isinstance(value, list) else json.dumps(value)

    def _string(self, schema: Schema) -> str:
        return f"({self.quoted(schema, self.quote)})"

    def _array(self, schema: Schema) -> str:
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        item = self.add(self._value(schema.get("items", {"type": [*_SCALARS, "string"]})))
        if high == 0:
            return '"[" "]"'
        more = f'("," {item}){{{max(low - 1, 0)},{"" if high is None else high - 1}}}'
        return f'("[" {item} {more} "]"' + (' | "[" "]")' if low == 0 else ")")

    def _object(self, schema: Schema) -> str:
        members = [
            (self.add(f"{self.literal(name + ':')} {self._value(own)}"), is_required)
            for name, own, is_required in self._properties(schema)
        ]
        return f'"{{" {self._members(members, self.literal(","))} "}}"'


def _quoted(text: str) -> str:
    """Return a text as a regular expression between slashes."""
    return "".join(character if character.isalnum() else f"\\x{ord(character):02x}" for character in text)


def _anywhere(pattern: str) -> str:
    """Return an expression for strings that contain a match of a schema's ``pattern``. Each alternative keeps its own anchors."""
    alternatives, depth = [""], 0
    for piece in re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and depth == 0:
            alternatives.append("")
        else:
            alternatives[-1] += piece
    return "|".join(map(_around, alternatives))


def _around(pattern: str) -> str:
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    inside = pattern[begins : len(pattern) - ends]
    inside = re.sub(r"\\.|[/\n]", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), inside)
    return f"{'' if begins else '(?s:.*)'}({inside}){'' if ends else '(?s:.*)'}"
