"""Bodies, headers and clients that are wrong or hostile: a clear 4xx each, and everybody else is served."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.running import MODEL, Running, Tiny, running
from volley.serve.arguments import types_of
from volley.serve.protocol import CompletionRequest

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
TEXT = {"prompt": "Hello", "max_tokens": 4}


@pytest.fixture(scope="module")
def server(tiny: Tiny) -> Iterator[Running]:
    """One that refuses unknown fields."""
    with running(tiny.engine(), strict=True) as server:
        yield server
        server.settle()


@pytest.fixture(autouse=True)
def _unharmed(server: Running) -> Iterator[None]:
    yield
    assert server.chat("Hello", max_tokens=2).status_code == 200
    server.settle()


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("chat", {**CHAT, "temprature": 1}, "temprature", "unknown field 'temprature'; did you mean 'temperature'?"),
        ("chat", {**CHAT, "qqq": 1}, "qqq", "unknown field 'qqq'; known: add_generation_prompt, "),
        ("chat", {**CHAT, "temperature": 2.5}, "temperature", "less than or equal to 2"),
        ("chat", {**CHAT, "temperature": "1"}, "temperature", "valid number"),
        ("chat", {**CHAT, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ("chat", {**CHAT, "max_tokens": 1e99}, "max_tokens", "valid integer"),
        ("chat", {**CHAT, "max_tokens": 10**6}, "messages", "maximum context length is 1024"),
        ("chat", {**CHAT, "n": 0}, "n", "greater than or equal to 1"),
        ("chat", {**CHAT, "n": 10**9}, "n", "less than or equal to 128"),
        ("chat", {**CHAT, "top_logprobs": 3}, "top_logprobs", "only allowed when logprobs is true"),
        ("chat", {**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ("chat", {**CHAT, "stream_options": {}}, "stream_options", "only allowed when stream is true"),
        ("chat", {**CHAT, "audio": {"voice": "x"}}, "audio", "not supported"),
        ("chat", {**CHAT, "tools": [{}]}, "tools.0.type", "required"),
        ("chat", {**CHAT, "stop": ["a", ""]}, "stop", "a string or up to 16 strings"),
        ("chat", {**CHAT, "logit_bias": {"x": 1}}, "logit_bias.x", "keys are token ids"),
        ("chat", {**CHAT, "logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
        ("chat", {**CHAT, "logit_bias": {"99999": 1}}, "logit_bias", "logit_bias: token id 99999 is outside"),
        ("chat", {**CHAT, "messages": []}, "messages", "at least 1 item"),
        ("chat", {"messages": [{"role": "king", "content": "x"}]}, "messages.0.role", "'user'"),
        (
            "chat",
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content",
            "a string or a list of text parts",
        ),
        ("chat", {"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages.0.mood", "unknown field"),
        ("chat", {}, "messages", "Field required"),
        ("text", {"prompt": ""}, "prompt", "the prompt is empty"),
        ("text", {"prompt": ["a", ""]}, "prompt", "the prompt is empty"),
        ("text", {"prompt": []}, "prompt", "none of them empty"),
        ("text", {"prompt": [["a"]]}, "prompt", "a list of token ids"),
        ("text", {"prompt": [1, "a"]}, "prompt", "a list of token ids"),
        ("text", {"prompt": [99999]}, "prompt", "token id 99999 is outside the target's vocabulary of 260"),
        ("text", {**TEXT, "stop_token_ids": [3, 99999]}, "stop_token_ids", "give ids from 0 to 259"),
        ("text", {"prompt": ["a"] * 128, "n": 128}, "n", "this server holds"),
        ("text", {"prompt": "x" * 5000}, "prompt", "5000 in the prompt"),
        ("text", {"prompt": "x" * 900_000}, "prompt", "at least "),
        ("chat", {"messages": [{"role": "user", "content": "x" * 900_000}]}, "messages", "at least "),
        ("text", {**TEXT, "seed": 2**70}, "seed", ""),
        ("text", {**TEXT, "max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ("chat", {**CHAT, "max_completion_tokens": -1}, "max_completion_tokens", "greater than or equal to 1"),
        ("text", {**TEXT, "stop": ""}, "stop", "none of them empty"),
        ("text", {**TEXT, "stop": [None]}, "stop", "none of them empty"),
        ("text", {**TEXT, "max_completion_tokens": 4}, "max_completion_tokens", "completion_tokens'; use max_tokens"),
        ("text", {**TEXT, "messages": []}, "messages", "use prompt, or /v1/chat/completions"),
        ("text", {**TEXT, "top_logprobs": 2}, "top_logprobs", "use logprobs, which is a number here"),
        ("chat", {**CHAT, "prompt": "a"}, "prompt", "use messages, or /v1/completions"),
        ("chat", {**CHAT, "reasoning": {"effort": "low"}}, "reasoning", "use reasoning_effort"),
        ("chat", {**CHAT, "store": True}, "store", "set store to false"),
        ("chat", {**CHAT, "cache_salt": "a"}, "cache_salt", "not supported"),
        ("chat", {**CHAT, "messages": "Hello"}, "messages", "valid list"),
        ("chat", {"messages": ["Hello"]}, "messages.0", "valid dictionary"),
        ("chat", {"messages": [{"role": "user"}]}, "messages", "give it a text"),
        ("chat", {"messages": [{"role": "user", "content": []}]}, "messages.0.content", "a list of text parts"),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "detail": 1}]}]},
            "messages.0.content.0.detail",
            "unknown field 'messages.0.content.0.detail'; known: text, type",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content",
            "images, audio and files are not read",
        ),
        ("chat", {"messages": [{"role": "user", "contnt": "x"}]}, "messages.0.contnt", "did you mean 'content'?"),
        (
            "chat",
            {**CHAT, "stream": True, "stream_options": {"include_usge": True}},
            "stream_options.include_usge",
            "unknown field 'stream_options.include_usge'; did you mean 'include_usage'?",
        ),
        ("chat", {**CHAT, "structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "did you mean 'json'?"),
        ("text", {**TEXT, "suffix": "end"}, "suffix", "write the model's own marks into prompt"),
        ("responses", {"input": "a", "max_tokens": 4}, "max_tokens", "use max_output_tokens"),
        ("responses", {"input": [{"role": "user", "contnt": "x"}]}, "input.0.contnt", "did you mean 'content'?"),
        ("responses", {"input": [{"type": "function_call", "call_id": "a"}]}, "input.0.name", "required"),
        ("text", {**TEXT, "user": "me", "metadata": {"a": "b"}, "top_p": -1}, "top_p", "greater than or equal to 0"),
    ],
)
def test_bad_fields_are_named(server: Running, path: str, body: Any, param: str | None, message: str) -> None:
    response = server.post({"chat": "chat/completions", "text": "completions"}.get(path, path), body)
    assert response.status_code == 400
    error = error_of(response)
    assert message in error["message"]
    assert error["param"] == param


def test_what_asks_for_nothing_is_accepted(server: Running) -> None:
    idle = {"tools": None, "tool_choice": "auto", "response_format": {"type": "text"}, "store": False, "user": "me"}
    assert server.post("chat/completions", {**CHAT, **idle, "metadata": {"a": "b"}, "seed": None}).status_code == 200
    assert server.post("completions", {**TEXT, "echo": False, "best_of": 1, "suffix": None}).status_code == 200


ALONE = "\ud83d"
"""Half of a character: JSON can say it, text cannot hold it."""


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": ALONE}, "prompt"),
        ("completions", {"prompt": ["a", ALONE]}, "prompt.1"),
        ("completions", {"prompt": "a", "stop": ALONE}, "stop"),
        ("completions", {"prompt": "a", "stop": ["a", ALONE]}, "stop.1"),
        ("chat/completions", {"messages": [{"role": "user", "content": ALONE}]}, "messages.0.content"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ALONE}]}]},
            "messages.0.content.0.text",
        ),
        ("responses", {"input": [{"role": "user", "content": ALONE}]}, "input.0.content"),
        ("completions", {"prompt": "a", ALONE: 1}, "\\ud83d"),
    ],
)
def test_half_a_character_is_found(server: Running, path: str, body: Any, param: str) -> None:
    """In the client's words: nothing of how types are checked here is in the message."""
    response = server.client.post(f"/v1/{path}", content=json.dumps(body), headers=JSON)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert error["message"].startswith((f"{param}: the text is not valid Unicode", "unknown field"))


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"", 400, ""),
        (b"{", 400, ""),
        (b"null", 400, ""),
        (b"[]", 400, ""),
        (b'"prompt"', 400, "must be a JSON object"),
        (b'{"prompt": "a",}', 400, "(character 15)"),
        (b"{'prompt': 'a'}", 400, "not JSON: Expecting property name"),
        (b'{"prompt": "\xff\xfe"}', 400, "not UTF-8"),
        (b'{"prompt": "\\ud800"}', 400, ""),
        (b'{"\\ud800": 1, "prompt": "a"}', 400, ""),
        (b'{"prompt": "a", "model": "\\udfff"}', 404, ""),
        (b'{"prompt": "a", "temperature": NaN}', 400, "temperature: Input should be a finite number"),
        (b'{"prompt": "a", "temperature": 1e999}', 400, ""),
        (b'{"prompt": "a", "logit_bias": {"5": -Infinity}}', 400, "logit_bias.5: Input should be a finite number"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", 400, ""),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "nested too deeply"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, 400, "nested too deeply"),
        (b"x" * 1_100_000, 413, ""),
    ],
    ids=range(18),
)
def test_bodies_that_are_not_what_they_should_be(server: Running, content: bytes, status: int, message: str) -> None:
    response = server.client.post("/v1/completions", content=content, headers=JSON)
    assert response.status_code == status
    assert message in error_of(response)["message"]


