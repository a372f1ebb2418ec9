"""Speculation under penalties and biases: greedy answers are plain decoding's own, sampled ones have its law."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.chi_square import chi_square_p, joint_counts, joint_law
from tests.decode.test_rules import reference
from tests.engine.test_sampled import PROMPT, TOKENS, V, sampled, tiny
from tests.tiny import Answers, Pair, answered, make_pair, random_prompts, teach, tokens
from volley import Engine, SamplingParams
from volley.decode.rules import Penalties
from volley.errors import InputError

COUNT = 16
PROMPTS = random_prompts(4, longest=20, seed=4)
EACH: list[dict[str, Any]] = [
    {"frequency_penalty": 1.5},
    {"presence_penalty": 2.0},
    {"repetition_penalty": 1.6},
    {"logit_bias": {7: 6, 11: -100}},
    {"frequency_penalty": -0.7, "presence_penalty": 1.0, "repetition_penalty": 1.2, "logit_bias": {3: 2.0}},
]


def slowly(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """transformers' own logits of the whole text for every token, penalised by the loop."""
    output: list[int] = []
    while len(output) < COUNT:
        with torch.inference_mode():
            logits = make_pair().hf(input_ids=torch.tensor([[*prompt, *output]]), use_cache=False).logits[0, -1]
        processed = reference(logits.tolist(), params, prompt, output)
        output.append(max(range(len(processed)), key=processed.__getitem__))
    return output


@functools.cache
def expected(index: int) -> Answers:
    params = SamplingParams(**EACH[index])
    return {tuple(prompt): slowly(prompt, params) for prompt in PROMPTS}


def greedy_answers(engine: Engine, index: int) -> list[list[int]]:
    teach(engine, expected(index))
    params = SamplingParams(**EACH[index], max_tokens=COUNT)
    results = answered(engine, PROMPTS, params)
    assert max(n for result in results for n in result.stats.accepted_lengths) >= min(4, engine.block_size)
    return tokens(results)


OPTIONS: list[dict[str, Any]] = [
    {"block_size": 1},
    {"denoising_steps": 2},
    {"tree_nodes": 16},
    {"page_size": 4, "num_pages": 14, "max_batch_tokens": 9},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("index", "options"), [*((index, {}) for index in range(len(EACH))), *((4, options) for options in OPTIONS)]
)
def test_greedy_is_plain_decoding(pair: Pair, index: int, options: dict[str, Any]) -> None:
    engine = Engine(pair.target, pair.drafter, **({} if "block_size" in options else {"policy": "fixed"}), **options)
    assert greedy_answers(engine, index) == list(expected(index).values())


def forget_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Penalties.apply
    monkeypatch.setattr(Penalties, "apply", lambda self, logits, paths: honest(self, logits, [()] * len(paths)))


def test_counting_the_draft_is_needed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties of the accepted prefix alone would be wrong from the second token of a block on, and seen."""
    forget_the_draft(monkeypatch)
    assert greedy_answers(Engine(pair.target, pair.drafter, policy="fixed"), 0) != list(expected(0).values())


def test_one_request_does_not_feel_anothers_penalties(pair: Pair) -> None:
    plain = SamplingParams(max_tokens=COUNT)
    each = [plain, *(SamplingParams(**extra, max_tokens=COUNT) for extra in EACH)]
    together = list(Engine(pair.target, pair.drafter).generate([PROMPTS[0]] * len(each), each))
    for result, params in zip(together, each, strict=True):
        (alone,) = Engine(pair.target, block_size=1).generate(PROMPTS[0], params)
        assert result.token_ids == alone.token_ids


def test_bias_outside_the_vocabulary_is_refused(pair: Pair) -> None:
    with pytest.raises(InputError, match="logit_bias: token id 50 is outside the target's vocabulary of 50"):
        Engine(pair.target).add_request([1], SamplingParams(logit_bias={50: 1.0}))  # type: ignore[arg-type]


def test_top_logprobs_belong_to_the_unprocessed_law(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter)
    params = SamplingParams(**EACH[0], max_tokens=COUNT, logprobs=True, top_logprobs=3)
    (result,) = engine.generate(PROMPTS[0], params)
    assert result.top_logprobs is not None
    assert result.logprobs is not None
    assert len(result.top_logprobs) == len(result.logprobs) == COUNT
    ids = torch.tensor([[*PROMPTS[0], *result.token_ids]])
    with torch.inference_mode():
        law = pair.hf(input_ids=ids, use_cache=False).logits[0, len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
    for row, token, logprob, top in zip(law, result.token_ids, result.logprobs, result.top_logprobs, strict=True):
        assert logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [t for t, _ in top] == row.topk(3).indices.tolist()
        assert [p for _, p in top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


# -- the law -----------------------------------------------------------------------------------------------------------

SEEDS = 1500
LAW = SamplingParams(
    temperature=1.0,
    max_tokens=TOKENS,
    frequency_penalty=1.2,
    presence_penalty=0.8,
    repetition_penalty=1.5,
    logit_bias=((0, 0.5), (5, -1.0)),
)


@functools.cache
def exact_law() -> Tensor:
    """Probability of each of the V³ answers: transformers' logits for every prefix, penalised by the loop."""

    def penalised(texts: Tensor) -> Tensor:
        rows = zip(tiny().hf(input_ids=texts, use_cache=False).logits[:, -1].tolist(), texts.tolist(), strict=True)
        return torch.tensor([reference(row, LAW, PROMPT, text[len(PROMPT) :]) for row, text in rows])

    return joint_law(penalised, PROMPT, LAW)


def probability(**options: Any) -> float:
    sequences, accepted = sampled(LAW, seeds=SEEDS, **options)
    assert accepted > 0.2
    return chi_square_p(joint_counts(sequences, V), exact_law())


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"verification": "rejection"}, {"verification": "coupled"}, {"tree_nodes": 8}])
def test_the_law_of_whole_answers_is_the_targets(options: dict[str, Any]) -> None:
    assert probability(**options) > 1e-3


@pytest.mark.slow
def test_a_law_that_ignores_the_draft_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_the_draft(monkeypatch)
    assert probability(verification="rejection") < 1e-6
