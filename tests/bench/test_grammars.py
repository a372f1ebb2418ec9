"""The short form of ``benchmarks/grammars.py``."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import jsonschema
import pytest
import torch

from tests.costs import settle
from volley import Engine
from volley.types import GenerationResult, GenerationStats

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "grammars.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grammars_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["grammars_benchmark"] = module
    spec.loader.exec_module(module)
    return module


def test_schemas_are_schemas_and_come_again(script: ModuleType) -> None:
    schemas = [script.make_schema(seed) for seed in range(200)]
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
    assert schemas == [script.make_schema(seed) for seed in range(200)]
    assert len({json.dumps(schema) for schema in schemas}) > 190


@pytest.mark.parametrize("concurrency", [1, 8])
def test_the_bundled_pairs_answers_are_valid(
    script: ModuleType, concurrency: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch, token=0.01)
    engine = Engine.from_pretrained(dtype=torch.float32, max_running=concurrency)
    schemas = [script.make_schema(seed) for seed in range(100 * concurrency, 100 * concurrency + 8)]
    ended, problems, tau = script.check_valid(engine, schemas, 80)
    assert problems == []
    assert ended["stop"] > 2
    assert tau > 1.5


def test_a_wrong_answer_would_be_seen(script: ModuleType) -> None:
    engine = Engine.from_pretrained(drafter=None)
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}, "required": ["a"]}

    def problem(text: str, ended: str) -> str | None:
        tokens = engine.encode(text)
        found: str | None = script.problem_of(
            GenerationResult(text, tokens, ended, GenerationStats()),  # type: ignore[arg-type]
            schema,
            engine.grammars,
        )
        return found

    assert problem('{"a": "2024-02-29"}', "stop") is None
    assert problem('{"a": "2024-02', "length") is None
    for text, ended in (('{"a": "2024-02', "stop"), ('{"a": "x"}', "stop"), ("{}", "stop"), ('{"a": 1', "length")):
        assert problem(text, ended) is not None
