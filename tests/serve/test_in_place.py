"""Modes `autoregressive` and `self` of a model whose rows are in place, over HTTP: the Engine's answers, whole and streamed."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from openai import OpenAI

from tests import tiny
from tests.conftest import byte_tokenizer
from tests.serve.running import MODEL, Running, running
from volley import DiffusionParams, Engine, SamplingParams
from volley.models.targets.families import SDAR
from volley.models.targets.target import Target

PLAIN: dict[str, Any] = {"mode": "autoregressive"}
DRAFTED: dict[str, Any] = {"mode": "self", "canvas_length": 4, "max_steps": 1}
LIKELY = {str(token): 9.0 for token in range(70, 80)}
"""With so few tokens to choose from, a random model's drafts are often right."""
ASKED: dict[str, Any] = {"prompt": "Hello there", "max_tokens": 24, "temperature": 0.8, "seed": 4, "logit_bias": LIKELY}
MODES = pytest.mark.parametrize("diffusion", [PLAIN, DRAFTED], ids=["autoregressive", "self"])


@pytest.fixture(scope="module")
def target() -> Target:
    hf = tiny.eager_model(tiny.target_config(vocab_size=260, num_hidden_layers=2, initializer_range=0.1))
    return Target(hf, byte_tokenizer(), replace(SDAR, mask_token_id=3))


@pytest.fixture(scope="module")
def server(target: Target) -> Iterator[Running]:
    with running(Engine(target, page_size=8)) as server:
        yield server
        server.settle()


@pytest.fixture(scope="module")
def plain(target: Target) -> str:
    """Return the Engine's answer, written one token at a time."""
    bias = tuple((int(token), value) for token, value in LIKELY.items())
    own = SamplingParams(
        max_tokens=24, temperature=0.8, seed=4, logit_bias=bias, diffusion=DiffusionParams.from_mapping(PLAIN)
    )
    (result,) = Engine(target, page_size=8).generate(ASKED["prompt"], own)
    assert len(set(result.text)) > 5
    return result.text


def ask(client: OpenAI, diffusion: dict[str, Any], **changes: Any) -> Any:
    return client.completions.create(model=MODEL, **{**ASKED, **changes}, extra_body={"diffusion": diffusion})


def streamed(client: OpenAI, diffusion: dict[str, Any], **changes: Any) -> tuple[dict[int, str], dict[int, str], Any]:
    """Texts and reasons by index, and the usage."""
    texts, reasons, usage = dict[int, str](), dict[int, str](), None
    for chunk in ask(client, diffusion, stream=True, stream_options={"include_usage": True}, **changes):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        usage = chunk.usage or usage
    return texts, reasons, usage


@MODES
def test_each_of_several_answers_is_the_engines_whole_and_streamed(
    client: OpenAI, plain: str, diffusion: dict[str, Any]
) -> None:
    whole = ask(client, diffusion, n=3)
    texts = {choice.index: choice.text for choice in whole.choices}
    assert texts[0] == plain
    assert len(set(texts.values())) == 3, "each has a seed of its own"
    assert texts == {choice.index: choice.text for choice in ask(client, PLAIN, n=3).choices}
    found, reasons, usage = streamed(client, diffusion, n=3)
    assert (found, set(reasons.values())) == (texts, {"length"})
    assert usage.completion_tokens == whole.usage.completion_tokens == 72
    accepted = whole.usage.completion_tokens_details.accepted_prediction_tokens
    assert (accepted > 20) == (diffusion is DRAFTED)


@pytest.mark.slow
@MODES
def test_a_stop_string_ends_an_answer_inside_a_block(client: OpenAI, plain: str, diffusion: dict[str, Any]) -> None:
    """Wherever it stands in a draft; its tokens are the last."""
    for end in range(8, 13):
        stop = plain[end - 3 : end]
        expected = plain[: plain.index(stop)]
        whole = ask(client, diffusion, stop=stop)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "stop")
        assert whole.usage.completion_tokens == len(expected) + 3
        found, reasons, usage = streamed(client, diffusion, stop=stop)
        assert (found, reasons) == ({0: expected}, {0: "stop"})
        assert usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.slow
@MODES
def test_a_seed_repeats_an_answer_and_another_does_not(client: OpenAI, plain: str, diffusion: dict[str, Any]) -> None:
    assert [ask(client, diffusion, seed=seed).choices[0].text == plain for seed in (4, 5, 4)] == [True, False, True]
    chosen = ask(client, diffusion, logprobs=1).choices[0].logprobs.token_logprobs
    assert chosen == pytest.approx(ask(client, PLAIN, logprobs=1).choices[0].logprobs.token_logprobs, abs=1e-4)


def test_drafts_that_were_asked_for_are_streamed_beside_the_text(client: OpenAI, plain: str) -> None:
    chunks = list(ask(client, {**DRAFTED, "stream_drafts": True}, stream=True))
    drafts = [chunk.draft for chunk in chunks if hasattr(chunk, "draft")]
    assert drafts
    assert all(len(draft["token_ids"]) == 3 and None not in draft["token_ids"] for draft in drafts[:-1])
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == plain
