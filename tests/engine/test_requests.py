"""The output of one request: text, stops, log-probabilities, chunks and statistics."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import Pair, greedy, make_pair, random_prompts, teach
from volley import Engine, GenerationResult, SamplingParams, TextChunk
from volley.errors import InputError
from volley.models.targets.target import Target

PIECES = ["ab", "c", "a", "b", " ", "bc", "ca", "d", "\n", "xyz"]
COUNT = 30


class PieceTokenizer:
    """Token i is a short piece of text, so that strings span tokens and tokens hold several letters."""

    eos_token_id = None
    chat_template = None
    all_special_ids: Sequence[int] = ()
    added_tokens_decoder: Mapping[int, Any] = {}

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(PIECES[token % len(PIECES)] for token in token_ids)


@functools.cache
def spelling() -> Target:
    return Target(make_pair().target.model, PieceTokenizer())  # type: ignore[arg-type]


PROMPTS = [prompt for prompt in random_prompts(9, longest=20, seed=6) if len(prompt) > 2][:5]


@functools.cache
def answer(index: int) -> list[int]:
    return greedy(make_pair().hf, PROMPTS[index], COUNT)


def taught(**options: Any) -> Engine:
    engine = Engine(spelling(), make_pair().drafter, page_size=4, num_pages=100, **options)
    teach(engine, {tuple(prompt): answer(i) for i, prompt in enumerate(PROMPTS)})
    return engine


def text_of(tokens: list[int]) -> str:
    return PieceTokenizer().decode(tokens)


def stream(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[list[TextChunk], GenerationResult]:
    chunks: list[TextChunk] = []
    generator = engine.stream(prompt, params)
    while True:
        try:
            chunks.append(next(generator))
        except StopIteration as end:
            return chunks, end.value


# -- ends --------------------------------------------------------------------------------------------------------------


def test_stop_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(InputError, match=r"stop_token_ids: token id 50 is outside .* of 50; leave .* from 0 to 49"):
        taught().add_request(PROMPTS[0], SamplingParams(stop_token_ids=(1, 50)))


def test_the_models_own_end_token_can_be_ignored(pair: Pair) -> None:
    end = answer(0)[4]
    target = Target(make_pair().target.model)
    target.stop_token_ids = frozenset({end})
    engine = Engine(target, pair.drafter, num_pages=40)
    stopped, ignored, other = engine.generate(
        [PROMPTS[0]] * 3,
        [
            SamplingParams(max_tokens=COUNT),
            SamplingParams(max_tokens=COUNT, ignore_eos=True),
            SamplingParams(max_tokens=COUNT, ignore_eos=True, stop_token_ids=(answer(0)[6],)),
        ],
    )
    assert stopped.token_ids == answer(0)[: answer(0).index(end) + 1]
    assert ignored.token_ids == answer(0)
    assert other.token_ids == answer(0)[: answer(0).index(answer(0)[6]) + 1]


@pytest.mark.slow
@given(
    index=st.integers(0, len(PROMPTS) - 1),
    stops=st.lists(st.tuples(st.integers(0, COUNT), st.integers(1, 6)), min_size=1, max_size=3),
    odd=st.booleans(),
)
def test_stop_strings(index: int, stops: list[tuple[int, int]], odd: bool) -> None:
    """Any part of the text may be the stop string: it ends the text before it, and no streamed chunk shows it."""
    whole = text_of(answer(index))
    strings = tuple(whole[start : start + size] for start, size in stops if whole[start : start + size])
    strings += ("abcabcabcabcx",) if odd else ()  # one that only ever begins
    if not strings:
        return
    params = SamplingParams(max_tokens=COUNT, stop=strings)
    chunks, result = stream(taught(), PROMPTS[index], params)
    first_end = COUNT + 1
    for end in range(1, COUNT + 1):
        if any(stop in text_of(answer(index)[:end]) for stop in strings):
            first_end = end
            break
    kept = answer(index)[:first_end]
    assert result.token_ids == kept
    expected = text_of(kept)
    found = [expected.find(stop) for stop in strings if stop in expected]
    assert result.text == (expected[: min(found)] if found else expected)
    assert result.finish_reason == ("stop" if found else "length")
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [token for chunk in chunks for token in chunk.token_ids] == kept


# -- streaming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_chunks_make_the_result_and_tell_who_wrote_them(index: int) -> None:
    chunks, result = stream(taught(), PROMPTS[index], SamplingParams(max_tokens=COUNT))
    assert "".join(chunk.text for chunk in chunks) == result.text == text_of(answer(index))
    assert [token for chunk in chunks for token in chunk.token_ids] == result.token_ids == answer(index)
    lengths = result.stats.accepted_lengths
    flags = [False] + [flag for length in lengths for flag in [True] * (length - 1) + [False]]
    assert [chunk.from_draft for chunk in chunks for _ in chunk.token_ids] == flags
    assert any(flags)


def test_the_stream_comes_while_the_engine_works() -> None:
    engine = taught()
    generator = engine.stream(PROMPTS[0], SamplingParams(max_tokens=COUNT))
    next(generator)
    assert engine.core.scheduler.running[0].num_output == 1
    generator.close()


# -- statistics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_statistics_add_up(temperature: float) -> None:
    params = SamplingParams(max_tokens=COUNT, temperature=temperature, seed=3)
    for prompt, result in zip(PROMPTS, taught(policy="fixed").generate(PROMPTS, params), strict=True):
        stats = result.stats
        assert stats.prompt_tokens == len(prompt)
        assert stats.output_tokens == len(result.token_ids) == COUNT
        assert sum(stats.accepted_lengths) == COUNT - 1  # the first token comes from the prompt's own pass
        assert len(stats.block_sizes) == len(stats.accepted_lengths)
        assert all(1 <= a <= b <= 6 for a, b in zip(stats.accepted_lengths, stats.block_sizes, strict=True))
        assert stats.acceptance_length == pytest.approx((COUNT - 1) / len(stats.accepted_lengths))
        assert 0 < stats.time_to_first_token < stats.total_seconds
        assert stats.prefill_seconds > 0
        assert stats.draft_seconds > 0
        assert stats.verify_seconds > 0
        assert stats.decode_tokens_per_second > 0


def test_blocks_do_not_run_past_the_end() -> None:
    (result,) = taught(policy="fixed").generate(PROMPTS[0], SamplingParams(max_tokens=4))
    assert result.stats.block_sizes[0] == 3
    assert sum(result.stats.accepted_lengths) == 3


def test_listeners_hear_every_verdict() -> None:
    engine = taught()
    heard: list[list[int]] = []
    engine.on_verified.append(lambda request, proposal, verdict: heard.append(verdict.token_ids))
    (result,) = engine.generate(PROMPTS[0], SamplingParams(max_tokens=COUNT))
    assert [token for tokens in heard for token in tokens] == result.token_ids


# -- log-probabilities -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=COUNT, logprobs=True),
        SamplingParams(max_tokens=COUNT, logprobs=True, temperature=0.7, top_k=5, seed=1),
        SamplingParams(max_tokens=COUNT, logprobs=True, stop=("abc", "d")),
    ],
)
@pytest.mark.parametrize("options", [{}, {"num_pages": 15, "max_batch_tokens": 9}])
def test_logprobs_are_the_targets_own(pair: Pair, params: SamplingParams, options: dict[str, Any]) -> None:
    engine = Engine(spelling(), pair.drafter, **{"page_size": 4, "num_pages": 100, **options})
    teach(engine, {tuple(prompt): answer(i) for i, prompt in enumerate(PROMPTS)})
    for prompt, result in zip(PROMPTS, engine.generate(PROMPTS, params), strict=True):
        with torch.inference_mode():
            logits = pair.hf(input_ids=torch.tensor([prompt + result.token_ids]), use_cache=False).logits[0]
        rows = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
        expected = rows[torch.arange(len(result.token_ids)), result.token_ids]
        assert result.logprobs is not None
        torch.testing.assert_close(torch.tensor(result.logprobs), expected, rtol=1e-3, atol=1e-4)


def test_without_a_tokenizer_there_is_no_text(pair: Pair) -> None:
    (result,) = Engine(pair.target, num_pages=20).generate([1, 2, 3], SamplingParams(max_tokens=3))
    assert result.text == ""
    assert len(result.token_ids) == 3
