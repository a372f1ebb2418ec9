"""Fields of vLLM's beyond OpenAI's: the shortest answer, special tokens, token ids, and what its bench client reads."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.conftest import TinyPair
from tests.serve.running import MODEL, Running, Tiny, openai_client
from tests.serve.test_openai_client import CHAT
from volley import SamplingParams
from volley.decode.rules import AtLeast

HELLO = "Hello"


@pytest.fixture(scope="module")
def client(drafting: Running) -> Iterator[OpenAI]:
    with openai_client(drafting) as client:
        yield client


def plain_ids(tiny: Tiny, prompt: Any, **params: Any) -> list[int]:
    """Return plain decoding's answer; a drafter knows it from now on."""
    tiny.answer(prompt, **params)
    (result,) = tiny.plain.generate([tiny.plain.encode(prompt)], SamplingParams(**params))
    return result.token_ids


# -- min_tokens --------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("least", [1, 9, 20])
def test_no_end_token_comes_before_min_tokens(client: OpenAI, tiny: Tiny, tiny_pair: TinyPair, least: int) -> None:
    """transformers' ``min_new_tokens`` writes the same, and drafts that end too early are rejected."""
    free = plain_ids(tiny, HELLO, max_tokens=24)
    ends = sorted(set(free[1:4]))
    model = AutoModelForCausalLM.from_pretrained(tiny_pair.target, dtype=torch.float32)
    config = GenerationConfig(
        max_new_tokens=24, min_new_tokens=least, do_sample=False, eos_token_id=ends, pad_token_id=0, use_cache=True
    )
    prompt = torch.tensor([tiny.plain.encode(HELLO)])
    want = model.generate(prompt, generation_config=config)[0, prompt.shape[1] :].tolist()
    extra = {"min_tokens": least, "stop_token_ids": ends, "ignore_eos": True, "return_token_ids": True}
    asked = {"model": MODEL, "prompt": HELLO, "max_tokens": 24, "temperature": 0}
    (choice,) = client.completions.create(**asked, extra_body=extra).choices
    assert choice.token_ids == want  # type: ignore[attr-defined]
    assert choice.token_ids[: len(free)] != free or least == 1  # type: ignore[attr-defined]
    (sampled,) = client.completions.create(**asked | {"temperature": 1.5, "seed": least}, extra_body=extra).choices
    tokens = sampled.token_ids  # type: ignore[attr-defined]
    assert not set(tokens[:least]) & set(ends)
    assert len(tokens) == 24 or tokens[-1] in ends


def test_the_rule_of_min_tokens_looks_at_each_path() -> None:
    rule = AtLeast(3, [1, 4], torch.device("cpu"))
    rule.take(0)
    masked = rule.apply(torch.zeros(3, 6), [(), (2,), (2, 3)])
    assert masked.isinf().tolist() == [[False, True, False, False, True, False]] * 2 + [[False] * 6]
    rule.take(2)
    rule.take(3)
    assert not rule.apply(torch.zeros(1, 6), [()]).isinf().any()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "the answer has 8 tokens at most"),
        ({"min_tokens": 1, "stop": "a"}, "stop strings; leave one of both out"),
        ({"min_tokens": 1, "response_format": {"type": "json_object"}}, "a form of the answer"),
        ({"min_tokens": -1}, "greater than or equal to 0"),
    ],
)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_min_tokens_that_cannot_be(drafting: Running, path: str, body: dict[str, Any], message: str) -> None:
    asked = {"messages": CHAT} if path.startswith("chat") else {"prompt": HELLO}
    response = drafting.post(path, asked | {"max_tokens": 20} | body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], message in error["message"]) == ("min_tokens", True), error


def test_min_tokens_without_anything_to_forbid(drafting: Running) -> None:
    response = drafting.complete(HELLO, max_tokens=4, min_tokens=4, ignore_eos=True)
    assert response.json()["usage"]["completion_tokens"] == 4


# -- token ids and special tokens --------------------------------------------------------------------------------------
def test_token_ids_of_completions(client: OpenAI, tiny: Tiny) -> None:
    prompts = [HELLO, "Bye"]
    want = [plain_ids(tiny, prompt, max_tokens=10) for prompt in prompts]
    given = [tiny.plain.encode(prompt) for prompt in prompts]
    asked: dict[str, Any] = {"model": MODEL, "prompt": prompts, "max_tokens": 10, "temperature": 0}
    asked["extra_body"] = {"return_token_ids": True}
    whole: list[Any] = client.completions.create(**asked).choices
    assert [choice.token_ids for choice in whole] == want
    assert [choice.prompt_token_ids for choice in whole] == given
    for echo in (False, True):
        tokens: list[list[int]] = [[], []]
        texts, told = ["", ""], [[], []]
        for chunk in client.completions.create(**asked, stream=True, echo=echo):
            for choice in chunk.choices:
                tokens[choice.index] += choice.token_ids  # type: ignore[attr-defined]
                told[choice.index] += getattr(choice, "prompt_token_ids", [])
                texts[choice.index] += choice.text
        assert (tokens, told) == (want, given)
        assert texts == [(prompt if echo else "") + own.text for prompt, own in zip(prompts, whole, strict=True)]


