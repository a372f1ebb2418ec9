"""Requests with different adapters in one batch: the target's tokens and law, and never another adapter's draft K/V."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chi_square import chi_square_p, joint_counts
from tests.engine.test_greedy import COUNT, PROMPTS, expected
from tests.engine.test_sampled import PROMPT, SEEDS, V, exact_law, soft_scored, tiny
from tests.models.drafters.test_adapter import make_adapter
from tests.tiny import Pair, drafts_of, random_prompts
from volley import Engine, SamplingParams
from volley.errors import ConfigError, InputError
from volley.models.drafters.adapter import adapted
from volley.proposers import block

CHOICES = [None, "first", "second"]


def engine_with_adapters(pair: Pair, folder: Path, **options: Any) -> Engine:
    engine = Engine(pair.target, pair.drafter, **{"policy": "fixed", "page_size": 4, "num_pages": 160, **options})
    for seed, name in enumerate(("first", "second")):
        make_adapter(folder / name, pair.drafter, seed=seed)
        engine.load_adapter(name, folder / name)
    return engine


def mixed(params: SamplingParams, count: int) -> list[SamplingParams]:
    return [replace(params, draft_adapter=CHOICES[index % 3]) for index in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 6])
def test_each_request_is_drafted_by_its_own_adapter(pair: Pair, tmp_path: Path, window: int | None) -> None:
    """The same prompts by every adapter in one batch, as an engine does that has this drafter only."""
    engine = engine_with_adapters(pair, tmp_path, draft_window=window)
    prompts = [prompt for prompt in random_prompts(4, longest=30, seed=8) for _ in CHOICES]
    params = mixed(SamplingParams(max_tokens=12), len(prompts))
    drafters = [pair.drafter, *(adapted(pair.drafter, tmp_path / name) for name in ("first", "second"))]
    options: dict[str, Any] = {"policy": "fixed", "page_size": 4, "num_pages": 160, "draft_window": window}
    alone = [Engine(pair.target, drafter, **options) for drafter in drafters]
    plain = SamplingParams(max_tokens=12)
    wanted = [drafts_of(alone[index % 3], [prompt], [plain])[0] for index, prompt in enumerate(prompts)]
    assert drafts_of(engine, prompts, params) == wanted
    assert drafts_of(engine, prompts, params) == wanted, "with cached prefixes"
    assert len({str(drafts) for drafts in wanted}) == len(wanted), "adapters that draft alike would prove nothing"


def test_a_prefix_hit_brings_draft_kv_of_the_same_adapter_only(pair: Pair, tmp_path: Path) -> None:
    engine = engine_with_adapters(pair, tmp_path)
    prompt = list(range(17))

    def cached(name: str | None) -> int:
        params = SamplingParams(max_tokens=2, draft_adapter=name)
        return next(engine.generate(prompt, params)).stats.cached_tokens

    assert [cached(name) for name in CHOICES] == [0, 0, 0]
    assert [cached(name) for name in CHOICES] == [16, 16, 16]
    engine.load_adapter("again", tmp_path / "first")
    assert cached("again") == 16, "the same weights by another name"
    make_adapter(tmp_path / "first", pair.drafter, seed=9)
    engine.load_adapter("first", tmp_path / "first")
    assert cached("first") == 0, "other weights by the same name"
    windowed = engine_with_adapters(pair, tmp_path, draft_window=6)
    windowed.generate(prompt, SamplingParams(max_tokens=2)).__next__()
    warm = next(windowed.generate(prompt, SamplingParams(max_tokens=2, draft_adapter="second")))
    assert warm.stats.cached_tokens == 16, "the target's pages serve all"


@pytest.mark.slow
def test_the_law_of_mixed_batches_is_the_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=3)
    options = {"max_running": 256, "num_pages": 600, "page_size": 8, "verification": "speculative"}
    engine = engine_with_adapters(tiny(), tmp_path, **options)

    def sampled() -> tuple[torch.Tensor, int]:
        each = [replace(own, seed=seed) for seed, own in enumerate(mixed(params, SEEDS))]
        results = list(engine.generate([PROMPT] * SEEDS, each))
        accepted = sum(length - 1 for result in results for length in result.stats.accepted_lengths)
        return torch.tensor([result.token_ids for result in results]), accepted

    sequences, accepted = sampled()
    assert chi_square_p(joint_counts(sequences, V), exact_law(params)) > 1e-3
    assert accepted > 0.2 * SEEDS
    monkeypatch.setattr(block, "propose_sampled", soft_scored)
    sequences, _ = sampled()
    assert chi_square_p(joint_counts(sequences, V), exact_law(params)) < 1e-6, "a planted bias is seen"


def test_adapters_come_and_go(pair: Pair, tmp_path: Path) -> None:
    engine = engine_with_adapters(pair, tmp_path)
    assert engine.adapters == ["first", "second"]
    params = SamplingParams(max_tokens=COUNT, draft_adapter="first")
    request = engine.add_request(PROMPTS[0], params)
    engine.step()
    engine.unload_adapter("first")
    with pytest.raises(InputError, match=r"no adapter 'first' is loaded \(of those, second\); load it"):
        engine.add_request(PROMPTS[0], params)
    while request.finish_reason is None:
        engine.step()
    assert request.result().token_ids == expected()[0], "a request that runs keeps its adapter"
    with pytest.raises(InputError, match="no adapter 'first'"):
        engine.unload_adapter("first")
    with pytest.raises(ConfigError, match="no drafter to adapt"):
        Engine(pair.target, num_pages=20).load_adapter("first", tmp_path / "first")