def test_a_body_of_another_type_is_no_json(server: Running) -> None:
    body = b'{"prompt": "a", "max_tokens": 1}'
    response = server.client.post("/v1/completions", content=body, headers={"content-type": "text/plain"})
    assert response.status_code == 400
    error_of(response)


def test_a_body_without_a_length_is_cut_off_at_the_limit(server: Running) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while sent < 50_000_000:
            sent += 65536
            yield b" " * 65536

    try:
        response = server.client.post("/v1/completions", content=endless(), headers=JSON)
        assert response.status_code == 413
    except httpx.WriteError:  # the server had closed before all was sent
        pass
    assert sent < 10_000_000


@given(content=st.binary(max_size=200))
def test_random_bytes(server: Running, content: bytes) -> None:
    assert 400 <= server.client.post("/v1/completions", content=content, headers=JSON).status_code < 500


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.sampled_from(sorted(CompletionRequest.model_fields) + sorted(CompletionRequest.unsupported))


@pytest.mark.slow
@given(extra=st.dictionaries(FIELDS | st.text(max_size=6), VALUES, max_size=4))
def test_random_fields(server: Running, extra: dict[str, Any]) -> None:
    response = server.post("completions", {**TEXT, **extra})
    assert response.status_code < 500
    if response.status_code != 200:
        error_of(response)


