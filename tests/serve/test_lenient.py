"""Unknown fields, which clients of other servers send: ignored with a word about it, or refused by a strict server."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.running import Running, Tiny, running
from tests.serve.test_tools import WEATHER

USER = {"role": "user", "content": "Hello"}
CHAT = {"messages": [USER], "max_tokens": 2}
OF_OTHERS = {
    "num_ctx": 4096,
    "cache_prompt": True,
    "keep_alive": "5m",
    "message_id": "1",
    "opts": {},
    "prefix": "a",
    "usage": {"include": True},
    "provider": {},
    "safe_prompt": False,
    "enable_thinking": False,
}


@pytest.fixture(scope="module")
def strict(tiny: Tiny) -> Iterator[Running]:
    with running(tiny.engine(), strict=True) as server:
        yield server
        server.settle()


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("chat/completions", {**CHAT, **OF_OTHERS}, list(OF_OTHERS)),
        ("completions", {"prompt": "Hello", "max_tokens": 2, **OF_OTHERS}, list(OF_OTHERS)),
        ("responses", {"input": "Hello", "max_output_tokens": 2, **OF_OTHERS}, list(OF_OTHERS)),
        ("chat/completions", {**CHAT, "temprature": 1}, ["temprature"]),
        ("chat/completions", {**CHAT, "messages": [{**USER, "id": "1", "created_at": 2}]}, ["id", "created_at"]),
        (
            "chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "x", "detail": 1}]}]},
            ["detail"],
        ),
        ("chat/completions", {**CHAT, "tool_choice": "none", "tools": [{**WEATHER, "mood": 1}]}, ["mood"]),
        (
            "chat/completions",
            {**CHAT, "tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather", "x": 1}}},
            ["x", "tools"],
        ),
        (
            "chat/completions",
            {
                **CHAT,
                "tools": [WEATHER],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]},
                    "y": 1,
                },
            },
            ["y", "tools"],
        ),
        ("responses", {"input": [{**USER, "mood": 1}], "max_output_tokens": 2}, ["mood"]),
        ("completions", {"prompt": "Hello", "max_tokens": 2, "a,b\r\nc: \u00e9": 1, "": 1}, ["a?b??c:??", "?"]),
    ],
)  # fmt: skip
def test_unknown_fields_are_ignored_and_named(
    server: Running, strict: Running, caplog: pytest.LogCaptureFixture, path: str, body: Any, names: list[str]
) -> None:
    with caplog.at_level("WARNING", "volley.serve"):
        response = server.post(path, body)
    assert response.status_code == 200, response.text
    assert response.headers["x-volley-ignored"].split(", ") == names
    (record,) = [record for record in caplog.records if record.message == "unknown fields were ignored"]
    assert len(record.fields["ignored"]) == len(names)  # type: ignore[attr-defined]
    refused = strict.post(path, body)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(("unknown field", "tool_choice must be"))
    assert "x-volley-ignored" not in refused.headers


def test_the_log_says_what_to_write_instead(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "volley.serve"):
        server.post(
            "chat/completions",
            {**CHAT, "temprature": 1, "enable_thinking": True, "qqq": 1},
        )
    (record,) = [record for record in caplog.records if record.message == "unknown fields were ignored"]
    want = ["temprature (did you mean 'temperature'?)", "enable_thinking (put it into chat_template_kwargs)", "qqq"]
    assert record.fields["ignored"] == want  # type: ignore[attr-defined]


def test_the_answer_is_the_one_without_them(server: Running) -> None:
    asked = {**CHAT, "max_tokens": 12, "temperature": 0}
    plain, other = (server.post("chat/completions", asked | own) for own in ({}, OF_OTHERS))
    assert plain.json()["choices"] == other.json()["choices"]
    assert "x-volley-ignored" not in plain.headers
    streamed = server.post("chat/completions", {**asked, **OF_OTHERS, "stream": True})
    assert streamed.headers["x-volley-ignored"] == other.headers["x-volley-ignored"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("chat/completions", {**CHAT, "num_ctx": 1, "temperature": 9}, "less than or equal to 2"),
        ("chat/completions", {**CHAT, "best_of": 3}, "best_of is not supported"),
        ("chat/completions", {"mesages": [USER]}, "did you mean 'messages'?"),
        ("chat/completions", {"num_ctx": 1}, "messages: Field required"),
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "txt": "x"}]}]}, "text parts"),
        ("completions", {"messages": [USER]}, "use prompt, or /v1/chat/completions"),
        ("chat/completions", {**CHAT, "response_format": {"type": "json_object", "x": 1}}, "unknown field"),
        ("chat/completions", {**CHAT, "structured_outputs": {"jsn": {}}}, "did you mean 'json'?"),
        ("completions", {"prompt": "a", "diffusion": {"treshold": 0.5}}, "did you mean 'threshold'?"),
        ("responses", {"input": "a", "text": {"format": {"type": "json_object", "x": 1}}}, "unknown field"),
    ],
)  # fmt: skip
def test_known_fields_with_wrong_values_stay_errors(server: Running, path: str, body: Any, message: str) -> None:
    """So do misspelt fields that must be there, and all that would loosen the form of an answer."""
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


def test_very_many_unknown_fields(server: Running) -> None:
    response = server.post("chat/completions", {**CHAT, **{f"{index}{'x' * 99}": 1 for index in range(5000)}})
    assert response.status_code == 200
    assert len(response.headers["x-volley-ignored"]) < 2000
