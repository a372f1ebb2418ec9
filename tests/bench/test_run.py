"""A whole benchmark on an engine."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import eagle
from tests.conftest import TinyPair
from volley import Engine
from volley.bench.run import run_bench
from volley.bench.tasks import BenchConfig
from volley.errors import ConfigError
from volley.models.targets.families import JOINT
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


@pytest.mark.slow
def test_other_drafters_are_cases_of_their_own(tiny_pair: TinyPair, tmp_path: Path) -> None:
    file, eagle3 = tmp_path / "p.jsonl", tmp_path / "eagle"
    file.write_text('{"prompt": "Hello"}\n')
    sizes = {"vocab_size": 260, "draft_vocab_size": 260}
    eagle.write(eagle3, eagle.config(**sizes), eagle.tensors(vocab=260))
    engine = Engine.from_pretrained(tiny_pair.target, tiny_pair.drafter, dtype=torch.float32)
    others = (tiny_pair.target, eagle3, tiny_pair.drafter)
    config = BenchConfig(
        datasets=(str(file),), repeats=1, max_tokens=9, draft_models=tuple(map(str, others)), draft_tokens=3
    )
    *_, plain, chain, block = run_bench(engine, config, {"path": str(tiny_pair.target)}).summaries
    assert [one.case.label for one in (plain, chain, block)] == [path.name for path in others]
    assert [one.case.decoding.block_size for one in (plain, chain, block)] == [4, 4, 6]
    assert [one.identical for one in (plain, chain, block)] == [1, 1, 1]
    assert plain.acceptance_length == 4, "the target agrees with itself"
    with pytest.raises(ConfigError, match="called a, a; each needs a name of its own"):
        BenchConfig(draft_models=("x/a", "y/a"))
    with pytest.raises(ConfigError, match="none that the table has"):
        BenchConfig(draft_models=("x/plain",))


def test_without_a_drafter_copies_are_compared_with_plain_decoding(tiny_pair: TinyPair, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "abc abc abc abc"}\n')
    engine = Engine.from_pretrained(tiny_pair.target, dtype=torch.float32)
    config = BenchConfig(datasets=(str(file),), repeats=1, max_tokens=40)
    plain, copied = run_bench(engine, config, {"path": str(tiny_pair.target)}).summaries
    assert (plain.case.label, copied.case.label, copied.identical) == ("plain", "goodput", 1)
    assert (plain.acceptance_length, copied.acceptance_length > 1) == (1, True)
    with pytest.raises(ConfigError, match="all but policy goodput"):
        BenchConfig(policies=("feedback",)).cases(None)
