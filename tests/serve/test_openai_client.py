"""The ``openai`` package works against the server as it does against its own."""

import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.serve.running import MODEL, Running, Tiny, openai_client, running
from volley import SamplingParams
from volley.serve.config import ApiKeys
from volley.serve.spelling import Spelling

CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def drafting_client(drafting: Running) -> Iterator[OpenAI]:
    with openai_client(drafting) as client:
        yield client


def test_models(client: OpenAI, tiny: Tiny) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.root == tiny.target.model.config._name_or_path  # type: ignore[attr-defined]
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("gpt-9")


OF_OTHERS = {
    "bad_words": [],
    "best_of": 1,
    "include_reasoning": True,
    "length_penalty": 1.0,
    "min_tokens": 0,
    "prompt_logprobs": None,
    "return_token_ids": False,
    "skip_special_tokens": True,
    "truncate_prompt_tokens": None,
    "vllm_xargs": {},
    "watermarking": False,
    "request_id": "a",
    "session_id": "b",
    "use_beam_search": False,
}


def test_defaults_of_other_servers_are_taken(client: OpenAI) -> None:
    """Their clients send all fields."""
    assert client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=2, extra_body=OF_OTHERS | {"add_special_tokens": False}
    ).choices
    completed = client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=2, extra_body=OF_OTHERS | {"add_special_tokens": True}
    )
    assert completed.choices
    with pytest.raises(openai.BadRequestError, match="not supported") as error:
        client.chat.completions.create(model=MODEL, messages=CHAT, extra_body={"bad_words": ["a"]})
    assert error.value.param == "bad_words"


def test_chat(client: OpenAI, tiny: Tiny) -> None:
    want = tiny.answer(CHAT, max_tokens=24)
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_tokens=24)
    (choice,) = answer.choices
    assert choice.message.content == want
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    assert choice.logprobs is None
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    again = client.chat.completions.create(
        model=MODEL, messages=[*CHAT, choice.message, *CHAT], temperature=0, max_completion_tokens=1
    )
    assert again.usage is not None
    assert again.usage.completion_tokens == 1


def test_what_gateways_add_to_messages_changes_nothing(client: OpenAI, tiny: Tiny) -> None:
    """Marks where to cache, and the fields of an answer that comes back through a gateway."""
    plain = [*CHAT, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Say more"}]
    mark = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": "Say ", **mark}, {"type": "text", "text": "more"}]
    parts[1]["prompt_cache_breakpoint"] = {"mode": "explicit"}
    extra = {"annotations": [], "reasoning_details": [], "thinking_blocks": [], "refusal": None, "audio": None}
    dressed: Any = [{**CHAT[0], **mark}, {**plain[1], **extra}, {"role": "user", "content": parts}]
    answer = client.chat.completions.create(model=MODEL, messages=dressed, temperature=0, max_tokens=16)
    assert answer.choices[0].message.content == tiny.answer(plain, max_tokens=16)
    cut: Any = [*CHAT, {"role": "assistant", "content": None, "reasoning_content": "Well"}, *CHAT]
    assert client.chat.completions.create(model=MODEL, messages=cut, max_tokens=1).choices, "cut off while it reasoned"


def test_usage_says_what_was_drafted(drafting_client: OpenAI, tiny: Tiny) -> None:
    want = tiny.answer(CHAT, max_tokens=24)
    answer = drafting_client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_tokens=24)
    assert answer.choices[0].message.content == want
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens > 8, "the drafter was taught this answer"
    assert details.acceptance_length > 1.5
    stream = drafting_client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_tokens=24, stream=True
    )
    assert len(list(stream)) < 20, "a block of tokens is one chunk"


def test_chat_stream(client: OpenAI, tiny: Tiny) -> None:
    want = tiny.answer(CHAT, max_tokens=24)
    stream = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == want
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_every_chunk_may_have_the_usage(client: OpenAI) -> None:
    """Requests of guidellm."""
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        max_completion_tokens=12,
        stop=None,
        stream=True,
        stream_options=options,
        extra_body={"ignore_eos": True},
    )
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage]
    assert counts == sorted(counts)
    assert (counts[-1], len(counts) > 3) == (12, True)


