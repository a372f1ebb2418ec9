"""JSON schemas as programs emit them: pydantic's, msgspec's, zod's and schemars' are accepted, and random answers are valid.

The files in ``schemas/`` hold what these programs emit for models of their documentations' constructs; schemars' are written by
its documentation.
"""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from transformers import AutoTokenizer

from tests.conftest import byte_tokenizer
from tests.decode.test_grammars import tokens_in
from volley import Grammar
from volley.decode.grammars import Grammars
from volley.decode.schemas import enforceable
from volley.errors import ConfigError
from volley.files import REFERENCE

EMITTED: dict[str, dict[str, Any]] = {
    name: schema
    for file in sorted((Path(__file__).parent / "schemas").glob("*.json"))
    for name, schema in json.loads(file.read_text()).items()
}
STRING = {"type": "string"}
_OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "boolean"}}}
VACUOUS: dict[str, dict[str, Any]] = {
    "uniqueItems false": {"type": "array", "items": STRING, "uniqueItems": False},
    "uniqueItems of at most one": {"type": "array", "maxItems": 1, "uniqueItems": True},
    "uniqueItems of a string": {**STRING, "uniqueItems": True},
    "names are strings": {"type": "object", "propertyNames": STRING},
    "names are strings or null": {"type": "object", "propertyNames": {"type": ["null", "string"], "title": "x"}},
    "names with a format": {"type": "object", "propertyNames": {"format": "uuid"}},
    "names of any length": {"type": "object", "propertyNames": {**STRING, "minLength": 0}},
    "propertyNames true": {"type": "object", "propertyNames": True},
    "propertyNames of a number": {"type": "number", "propertyNames": {"pattern": "a"}},
    "contains at least none": {"type": "array", "contains": STRING, "minContains": 0},
    "minContains without contains": {"type": "array", "minContains": 2, "maxContains": 3},
    "not false": {**STRING, "not": False},
    "if alone": {**STRING, "if": {"minLength": 3}},
    "then alone": {**STRING, "then": {"minLength": 3}, "else": False},
    "if with empty branches": {**STRING, "if": {"minLength": 3}, "then": True, "else": {"description": "x"}},
    "dependentRequired of nothing": {**_OBJECT, "dependentRequired": {"a": []}},
    "dependentSchemas of nothing": {**_OBJECT, "dependentSchemas": {"a": True}},
    "dependencies of nothing": {**_OBJECT, "dependencies": {"a": [], "b": {}}},
    "unevaluatedProperties true": {**_OBJECT, "unevaluatedProperties": True},
    "unevaluatedItems of anything": {"type": "array", "unevaluatedItems": {"title": "x"}},
    "$dynamicAnchor": {**STRING, "$dynamicAnchor": "m", "$recursiveAnchor": True},
    "a dialect of another's": {**STRING, "$schema": "https://spec.openapis.org/oas/3.1/dialect/base"},
    "unknown keywords": {
        **STRING,
        "x-order": 1,
        "nullable": True,
        "example": {"uniqueItems": True},
        "enumNames": ["a"],
    },
    "of a referenced part": {
        "$ref": "#/components/schemas/A",
        "components": {"schemas": {"A": {**STRING, "format": "byte"}}},
    },
    **{
        f"format {name}": {**STRING, "format": name}
        for name in (
            "binary",
            "byte",
            "path",
            "password",
            "int32",
            "json-string",
            "uri-reference",
            "regex",
            "idn-email",
            "?",
        )
    },
}
CONSTRAINING: dict[str, dict[str, Any]] = {
    "uniqueItems": {"type": "array", "items": STRING, "uniqueItems": True},
    "contains": {"type": "array", "contains": STRING},
    "not": {"not": {"type": "number"}},
    "then": {**_OBJECT, "if": {"required": ["a"]}, "then": {"minProperties": 2}},
    "else": {**_OBJECT, "if": {"required": ["a"]}, "else": {"minProperties": 2}},
    "dependentRequired": {**_OBJECT, "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {**_OBJECT, "dependentSchemas": {"a": {"minProperties": 2}}},
    "dependencies": {**_OBJECT, "dependencies": {"a": ["b"]}},
    "propertyNames": {**_OBJECT, "propertyNames": {"pattern": "^x"}},
    "unevaluatedProperties": {"allOf": [_OBJECT], "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "prefixItems": [STRING], "unevaluatedItems": False},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "$dynamicRef": {"$dynamicRef": "#m"},
    "look-": {**STRING, "pattern": "^(?!a).*$"},
}
REWRITTEN: dict[str, dict[str, Any]] = {
    "names of a list": {
        "type": "object",
        "propertyNames": {"enum": ["a", "b"]},
        "additionalProperties": {"type": "boolean"},
    },
    "names by a reference": {
        "type": "object",
        "propertyNames": {"$ref": "#/$defs/N"},
        "additionalProperties": {"type": "null"},
        "$defs": {"N": {**STRING, "const": "n"}},
    },
    "names of a pattern": {
        "type": "object",
        "propertyNames": {"pattern": "^x[ab]{1,3}$"},
        "additionalProperties": {"type": "null"},
    },
    "names of a length": {
        "type": "object",
        "propertyNames": {"minLength": 1, "maxLength": 2},
        "additionalProperties": {"const": 1},
    },
    "closed": {**_OBJECT, "unevaluatedProperties": False},
    "impossible choices": {"anyOf": [{"not": {}}, False, {"type": "boolean"}]},
    "impossible properties": {"type": "object", "properties": {"a": {"not": {}}, "b": {"const": 1}}},
    "large bounds": {"type": "number", "minimum": 0, "exclusiveMaximum": 3.4e38},
    "look-ahead": {**STRING, "pattern": r"^(?=.{2,4}$)(?=[^)\]]*b)[abc]+$"},
    "disjoint by a referenced tag": {
        "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        "$defs": {
            name: {
                "type": "object",
                "properties": {"k": {"const": name}},
                "required": ["k"],
                "additionalProperties": False,
            }
            for name in "AB"
        },
    },
    "disjoint by a tag with defaults": {
        "discriminator": {"propertyName": "k"},
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": name, "default": name}}, "additionalProperties": False}
            for name in "AB"
        ],
    },
    "disjoint by what is required": {
        "oneOf": [{"type": "object", "properties": {name: {"const": 1}}, "required": [name]} for name in "AB"]
    },
    "disjoint by values": {"oneOf": [{"enum": [1, "a"]}, {"enum": [True, "b"]}, {"type": "null"}]},
}