@pytest.mark.parametrize("key", ["", "Bearer", "Bearer wrong", "Basic right", "Bearer right2", "Bearer " + "x" * 5000])
def test_wrong_keys(key_server: Running, key: str) -> None:
    response = key_server.client.get("/v1/models", headers={"authorization": key} if key else {})
    assert response.status_code == 401
    assert error_of(response)["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


def test_a_right_key(key_server: Running) -> None:
    assert key_server.client.get("/v1/models", headers={"authorization": "bearer right"}).status_code == 200
    assert key_server.client.get("/metrics").status_code == 200


@pytest.fixture(scope="module")
def key_server(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("other\nright\n")
    with running(tiny.engine(), api_key_file=keys) as server:
        yield server


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_wrong_methods_and_paths(server: Running, method: str) -> None:
    response = server.client.request(method, "/v1/completions")
    assert response.status_code == 405
    assert error_of(response)["message"] == f"/v1/completions does not take {method}; use POST"
    response = server.client.request(method, "/v1/../etc/passwd")
    assert response.status_code in (404, 405)
    assert server.client.get("/dashboard/../../../app.py").status_code == 404


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/chat/completions", "did you mean '/v1/chat/completions'?"),
        ("/v1/v1/chat/completions", "did you mean '/v1/chat/completions'?"),
        ("//v1/completions", "did you mean '/v1/completions'?"),
        ("/v1/embeddings", "embeddings are not served"),
        ("/v1/audio/speech", "/openapi.json lists the paths"),
        ("/\ud83d\ude00", "/openapi.json lists the paths"),
    ],
)
def test_wrong_paths_are_explained(server: Running, path: str, remedy: str) -> None:
    response = server.client.post(path.encode("utf-16", "surrogatepass").decode("utf-16"), json=TEXT)
    assert response.status_code == 404
    assert remedy in error_of(response)["message"]


