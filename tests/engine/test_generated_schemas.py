"""Answers to generated schemas are valid, greedy and sampled, alone and together; a wrong one would be seen."""

import json
import random
import re
from collections import Counter
from datetime import date
from typing import Any

import jsonschema
import pytest
import torch

from tests.costs import settle
from volley import Engine, Grammar, SamplingParams
from volley.decode.grammars import Grammars
from volley.results import GenerationResult, GenerationStats

WORDS = (
    "name",
    "kind",
    "tags",
    "size",
    "unit threshold",
    "löschen",
    "items",
    "note",
    "isOpen",
    "id",
    "path",
    "date_of_birth",
)
FORMATS = ("date", "time", "uuid", "ipv4", "email")
RFC_TIME = re.compile(
    r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(z|[+-]([01]\d|2[0-3]):[0-5]\d)", re.ASCII | re.IGNORECASE
)


def make_schema(seed: int) -> dict[str, Any]:
    """An object with random properties; the same for the same seed."""
    chance = random.Random(seed)
    schema = an_object(chance, 3)
    if chance.random() < 0.2:
        schema["$defs"] = {"shared": an_object(chance, 1), "list": {"type": ["object", "null"], **linked()}}
        schema["properties"]["shared"] = {"$ref": "#/$defs/shared"}
        schema["properties"]["chain"] = {"$ref": "#/$defs/list"}
    return schema


def linked() -> dict[str, Any]:
    properties = {"value": {"enum": [1, 2, 3]}, "next": {"$ref": "#/$defs/list"}}
    return {"properties": properties, "required": ["value", "next"], "additionalProperties": False}


def an_object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(WORDS, chance.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: a_value(chance, depth - 1) for name in names},
        "required": [name for name in names if chance.random() < 0.7],
        "additionalProperties": False,
    }


def a_value(chance: random.Random, depth: int) -> dict[str, Any]:
    low, few = chance.randint(-50, 50), chance.randint(0, 2)
    leaves: list[dict[str, Any]] = [
        {"type": "string", "maxLength": chance.randint(0, 20)},
        {"type": "string", "minLength": few, "maxLength": 12},
        {"type": "string", "pattern": chance.choice(["^[A-Z]{2}-[0-9]{3}$", "^(yes|no|maybe)$", "^#[0-9a-f]{6}$"])},
        {"type": "string", "format": chance.choice(FORMATS)},
        {"enum": chance.sample(["red", "green", 'a "quoted" one', 7, None, True, [1, "x"], {"k": 2}], 3)},
        {"const": chance.choice(["fixed", 12, {"a": [1, 2]}])},
        {"type": "integer", "minimum": low, "maximum": low + chance.choice([0, 5, 10**6])},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 100},
        {"type": chance.choice(["boolean", "null", "integer"])},
        {"type": ["string", "null"], "maxLength": 5},
    ]
    if depth <= 0 or chance.random() < 0.5:
        return chance.choice(leaves)
    deeper: list[dict[str, Any]] = [
        an_object(chance, depth),
        {"type": "array", "items": a_value(chance, depth - 1), "minItems": few, "maxItems": few + chance.randint(0, 2)},
        {"type": "array", "prefixItems": [a_value(chance, 0), a_value(chance, 0)], "items": False, "minItems": 2},
        {"anyOf": [a_value(chance, depth - 1), {"type": "boolean"}]},
    ]
    return chance.choice(deeper)


def checker() -> jsonschema.FormatChecker:
    """Formats as the package checks them, but for two of RFC 3339.

    It has a year 0000, a leap year, which Python's dates lack, and its times have an offset; the package knows times of draft 3.
    """
    formats = jsonschema.FormatChecker(FORMATS)

    @formats.checks("date", ValueError)
    def is_date(value: object) -> bool:
        return not isinstance(value, str) or bool(date.fromisoformat(re.sub("^0000", "2000", value)))

    @formats.checks("time")
    def is_time(value: object) -> bool:
        return not isinstance(value, str) or RFC_TIME.fullmatch(value) is not None

    return formats


def problem_of(result: GenerationResult, schema: dict[str, Any], grammars: Grammars) -> str | None:
    """Return the fault of an answer, or ``None``."""
    if result.finish_reason == "length":
        rule = grammars.rule(Grammar.json_schema(schema))
        return None if rule.num_allowed(result.token_ids) == len(result.token_ids) else "cut, and not allowed so far"
    try:
        jsonschema.validate(json.loads(result.text), schema, format_checker=checker())
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def ask(schema: dict[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Answer with JSON for this schema: {json.dumps(schema)[:400]}"}]


def params_for(index: int, schema: dict[str, Any], max_tokens: int) -> SamplingParams:
    """A third greedy, a third sampled, a third sampled with a seed."""
    kind: dict[str, Any] = ({}, {"temperature": 1.0}, {"temperature": 0.8, "seed": index, "top_p": 0.95})[index % 3]
    return SamplingParams(grammar=Grammar.json_schema(schema), max_tokens=max_tokens, **kind)


def check_valid(
    engine: Engine, schemas: dict[int, dict[str, Any]], max_tokens: int
) -> tuple[Counter[str], list[str], list[int]]:
    """How many answers ended how, what was wrong with any, and tokens and cycles; as many run at once as the engine holds.

    The number of a schema decides whether its answer is sampled.
    """
    ended, problems, taken = Counter[str](), list[str](), list[int]()
    each = [params_for(number, schema, max_tokens) for number, schema in schemas.items()]
    for schema, result in zip(schemas.values(), engine.generate(map(ask, schemas.values()), each), strict=True):
        ended[result.finish_reason] += 1
        taken += result.stats.accepted_lengths
        if (problem := problem_of(result, schema, engine.grammars)) is not None:
            problems.append(f"{problem}\n{json.dumps(schema)}\n{result.text}")
    engine.check_integrity()
    return ended, problems, [sum(taken), len(taken)]


def test_schemas_are_schemas_and_come_again() -> None:
    schemas = [make_schema(seed) for seed in range(200)]
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
    assert schemas == [make_schema(seed) for seed in range(200)]
    assert len({json.dumps(schema) for schema in schemas}) > 190


@pytest.mark.parametrize("concurrency", [1, 8])
def test_the_bundled_pairs_answers_are_valid(concurrency: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch, token=0.01)
    engine = Engine.from_pretrained(dtype=torch.float32, max_running=concurrency)
    schemas = {seed: make_schema(seed) for seed in range(100 * concurrency, 100 * concurrency + 8)}
    ended, problems, (tokens, cycles) = check_valid(engine, schemas, 80)
    assert problems == []
    assert ended["stop"] > 2
    assert tokens > 1.5 * cycles


def test_a_wrong_answer_would_be_seen() -> None:
    engine = Engine.from_pretrained(drafter=None)
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}, "required": ["a"]}

    def problem(text: str, ended: str) -> str | None:
        tokens = engine.encode(text)
        found: str | None = problem_of(
            GenerationResult(text, tokens, ended, GenerationStats()),  # type: ignore[arg-type]
            schema,
            engine.grammars,
        )
        return found

    assert problem('{"a": "2024-02-29"}', "stop") is None
    assert problem('{"a": "2024-02', "length") is None
    for text, ended in (('{"a": "2024-02', "stop"), ('{"a": "x"}', "stop"), ("{}", "stop"), ('{"a": 1', "length")):
        assert problem(text, ended) is not None
