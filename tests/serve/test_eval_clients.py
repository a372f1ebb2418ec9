"""Requests of evaluation harnesses: prompts scored by echo, tokens counted, and transformers' own numbers."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from tests.conftest import TinyPair
from tests.serve.running import MODEL, Running, Tiny, openai_client, running
from volley import Engine
from volley.models.targets.target import Target

PROMPTS = ["The baker sells rolls.", "Hello", "Ein Brötchen kostet 30 ¢, zwei kosten 50."]


@pytest.fixture(scope="module")
def client(drafting: Running) -> Iterator[OpenAI]:
    with openai_client(drafting) as client:
        yield client


@pytest.fixture(scope="module")
def logprobs(tiny: Tiny, tiny_pair: TinyPair) -> dict[str, torch.Tensor]:
    """Return the log-probabilities of the next token, at every place of every prompt, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(tiny_pair.target, dtype=torch.float32)
    with torch.no_grad():
        return {
            text: model(torch.tensor([tiny.plain.encode(text)])).logits[0].double().log_softmax(dim=-1)
            for text in PROMPTS
        }


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("as_tokens", [False, True])
def test_echo_scores_prompts(
    client: OpenAI, tiny: Tiny, logprobs: dict[str, torch.Tensor], max_tokens: int, as_tokens: bool
) -> None:
    """Request of lm-eval's local-completions, and its reading of the answer."""
    ids = [tiny.plain.encode(text) for text in PROMPTS]
    answer = client.completions.create(
        model=MODEL,
        prompt=ids if as_tokens else PROMPTS,
        echo=True,
        logprobs=1,
        max_tokens=max_tokens,
        temperature=0,
        seed=1234,
    )
    for text, tokens, choice in zip(PROMPTS, ids, answer.choices, strict=True):
        found = choice.logprobs
        assert found is not None
        assert found.token_logprobs is not None
        assert found.top_logprobs is not None
        assert found.text_offset is not None
        assert choice.text == text + (tiny.answer(text, max_tokens=max_tokens) if max_tokens else "")
        assert choice.finish_reason == "length"
        assert len(found.tokens or ()) == len(found.text_offset) == len(tokens) + max_tokens
        assert found.token_logprobs[0] is None
        assert found.top_logprobs[0] is None
        want = logprobs[text]
        exact = [float(want[place, token]) for place, token in enumerate(tokens[1:])]
        assert found.token_logprobs[1 : len(tokens)] == pytest.approx(exact, rel=1e-3, abs=1e-5)
        is_greedy = [
            max(top.values()) == own for top, own in zip(found.top_logprobs, found.token_logprobs, strict=True) if top
        ]
        best = [int(row.argmax()) == token for row, token in zip(want[:-1], tokens[1:], strict=True)]
        assert is_greedy == best + [True] * max_tokens


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_offsets_count_no_token_that_the_tokenizer_puts_in_front(tiny: Tiny, tiny_pair: TinyPair, stream: bool) -> None:
    target = Target.from_pretrained(tiny_pair.target, dtype=torch.float32)
    target.tokenizer.bos_token = "<|im_start|>"
    fast = target.tokenizer.backend_tokenizer
    begin = ("<|im_start|>", fast.token_to_id("<|im_start|>"))
    fast.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[begin])
    body = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 1, "stream": stream}
    with running(Engine(target)) as server:
        text = server.post("completions", body).text
    parts = [line.removeprefix("data: ") for line in text.splitlines() if line[-1:] == "}"]
    logprobs = [choice["logprobs"] for part in parts for choice in json.loads(part)["choices"] if choice["logprobs"]]
    assert [token for one in logprobs for token in one["tokens"]][:3] == ["<|im_start|>", "a", "b"]
    assert [at for one in logprobs for at in one["text_offset"]] == [0, 0, 1, 2]


def test_a_stream_begins_with_the_prompt(client: OpenAI, tiny: Tiny) -> None:
    asked = {"model": MODEL, "prompt": PROMPTS, "echo": True, "logprobs": 2, "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**asked)
    texts: dict[int, str] = dict.fromkeys(range(3), "")
    tokens: dict[int, list[float | None]] = {index: [] for index in range(3)}
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.token_logprobs or [] if choice.logprobs else []
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert [token or 0.0 for token in tokens[choice.index]] == pytest.approx(
            [token or 0.0 for token in choice.logprobs.token_logprobs or []], abs=1e-5
        )


def test_echo_without_log_probabilities(client: OpenAI, tiny: Tiny) -> None:
    asked = {"model": MODEL, "prompt": "Hello", "echo": True, "max_tokens": 4, "temperature": 0}
    want = "Hello" + tiny.answer("Hello", max_tokens=4)
    assert client.completions.create(**asked).choices[0].text == want
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)) == want
    answer = client.completions.create(**asked, n=2)
    assert [choice.text for choice in answer.choices] == [want, want]


def check_prompt(told: list[Any], tokens: list[int], want: torch.Tensor, count: int, tokenizer: Any) -> None:
    """Compare ``prompt_logprobs`` in vLLM's form with transformers' log-probabilities ``want [T, V]``."""
    first, *others = told
    assert first is None
    for token, row, own in zip(tokens[1:], want[:-1], others, strict=True):
        assert list(map(int, own)) == list(dict.fromkeys([token, *row.topk(count).indices.tolist()]))
        for key, ranked in own.items():
            assert ranked["logprob"] == pytest.approx(float(row[int(key)]), rel=1e-3, abs=1e-5)
            assert ranked["rank"] == 1 + int((row > row[int(key)]).sum())
            assert ranked["decoded_token"] == tokenizer.decode([int(key)])


