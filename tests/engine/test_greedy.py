"""Greedy output is transformers' own, token for token, whatever the engine's settings (fp32)."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conftest import TinyPair
from tests.tiny import (
    Pair,
    answered,
    answers_and_drafts,
    block_proposer,
    greedy,
    make_pair,
    random_drafter,
    random_prompts,
    teach,
    tokens,
)
from volley import Engine, GenerationResult, SamplingParams
from volley.decode.denoise import SCHEDULES
from volley.engine.kv_manager import DraftRing, num_rings
from volley.errors import ConfigError
from volley.models.drafters.drafter import Drafter

COUNT = 20
BASE = random_prompts(7, longest=35, seed=1)
PROMPTS = [*BASE, BASE[0] + [1, 2, 3], BASE[3] + [4], BASE[0]]
PARAMS = SamplingParams(max_tokens=COUNT)


@functools.cache
def expected() -> list[list[int]]:
    hf = make_pair().hf
    return [greedy(hf, prompt, COUNT) for prompt in PROMPTS]


def taught(pair: Pair, **options: Any) -> Engine:
    options = {"page_size": 4, "num_pages": 160, **options}
    if "block_size" not in options:
        options.setdefault("policy", "fixed")
    engine = Engine(pair.target, pair.drafter, **options)
    teach(engine, {tuple(prompt): answer for prompt, answer in zip(PROMPTS, expected(), strict=True)})
    return engine


def run(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[GenerationResult]:
    return answered(engine, prompts, PARAMS)


def check_drafter(pair: Pair, drafter: Drafter, **options: Any) -> None:
    """Assert that answers are the target's with a drafter of another kind, too."""
    results = run(taught(pair._replace(drafter=drafter), **options))
    assert tokens(results) == expected()
    longest = max(length for result in results for length in result.stats.accepted_lengths)
    assert longest > 2 or options.get("policy") == "goodput"


def test_answers_vary() -> None:
    """Or the tests below would prove little."""
    assert len({tuple(answer) for answer in expected()}) > 6
    assert len({token for answer in expected() for token in answer}) > 15


@pytest.mark.parametrize("options", [{"policy": "fixed:12"}, {"block_size": 9, "draft_window": 8}])
def test_blocks_above_the_trained_one_are_drafted_by_the_same_masks(pair: Pair, options: dict[str, Any]) -> None:
    engine = taught(pair, **options)
    results = run(engine)
    assert tokens(results) == expected()
    assert max(size for result in results for size in result.stats.block_sizes) == engine.block_size > 6
    longest = max(length for result in results for length in result.stats.accepted_lengths)
    assert longest > 6 or "draft_window" in options, "later positions are kept too"
    with pytest.raises(ConfigError, match=r"beyond the .* make the engine with block_size"):
        engine.block_size = engine.block_size + 1


@pytest.mark.parametrize("block_size", range(1, 7))
def test_every_block_size(pair: Pair, block_size: int) -> None:
    results = run(taught(pair, block_size=block_size))
    assert tokens(results) == expected()
    longest = max(length for result in results for length in result.stats.accepted_lengths)
    assert longest == block_size, "long acceptances must have happened"


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("steps", [2, 3, 7])
def test_every_denoising_schedule(pair: Pair, schedule: str, steps: int) -> None:
    results = run(taught(pair, denoising_steps=steps, denoising_schedule=schedule))
    assert tokens(results) == expected()
    assert max(length for result in results for length in result.stats.accepted_lengths) > 3


@pytest.mark.parametrize(("asked", "window"), [(None, 6), (0, None), (9, 9)])
def test_a_drafter_brings_its_own_window(pair: Pair, asked: int | None, window: int | None) -> None:
    drafter = random_drafter(3)
    drafter.config = replace(drafter.config, draft_window=6)
    engine = Engine(pair.target, drafter, policy="fixed", page_size=4, num_pages=160, draft_window=asked)
    assert block_proposer(engine).model.windows == [window] * drafter.config.num_hidden_layers
    assert isinstance(engine.core.kv_manager.states[1], DraftRing) == (window is not None)
    assert tokens(run(engine)) == expected()


def test_plain_decoding_without_a_drafter(pair: Pair) -> None:
    results = run(Engine(pair.target, page_size=4, num_pages=160, policy="plain"))
    assert tokens(results) == expected()
    assert all(result.stats.acceptance_length == 1.0 for result in results)


