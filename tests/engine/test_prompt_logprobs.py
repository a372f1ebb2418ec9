"""The log-probabilities of prompts are transformers' own, whatever else the engine does meanwhile."""

from collections.abc import Sequence

import pytest
import torch

from tests.tiny import VOCAB, Pair, make_pair
from volley import Engine, SamplingParams
from volley.errors import ConfigError, InputError


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair()


def prompts(count: int, length: int) -> list[list[int]]:
    own = torch.Generator().manual_seed(5)
    return torch.randint(4, VOCAB, (count, length), generator=own).tolist()


@torch.no_grad()
def by_transformers(pair: Pair, token_ids: Sequence[int]) -> list[float]:
    """All at once, and in double precision after the logits."""
    logprobs = pair.hf(torch.tensor([token_ids])).logits[0].double().log_softmax(dim=-1)
    return [float(logprobs[place, token]) for place, token in enumerate(token_ids[1:])]


@pytest.mark.parametrize("chunk", [7, 16, 512])
@pytest.mark.parametrize("max_tokens", [0, 1, 9])
def test_they_are_transformers_own(pair: Pair, chunk: int, max_tokens: int) -> None:
    engine = Engine(pair.target, pair.drafter, max_batch_tokens=chunk, policy="fixed")
    given = prompts(3, 70)
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=2, logprobs=True)
    for prompt, result in zip(given, engine.generate(given, params), strict=True):
        assert result.prompt_logprobs == pytest.approx(by_transformers(pair, prompt), abs=2e-5)
        assert len(result.token_ids) == max_tokens
        assert result.finish_reason == "length"
        whole = by_transformers(pair, prompt + result.token_ids)
        assert result.logprobs == pytest.approx(whole[len(prompt) - 1 :], abs=2e-5), "the output's own are unchanged"
    engine.check_integrity()


def test_the_likeliest_tokens_stand_beside_them(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter, max_batch_tokens=16)
    (prompt,) = prompts(1, 40)
    (result,) = engine.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=VOCAB))
    assert result.prompt_logprobs is not None
    assert result.prompt_top_logprobs is not None
    for token, logprob, top in zip(prompt[1:], result.prompt_logprobs, result.prompt_top_logprobs, strict=True):
        assert dict(top)[token] == logprob
        assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
    (result,) = engine.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert result.prompt_top_logprobs is None


def test_a_cached_prefix_hides_none(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter)
    (prompt,) = prompts(1, 70)
    first, again, plain = (
        next(engine.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=scored)))
        for scored in (None, 0, None)
    )
    assert again.prompt_logprobs == pytest.approx(by_transformers(pair, prompt), abs=2e-5)
    assert (first.stats.cached_tokens, again.stats.cached_tokens, plain.stats.cached_tokens) == (0, 0, 64)
    assert first.prompt_logprobs is None


@pytest.mark.slow
def test_a_preemption_loses_none(pair: Pair) -> None:
    """Two prompts whose answers do not fit beside each other, read in small chunks."""
    engine = Engine(pair.target, pair.drafter, num_pages=10, max_batch_tokens=24, policy="fixed:4")
    given = prompts(2, 60)
    params = SamplingParams(max_tokens=80, prompt_logprobs=1)
    results = list(engine.generate(given, params))
    assert sum(result.stats.preemptions for result in results) > 0
    for prompt, result in zip(given, results, strict=True):
        assert result.prompt_logprobs == pytest.approx(by_transformers(pair, prompt), abs=2e-5)
    engine.check_integrity()


def test_preempted_while_it_is_read_it_goes_on_where_it_was(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter, max_batch_tokens=16)
    (prompt,) = prompts(1, 70)
    request = engine.add_request(prompt, SamplingParams(max_tokens=0, prompt_logprobs=0))
    engine.step()
    engine.step()
    assert len(request.prompt_scores) == 32
    engine.core.scheduler.preempt(request)
    while request.finish_reason is None:
        engine.step()
    assert [score.logprob for score in request.prompt_scores] == pytest.approx(by_transformers(pair, prompt), abs=2e-5)


def test_scoring_beside_others_changes_none_of_their_tokens(pair: Pair) -> None:
    given = prompts(4, 50)
    params = [SamplingParams(max_tokens=30, prompt_logprobs=0 if i % 2 else None) for i in range(4)]
    engine = Engine(pair.target, pair.drafter, max_batch_tokens=40, policy="fixed")
    plain = Engine(pair.target, block_size=1)
    want = [result.token_ids for result in plain.generate(given, SamplingParams(max_tokens=30))]
    assert [result.token_ids for result in engine.generate(given, params)] == want


def test_a_prompt_may_fill_the_context_only_to_be_read() -> None:
    pair = make_pair(max_position_embeddings=32)
    engine = Engine(pair.target)
    (prompt,) = prompts(1, 32)
    (result,) = engine.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert result.prompt_logprobs == pytest.approx(by_transformers(pair, prompt), abs=2e-5)
    with pytest.raises(InputError, match="context is 32"):
        engine.add_request(prompt, SamplingParams(max_tokens=1))
    (result,) = engine.generate([[7]], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert result.prompt_logprobs == []


def test_the_comparison_sees_a_shift_by_one(pair: Pair) -> None:
    (prompt,) = prompts(1, 70)
    want = by_transformers(pair, prompt)
    assert want[:-1] != pytest.approx(want[1:], abs=0.1)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=-1)
