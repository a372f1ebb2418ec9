"""The short form of ``benchmarks/grammars.py``."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from benchmarks import grammars
from tests.costs import settle
from volley import Engine
from volley.types import GenerationResult, GenerationStats


def test_schemas_are_schemas_and_come_again() -> None:
    schemas = [grammars.make_schema(seed) for seed in range(200)]
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
    assert schemas == [grammars.make_schema(seed) for seed in range(200)]
    assert len({json.dumps(schema) for schema in schemas}) > 190


@pytest.mark.parametrize("concurrency", [1, 8])
def test_the_bundled_pairs_answers_are_valid(concurrency: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch, token=0.01)
    engine = Engine.from_pretrained(dtype=torch.float32, max_running=concurrency)
    schemas = {seed: grammars.make_schema(seed) for seed in range(100 * concurrency, 100 * concurrency + 8)}
    ended, problems, (tokens, cycles) = grammars.check_valid(engine, schemas, 80)
    assert problems == []
    assert ended["stop"] > 2
    assert tokens > 1.5 * cycles


def test_what_was_checked_is_not_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def check(engine: Engine, schemas: dict[int, Any], max_tokens: int) -> tuple[Counter[str], list[str], list[int]]:
        asked.extend(schemas)
        return Counter(stop=len(schemas)), ["wrong"] if 3 in schemas else [], [2 * len(schemas), len(schemas)]

    monkeypatch.setattr(grammars, "check_valid", check)
    monkeypatch.setattr(grammars, "load", lambda options, **more: None)
    command = ["grammars.py", "valid", "--concurrency", "1,2", "--out", str(tmp_path)]

    def run(schemas: int, *more: str) -> int:
        asked.clear()
        monkeypatch.setattr(sys, "argv", [*command, "--schemas", str(schemas), *more])
        options = grammars.arguments()
        return int(options.run(options))

    assert run(4) == 1, "an answer was wrong"
    assert asked == [0, 1, 2, 3] * 2
    assert run(6) == 1, "and still is"
    assert asked == [4, 5] * 2
    assert "| 2 | default | 6 | 6 | 0 | 1 | 2.00 |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="another max_tokens"):
        run(6, "--max-tokens", "7")


def test_a_wrong_answer_would_be_seen() -> None:
    engine = Engine.from_pretrained(drafter=None)
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}, "required": ["a"]}

    def problem(text: str, ended: str) -> str | None:
        tokens = engine.encode(text)
        found: str | None = grammars.problem_of(
            GenerationResult(text, tokens, ended, GenerationStats()),  # type: ignore[arg-type]
            schema,
            engine.grammars,
        )
        return found

    assert problem('{"a": "2024-02-29"}', "stop") is None
    assert problem('{"a": "2024-02', "length") is None
    for text, ended in (('{"a": "2024-02', "stop"), ('{"a": "x"}', "stop"), ("{}", "stop"), ('{"a": 1', "length")):
        assert problem(text, ended) is not None