def test_a_text_is_copied_from_without_a_drafter(pair: Pair) -> None:
    results = run(Engine(pair.target, page_size=4, num_pages=160))
    assert tokens(results) == expected()
    assert max(result.stats.acceptance_length for result in results) > 1.0


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("pools", [{}, {"kv_dtype": "int4", "draft_kv_dtype": "int8"}])
def test_a_prefix_hit_keeps_tokens_and_acceptance(pair: Pair, window: int | None, pools: dict[str, Any]) -> None:
    """The drafter's K/V come back with the target's, so a warm run drafts as well as a cold one."""
    options = {"page_size": 4, "num_pages": 40, **pools}
    for prompt in [prompt for prompt in BASE if len(prompt) > 16]:
        engine = Engine(pair.target, random_drafter(3), policy="fixed", draft_window=window, **options)
        (plain,) = run(Engine(pair.target, pair.drafter, policy="plain", prefix_caching=False, **options), [prompt])
        ((cold,), cold_drafts), ((warm,), drafts) = (answers_and_drafts(engine, [prompt], PARAMS) for _ in range(2))
        assert warm.token_ids == cold.token_ids == plain.token_ids
        assert drafts == cold_drafts, "a random drafter shows any change of its context"
        assert warm.stats.accepted_lengths == cold.stats.accepted_lengths
        whole = (len(prompt) - 1) // 4 * 4
        assert cold.stats.cached_tokens == 0
        assert warm.stats.cached_tokens == whole
        engine.reset_prefix_cache()
        assert run(engine, [prompt])[0].stats.cached_tokens == 0


def test_answers_are_found_as_prefixes_too(pair: Pair) -> None:
    """The second turn of a conversation starts where the first ended."""
    engine = Engine(pair.target, pair.drafter, page_size=4, num_pages=160)
    turn = [*PROMPTS[0], *expected()[0], 5, 6]
    teach(engine, {tuple(PROMPTS[0]): expected()[0], tuple(turn): greedy(pair.hf, turn, COUNT)})
    assert run(engine, [PROMPTS[0]])[0].token_ids == expected()[0]
    second = run(engine, [turn])[0]
    assert second.token_ids == greedy(pair.hf, turn, COUNT)
    assert second.stats.cached_tokens >= len(PROMPTS[0]) + COUNT - 5


@pytest.mark.slow
def test_an_end_inside_a_block_does_not_upset_the_pages(pair: Pair) -> None:
    """Accepted draft tokens after the end have K/V but are no part of the request."""
    answer = expected()[0]
    for count in range(1, COUNT):
        engine = taught(pair, page_size=1, num_pages=200)
        stop = answer[count - 1]
        (result,) = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=COUNT, stop_token_ids=(stop,)))
        assert result.token_ids == answer[: answer.index(stop) + 1]
        engine.check_integrity()
        assert tokens(run(engine)) == expected()


def test_the_text_may_fill_the_whole_context(pair: Pair) -> None:
    small = make_pair(max_position_embeddings=32)
    prompt = list(range(20))
    engine = Engine(small.target, small.drafter, page_size=4)
    (result,) = engine.generate(prompt, SamplingParams(max_tokens=100))
    assert result.finish_reason == "length"
    assert result.token_ids == greedy(small.hf, prompt, 12)


@pytest.mark.slow
def test_draft_window_memory_is_constant(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter, page_size=4, draft_window=8, max_running=2)
    request = engine.add_request(list(range(30)), SamplingParams(max_tokens=300))
    ring = engine.core.kv_manager.states[1]
    assert isinstance(ring, DraftRing)
    size = block_proposer(engine).model.store.nbytes
    used: set[int] = set()
    while request.finish_reason is None:
        engine.step()
        if request.finish_reason is None:
            used.add(ring.pool.num_used)
    assert used == {5}  # ⌈(8 + 6) / 4⌉ + 1
    assert block_proposer(engine).model.store.nbytes == size
    assert block_proposer(engine).model.store.keys[0].shape[0] == num_rings(2) * 5 * 4
    assert request.result().token_ids == greedy(pair.hf, list(range(30)), 300)


def test_from_pretrained_and_bytes(tiny_pair: TinyPair) -> None:
    engine = Engine.from_pretrained(tiny_pair.target, tiny_pair.drafter, dtype=torch.float32)
    hf = Engine.from_pretrained(tiny_pair.target, drafter=None, dtype=torch.float32, block_size=1)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    (fast,), (plain,) = engine.generate("def f(x):", params), hf.generate("def f(x):", params)
    assert fast.token_ids == plain.token_ids
    assert fast.text == plain.text == engine.tokenizer.decode(fast.token_ids, skip_special_tokens=True)