def test_completion_of_text_and_of_tokens(client: OpenAI, tiny: Tiny) -> None:
    want = tiny.answer("Hello", max_tokens=16)
    ids = tiny.plain.encode("Hello")
    for prompt in ("Hello", ids):
        answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0)
        assert answer.choices[0].text == want, "16 tokens are the default"
    answer = client.completions.create(model=MODEL, prompt=["Hello", "Bye", "Hello"], temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == [want, tiny.answer("Bye", max_tokens=16), want]
    answer = client.completions.create(model=MODEL, prompt=[ids, ids], temperature=0, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2 * len(ids)
    stream = client.completions.create(model=MODEL, prompt=["Hello", "Bye"], temperature=0, stream=True)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [want, tiny.answer("Bye", max_tokens=16)]


def test_stop(client: OpenAI, tiny: Tiny) -> None:
    whole = tiny.answer(CHAT, max_tokens=40)
    stop = next(whole[i : i + 2] for i in range(8, 40) if whole.index(whole[i : i + 2]) == i)
    for given in (stop, [stop, "never"]):
        answer = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_tokens=40, stop=given)
        assert answer.choices[0].message.content == whole[: whole.index(stop)]
        assert answer.choices[0].finish_reason == "stop"


def test_log_probabilities(client: OpenAI, tiny: Tiny) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_tokens=12, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    (plain,) = tiny.plain.generate([CHAT], SamplingParams(max_tokens=12, logprobs=True))
    assert [token.logprob for token in logprobs.content] == pytest.approx(plain.logprobs, abs=1e-3)
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token
        assert bytes(token.bytes or []).decode(errors="replace") == token.token
    stream = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_tokens=12, logprobs=True, top_logprobs=3, stream=True
    )
    streamed = [t for c in stream if c.choices[0].logprobs for t in c.choices[0].logprobs.content or []]
    assert [(t.token, round(t.logprob, 3)) for t in streamed] == [
        (t.token, round(t.logprob, 3)) for t in logprobs.content
    ]
    old = client.completions.create(model=MODEL, prompt="Hello", temperature=0, logprobs=2).choices[0].logprobs
    assert old is not None
    assert old.tokens is not None
    assert old.top_logprobs is not None
    assert len(old.tokens) == len(old.top_logprobs) == 16
    assert all(max(top, key=top.__getitem__) == token for top, token in zip(old.top_logprobs, old.tokens, strict=True))
    assert old.text_offset is not None
    assert old.text_offset[:2] == [0, len(old.tokens[0])]


def test_the_bytes_of_parts_of_characters_are_told(client: OpenAI, tiny: Tiny) -> None:
    """Joined they are the text, as OpenAI's documentation says to use them."""
    asked: Any = {"model": MODEL, "messages": CHAT, "temperature": 0, "logprobs": True, "max_tokens": 40}
    (choice,) = client.chat.completions.create(**asked, extra_body={"regex": "é{2}€ü"}).choices
    assert choice.message.content == "éé€ü"
    assert choice.logprobs is not None
    parts = [bytes(token.bytes or []) for token in choice.logprobs.content or []]
    assert len(parts) > 4, "its tokens are parts of characters"
    assert b"".join(parts).decode() == "éé€ü"


def test_bytes_in_every_kind_of_vocabulary() -> None:
    class Tokenizer:
        pieces = ("<0xE2>", "Ã©", "Ã", "▁\ufffd", "a")

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [self.pieces.index(text)]}

        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(("\ufffd", "é", "\ufffd", " \ufffd", "a")[token] for token in ids)

        def convert_ids_to_tokens(self, token: int) -> str:
            return self.pieces[token]

    spelling = Spelling(Tokenizer())
    assert [spelling.bytes(token) for token in range(5)] == [[0xE2], [0xC3, 0xA9], [0xC3], None, [97]]