def test_raw_nonsense_instead_of_http(server: Running) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\n"
    for data in (
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/x\r\n\r\n",
        b"A" * 100_000,
        head + b"content-length: -1\r\n\r\n",
        head + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    ):
        with socket.create_connection(server.server.address, timeout=5) as raw:
            raw.sendall(data)
            assert raw.recv(100).startswith(b"HTTP/1.1 400")


@pytest.mark.slow
def test_slow_clients_are_cut_off_while_others_are_served(tiny: Tiny) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {MODEL}\r\ncontent-type: application/json\r\n"
    with running(tiny.engine(), receive_timeout=0.4) as server:
        silent, slow_head, slow_body = (socket.create_connection(server.server.address, timeout=5) for _ in range(3))
        with silent, slow_head, slow_body:
            slow_head.sendall(head.encode())
            slow_body.sendall((head + 'content-length: 100\r\n\r\n{"prompt"').encode())
            drip = threading.Thread(target=_drip, args=(slow_head,))
            drip.start()
            for _ in range(4):
                assert server.chat("Hello", max_tokens=2).status_code == 200
            for connection in (silent, slow_head, slow_body):
                assert connection.recv(1000).startswith(b"HTTP/1.1 408")
            drip.join()
        server.settle()


def _drip(connection: socket.socket) -> None:
    """A header byte now and then does not buy more time."""
    try:
        for _ in range(10):
            connection.sendall(b"x")
            time.sleep(0.1)
    except OSError:
        pass


@pytest.mark.slow
def test_a_client_that_never_reads(tiny: Tiny) -> None:
    """Data for this client waits in its own connection; its request ends when its time is over."""
    body = b'{"prompt": "Hello", "max_tokens": 900, "ignore_eos": true, "stream": true, "logprobs": 20, "n": 8}'
    head = "POST /v1/completions HTTP/1.1\r\nhost: h\r\nx-request-timeout: 1.5\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}"
    with running(tiny.engine()) as server, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(server.server.address)
        deaf.sendall(head.encode() + b"\r\n\r\n" + body)
        assert server.chat("Hello", max_tokens=2).status_code == 200
        server.settle()


def test_a_schema_that_refers_to_itself_in_many_ways_is_read_at_once() -> None:
    parts = {f"p{i}": {"anyOf": [{"$ref": f"#/$defs/p{j}"} for j in range(30)]} for i in range(30)}
    root = {"$defs": {**parts, "end": {"type": "string"}}}
    assert types_of({"$ref": "#/$defs/p0"}, root) == set()
    assert types_of({"anyOf": [{"$ref": "#/$defs/p0"}, {"$ref": "#/$defs/end"}]}, root) == {"string"}


@pytest.mark.slow
def test_cors_is_off_unless_asked_for(server: Running, tiny: Tiny) -> None:
    asked = {"origin": "http://elsewhere.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in server.client.get("/v1/models", headers=asked).headers
    with running(tiny.engine(), cors_origins=("http://elsewhere.example",)) as open_server:
        answer = open_server.client.options("/v1/completions", headers=asked)
        assert answer.headers["access-control-allow-origin"] == "http://elsewhere.example"