def test_token_ids_of_chats(client: OpenAI, tiny: Tiny) -> None:
    want, given = plain_ids(tiny, CHAT, max_tokens=10), tiny.plain.encode(CHAT)
    asked: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 10, "temperature": 0, "n": 2}
    whole: Any = client.chat.completions.create(**asked, extra_body={"return_token_ids": True})
    assert whole.prompt_token_ids == given
    assert [choice.token_ids for choice in whole.choices] == [want, want]
    chunks: list[Any] = list(
        client.chat.completions.create(**asked, stream=True, extra_body={"return_token_ids": True})
    )
    assert [getattr(chunk, "prompt_token_ids", None) for chunk in chunks] == [given] + [None] * (len(chunks) - 1)
    tokens: list[list[int]] = [[], []]
    for chunk in chunks:
        for choice in chunk.choices:
            tokens[choice.index] += getattr(choice, "token_ids", [])
    assert tokens == [want, want]
    without: Any = client.chat.completions.create(**asked)
    assert not hasattr(without, "prompt_token_ids")
    assert not hasattr(without.choices[0], "token_ids")


def test_special_tokens_are_shown_if_asked_for(client: OpenAI, tiny: Tiny) -> None:
    special = tiny.plain.tokenizer.convert_tokens_to_ids("<|im_start|>")
    asked: Any = {"model": MODEL, "temperature": 0, "max_tokens": 3, "logit_bias": {str(special): 100}}
    for shown, text in ((False, "<|im_start|>" * 3), (True, "")):
        extra = {"skip_special_tokens": shown}
        chat = client.chat.completions.create(messages=CHAT, **asked, extra_body=extra).choices[0].message.content
        completed = client.completions.create(prompt=HELLO, **asked, extra_body=extra).choices[0].text
        assert (chat, completed) == (text, text)


# -- the Responses API, as vLLM's bench client and guidellm use it -----------------------------------------------------
def test_sampling_fields_of_the_responses_api(drafting: Running, tiny: Tiny) -> None:
    params: dict[str, Any] = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.1}
    want = tiny.answer(CHAT, max_tokens=24, ignore_eos=True, **params)
    assert want != tiny.answer(CHAT, max_tokens=24, ignore_eos=True)
    asked = {"input": CHAT[0]["content"], "temperature": 0, "max_output_tokens": 24, "store": False, "ignore_eos": True}

    def text(**extra: Any) -> str:
        response = drafting.post("responses", asked | params | extra)
        assert response.status_code == 200, response.text
        own: str = response.json()["output"][0]["content"][0]["text"]
        return own

    assert text(top_k=9, min_p=0.01, priority=2, stop=None, stop_token_ids=[], skip_special_tokens=True) == want
    assert text(stop=[want[8:10]]) == want[: want.index(want[8:10])]
    assert text(logit_bias={"40": 100}, frequency_penalty=0) == tiny.plain.tokenizer.decode([40]) * 24
    error = drafting.post("responses", asked | {"top_k": -5}).json()["error"]
    assert error["param"] == "top_k"
    error = drafting.post("responses", asked | {"min_tokens": 25}).json()["error"]
    assert error["param"] == "min_tokens"


def test_vllms_counters_are_volleys(drafting: Running) -> None:
    """As ``vllm bench serve`` reads them: by what the names begin with and hold."""
    drafting.complete(HELLO, max_tokens=20, temperature=0)
    drafting.settle()
    text = httpx.get(f"{drafting.url}/metrics", timeout=60).text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if "spec_decode_num" in line and line[0] != "#")
    theirs = {name: value for name, value in lines.items() if name.startswith("vllm:")}
    kinds = {name.partition("{")[0].removeprefix("vllm:spec_decode_num_") for name in theirs}
    assert kinds == {"drafts_total", "draft_tokens_total", "accepted_tokens_total", "accepted_tokens_per_pos_total"}
    for name, value in theirs.items():
        assert lines[name.replace("vllm:", "volley:", 1)] == value
    assert float(theirs[f'vllm:spec_decode_num_drafts_total{{model_name="{MODEL}"}}']) > 0