@cache
def bundled() -> tuple[Any, set[int]]:
    """The bundled tokenizer, and its tokens that close something."""
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE / "target")
    return tokenizer, {token for token in range(8192) if set(tokenizer.decode([token])) & set('"}]')}


@cache
def grammars() -> Grammars:
    return Grammars(bundled()[0], 8192, [2])


def random_answer(schema: dict[str, Any], seed: int, most: int = 150) -> str | None:
    """A text that the grammar of ``schema`` allows, written at random; ``None`` if it does not end in time."""
    own = grammars()
    rule, chance = own.rule(Grammar.json_schema(schema, whitespace="")), random.Random(seed)
    tokenizer, closing = bundled()
    written = list[int]()
    for _ in range(most):
        if rule.is_complete or (mask := rule.mask([])) is None:
            return str(tokenizer.decode(written))
        allowed = tokens_in(mask)
        if 2 in allowed and chance.random() < 0.7:
            return str(tokenizer.decode(written))
        ends = list(closing & set(allowed))
        among = ends if ends and chance.random() < 0.6 else [token for token in allowed if token != 2]
        written.append(chance.choice(among))
        rule.take(written[-1])
    return None


def check_answers(schema: dict[str, Any], count: int = 4) -> int:
    """The number of complete answers among ``count``; all of them are valid by the jsonschema package."""
    answers = [answer for seed in range(count) if (answer := random_answer(schema, seed)) is not None]
    for answer in answers:
        validate(json.loads(answer), schema)
    return len(answers)


def validate(answer: Any, schema: dict[str, Any]) -> None:
    """Raise an error if an answer is not valid by a package that knows nothing of grammars."""
    given, text = dict(schema), json.dumps(schema)
    if "json-schema.org" not in str(given.get("$schema")):
        given.pop("$schema", None)
    is_old = '"exclusiveMinimum": true' in text or '"exclusiveMaximum": true' in text  # as OpenAPI 3.0 has it
    if r"\\p{" in text:  # which Python's expressions do not know
        pytest.importorskip("jsonschema_rs").validator_for(given).validate(answer)
    elif is_old:
        jsonschema.Draft4Validator(given).validate(answer)
    else:
        jsonschema.validators.validator_for(given, default=jsonschema.Draft202012Validator)(given).validate(answer)


@pytest.mark.parametrize("name", EMITTED)
def test_schemas_that_programs_emit_are_enforced(name: str) -> None:
    check_answers(EMITTED[name])


def test_most_random_answers_were_complete() -> None:
    assert sum(check_answers(schema, 1) for schema in EMITTED.values()) > len(EMITTED) / 2


@pytest.mark.parametrize("name", VACUOUS)
def test_what_constrains_nothing_is_accepted(name: str) -> None:
    schema = VACUOUS[name]
    assert grammars().compile(Grammar.json_schema(schema))
    check_answers(schema)


@pytest.mark.parametrize("name", CONSTRAINING)
def test_what_constrains_and_cannot_be_enforced_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"the JSON schema cannot be used, at .*{name.replace('$', '.')}"):
        grammars().compile(Grammar.json_schema(CONSTRAINING[name]))


@pytest.mark.parametrize("name", REWRITTEN)
def test_what_can_be_said_in_other_words_is_enforced(name: str) -> None:
    assert check_answers(REWRITTEN[name], 12) > 0


def test_a_value_under_const_or_enum_is_no_schema() -> None:
    value = {"uniqueItems": False, "format": "byte", "propertyNames": True}
    schema = {"enum": [value], "default": value, "examples": [value], "properties": {"format": {"const": value}}}
    assert enforceable(schema) == schema
    assert json.loads(random_answer({"const": value}, 0) or "") == value


def test_a_number_is_refused_where_names_or_values_differ() -> None:
    rule = Grammars(byte_tokenizer(), 260, [2]).rule(
        Grammar.json_schema({"type": "object", "propertyNames": {"enum": ["ab"]}, "additionalProperties": {"const": 1}})
    )
    tokenizer = byte_tokenizer()
    assert rule.num_allowed(tokenizer.encode('{"ab": 1}')) == 9
    assert rule.num_allowed(tokenizer.encode('{"ac": 1}')) == 3
    assert rule.num_allowed(tokenizer.encode('{"ab": 2}')) == 7