@pytest.mark.parametrize("count", [0, 3])
def test_prompt_logprobs_in_vllms_form(
    client: OpenAI, tiny: Tiny, logprobs: dict[str, torch.Tensor], count: int
) -> None:
    asked = {"model": MODEL, "prompt": PROMPTS, "temperature": 0, "extra_body": {"prompt_logprobs": count}}
    answer = client.completions.create(**asked, max_tokens=0)
    for text, choice in zip(PROMPTS, answer.choices, strict=True):
        told = choice.prompt_logprobs  # type: ignore[attr-defined]
        check_prompt(told, tiny.plain.encode(text), logprobs[text], count, tiny.plain.tokenizer)
        assert choice.text == ""


def test_prompt_logprobs_go_with_echo_and_not_with_a_stream(client: OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "Hello there", "temperature": 0, "max_tokens": 2}
    (choice,) = client.completions.create(**asked, echo=True, logprobs=1, extra_body={"prompt_logprobs": 4}).choices
    (alone,) = client.completions.create(**asked, echo=True, logprobs=1).choices
    assert choice.logprobs == alone.logprobs
    assert all(4 <= len(told) <= 5 for told in choice.prompt_logprobs[1:])  # type: ignore[attr-defined]
    with pytest.raises(openai.BadRequestError, match="set stream to false") as error:
        client.completions.create(**asked, stream=True, extra_body={"prompt_logprobs": 1})
    assert error.value.param == "prompt_logprobs"


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPTS[2]}]


@pytest.mark.parametrize(("count", "n"), [(0, 1), (3, 1), (2, 3)])
def test_prompt_logprobs_of_chats_are_transformers_own(
    client: OpenAI, tiny: Tiny, tiny_pair: TinyPair, count: int, n: int
) -> None:
    """They stand beside the choices, once: the whole conversation as the template writes it, markers included."""
    tokens = tiny.plain.encode(CHAT)
    model = AutoModelForCausalLM.from_pretrained(tiny_pair.target, dtype=torch.float32)
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0].double().log_softmax(dim=-1)
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_tokens=4, n=n, extra_body={"prompt_logprobs": count}
    )
    check_prompt(answer.prompt_logprobs, tokens, want, count, tiny.plain.tokenizer)  # type: ignore[attr-defined]
    assert [choice.message.content for choice in answer.choices] == [tiny.answer(CHAT, max_tokens=4)] * n
    assert not hasattr(answer.choices[0], "prompt_logprobs")


def test_prompt_logprobs_leave_the_rest_of_a_chat_alone(client: OpenAI) -> None:
    asked = {"model": MODEL, "messages": CHAT, "max_tokens": 6, "seed": 3, "n": 2, "logprobs": True, "top_logprobs": 2}
    without = client.chat.completions.create(**asked)
    assert not hasattr(without, "prompt_logprobs")
    answer = client.chat.completions.create(**asked, extra_body={"prompt_logprobs": 1})
    for mine, theirs in zip(answer.choices, without.choices, strict=True):
        assert mine.message == theirs.message
        tokens = [[(token.token, round(token.logprob, 4)) for token in own.logprobs.content] for own in (mine, theirs)]
        assert tokens[0] == tokens[1]
    asked["stream"] = True
    with pytest.raises(openai.BadRequestError, match="set stream to false") as error:
        client.chat.completions.create(**asked, extra_body={"prompt_logprobs": 0})
    assert error.value.param == "prompt_logprobs"
    for wrong in (21, -1, 1.5, True):
        with pytest.raises(openai.BadRequestError, match="prompt_logprobs") as error:
            client.chat.completions.create(model=MODEL, messages=CHAT, extra_body={"prompt_logprobs": wrong})
        assert error.value.param == "prompt_logprobs"


def test_nothing_to_do_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="set echo") as error:
        client.completions.create(model=MODEL, prompt="Hello", max_tokens=0)
    assert error.value.param == "max_tokens"


def test_tokens_and_back(drafting: Running, tiny: Tiny) -> None:
    text = PROMPTS[2]
    body = drafting.client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert body["tokens"] == tiny.plain.encode(text)
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 1024
    assert drafting.client.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": text}
    chat = [{"role": "user", "content": "Hello"}]
    body = drafting.client.post("/tokenize", json={"messages": chat}).json()
    assert body["tokens"] == tiny.plain.encode(chat)
    assert body["token_strs"] is None
    open_end = {"messages": [*chat, {"role": "assistant", "content": "So"}]}
    open_end |= {"add_generation_prompt": False, "continue_final_message": True}
    body = drafting.client.post("/tokenize", json=open_end).json()
    assert tiny.plain.tokenizer.decode(body["tokens"]).endswith("<|im_start|>assistant\nSo")
    info = drafting.client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert "im_start" in info["chat_template"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
    ],
)
def test_bad_fields_are_named(drafting: Running, path: str, body: dict[str, object], param: str | None) -> None:
    response = drafting.client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
