"""A whole benchmark on an engine."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conftest import TinyPair
from volley import Engine
from volley.bench.run import run_bench
from volley.bench.tasks import BenchConfig
from volley.errors import ConfigError
from volley.models.targets.diffusion import JOINT
from volley.models.targets.target import Target


def test_an_engine_decodes_by_its_own_settings_again_afterwards(tiny_pair: TinyPair, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "Hello"}\n')
    engine = Engine.from_pretrained(
        tiny_pair.target, tiny_pair.drafter, dtype=torch.float32, policy="feedback", kv_dtype="int8", draft_window=32
    )
    before = engine.config
    config = BenchConfig(datasets=(str(file),), repeats=1, max_tokens=8, policies=("goodput",), tree_nodes=(0, 4))
    report = run_bench(engine, config, {"path": str(tiny_pair.target)})
    assert [summary.case.label for summary in report.summaries] == ["plain", "goodput", "B=6", "B=6 N=4"]
    assert all(summary.identical == 1 for summary in report.summaries)
    assert engine.config is before
    with pytest.raises(ConfigError, match="beyond the 6"):
        run_bench(engine, BenchConfig(datasets=(str(file),), block_sizes=(9,)), {})
    assert engine.config is before


def test_a_diffusion_language_model_verifies_canvases_beside_one_token_at_a_time(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "Hello"}\n')
    target = Target.from_pretrained(tiny_pair.target, torch.float32)
    target.diffusion = replace(JOINT, mask_token_id=3)
    config = BenchConfig(datasets=(str(file),), repeats=1, max_tokens=9)
    report = run_bench(Engine(target), config, {"path": str(tiny_pair.target)})
    assert [summary.case.label for summary in report.summaries] == ["plain", "self"]
    assert all(summary.identical == 1 for summary in report.summaries)
    plain, _ = report.summaries
    assert plain.acceptance_length == 1, "it writes token by token"


def test_a_plain_draft_model_is_a_case_of_its_own(tiny_pair: TinyPair, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "Hello"}\n')
    engine = Engine.from_pretrained(tiny_pair.target, tiny_pair.drafter, dtype=torch.float32)
    config = BenchConfig(
        datasets=(str(file),), repeats=1, max_tokens=9, draft_model=str(tiny_pair.target), draft_tokens=3
    )
    *_, summary = run_bench(engine, config, {"path": str(tiny_pair.target)}).summaries
    assert (summary.case.label, summary.identical) == ("draft-model", 1)
    assert summary.acceptance_length == 4, "the target agrees with itself"