def test_a_token_is_spelled_as_in_the_middle_of_a_text() -> None:
    """The decoder drops the space in front of a first word."""

    class Tokenizer:
        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [0]}

        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join((" a", " Paris", ".")[token] for token in ids).removeprefix(" ")

    spelling = Spelling(Tokenizer())
    assert [spelling.one(token) for token in (0, 1, 2)] == [" a", " Paris", "."]
    assert spelling.bytes(1) == list(b" Paris")


def test_n_answers_are_distinct_and_repeatable(client: OpenAI) -> None:
    def ask(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(model=MODEL, messages=CHAT, n=4, seed=seed, max_tokens=12)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 48
        assert answer.usage.prompt_tokens < 100, "the prompt counts once"
        return [choice.message.content for choice in answer.choices]

    first = ask(7)
    assert len(set(first)) == 4
    assert ask(7) == first
    assert ask(-7) != first
    stream = client.chat.completions.create(model=MODEL, messages=CHAT, n=4, seed=7, max_tokens=12, stream=True)
    texts = [""] * 4
    roles = [0] * 4
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
    assert texts == first
    assert roles == [1] * 4


def test_one_of_n_answers_reads_the_prompt_for_all(client: OpenAI, server: Running) -> None:
    before = server.metrics()["volley:prefix_cache_hits_total"]
    answer = client.completions.create(model=MODEL, prompt=[*range(20, 120)], n=4, max_tokens=3, temperature=1)
    assert len(answer.choices) == 4
    server.settle()
    full_pages = 96  # of 100 tokens
    assert server.metrics()["volley:prefix_cache_hits_total"] - before == 3 * full_pages


def test_penalties_and_bias(client: OpenAI, tiny: Tiny) -> None:
    params = {"frequency_penalty": 1.5, "presence_penalty": 0.5}
    want = tiny.answer(CHAT, max_tokens=24, **params)
    assert want != tiny.answer(CHAT, max_tokens=24)
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_tokens=24, **params)
    assert answer.choices[0].message.content == want
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_tokens=5, logit_bias={"40": 100}
    )
    assert answer.choices[0].message.content == tiny.plain.tokenizer.decode([40]) * 5
    extra = {"repetition_penalty": 1.3, "top_k": 20, "min_p": 0.01, "ignore_eos": True, "priority": -3}
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=24, seed=3, extra_body=extra)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24


def test_errors_have_openais_classes(client: OpenAI, server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="audio is not supported") as error:
        client.chat.completions.create(model=MODEL, messages=CHAT, audio={"format": "wav", "voice": "alloy"})
    assert error.value.param == "audio"
    assert error.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=CHAT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="x" * 2000)
    assert long.value.code == "context_length_exceeded"
    assert "1024" in long.value.message
    assert long.value.request_id


def test_a_key_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOLLEY_API_KEY", "secret")
    keys = ApiKeys.load(None)
    assert (bool(keys), keys.accepts("secret"), keys.accepts("Secret")) == (True, True, False)


@pytest.mark.slow
def test_a_full_queue_says_when_to_come_back(tiny: Tiny) -> None:
    with running(tiny.engine(max_running=1), max_waiting=1) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
        with client:
            long = {"model": MODEL, "messages": CHAT, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
            stream = client.chat.completions.create(**long, stream=True)
            with pytest.raises(openai.RateLimitError) as error:
                client.chat.completions.create(model=MODEL, messages=CHAT, n=2)
            assert int(error.value.response.headers["retry-after"]) >= 1
            stream.close()
        server.settle()
        with pytest.raises(openai.BadRequestError, match="this server holds 2 at once"):
            OpenAI(base_url=f"{server.url}/v1", api_key="any").chat.completions.create(model=MODEL, messages=CHAT, n=3)


def test_infinitely_unlikely_tokens_are_still_json(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="a", temperature=0, logprobs=20, logit_bias={"9": 100})
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert all(math.isfinite(value) for value in logprobs.token_logprobs or [])
