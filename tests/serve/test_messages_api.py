"""``/v1/messages`` through the ``anthropic`` package: text, tools, reasoning and errors, whole and streamed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from jsonschema import validate

from tests.serve.running import MODEL, Running, Tiny, running
from tests.serve.test_openai_client import CHAT
from tests.serve.test_tools import SCHEMA, TEMPLATE, templated
from volley.serve.anthropic import MessagesRequest

WEATHER: Any = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}
TIME: Any = {"name": "time", "input_schema": {"type": "object", "properties": {}}}
USER: Any = {"role": "user", "content": "How is the weather?"}


@pytest.fixture(scope="module")
def server(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with templated(tiny, tmp_path_factory.mktemp("template")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Anthropic]:
    with connected(server) as client:
        yield client


def connected(server: Running, **options: Any) -> Anthropic:
    return Anthropic(base_url=server.url, **{"api_key": "any", "max_retries": 0, "timeout": 30, **options})


def asked(**body: Any) -> Any:
    return {"model": MODEL, "messages": [USER], "max_tokens": 300, **body}


def for_client(**body: Any) -> Any:
    """Today's client has no parameter for these fields, which the API still takes."""
    extra = {name: body.pop(name) for name in ("temperature", "seed") if name in body}
    return asked(**body, extra_body=extra)


def same(client: Anthropic, **body: Any) -> Any:
    """The message, which is the same whole and streamed."""
    whole = client.messages.create(**for_client(**body))
    with client.messages.stream(**for_client(**body)) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert strip(streamed) == strip(whole)
    return whole


def strip(message: Any) -> Any:
    own = message.model_dump(exclude={"id", "usage"})
    for block in own["content"]:
        block.pop("id", None)
    tokens = message.usage.input_tokens + message.usage.cache_read_input_tokens, message.usage.output_tokens
    return own | {"tokens": tokens}


def chat_of(**body: Any) -> list[dict[str, Any]]:
    chat = MessagesRequest.model_validate({"max_tokens": 1, **body}).as_chat()
    return [message.model_dump(exclude_defaults=True) for message in chat.messages]


def test_text_is_a_chats(drafting: Running, tiny: Tiny) -> None:
    want = tiny.answer(CHAT, max_tokens=24)
    with connected(drafting) as client:
        answer = same(client, messages=CHAT, temperature=0, max_tokens=24)
    assert [block.text for block in answer.content] == [want]
    assert (answer.role, answer.model, answer.stop_reason) == ("assistant", MODEL, "max_tokens")
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == len(tiny.plain.encode(CHAT))
    assert answer.usage.output_tokens == 24


@pytest.mark.slow
def test_a_number_of_tokens_for_which_there_is_no_room_is_no_error(client: Anthropic, tiny: Tiny) -> None:
    """Agents send the number that their own models have."""
    answer = client.messages.create(
        **for_client(max_tokens=32_000, temperature=0, stop_sequences=["\x00never"]), timeout=120
    )
    prompt = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert answer.stop_reason == "end_turn" or prompt + answer.usage.output_tokens == 1024


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_and_its_result(client: Anthropic, server: Running, choice: Any) -> None:
    tools = {"tools": [WEATHER, TIME], "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    answer = same(client, **tools, seed=5)
    (call,) = answer.content
    assert (call.type, answer.stop_reason) == ("tool_use", "tool_use")
    validate(call.input, {"weather": SCHEMA, "time": {"type": "object"}}[call.name])
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Snow."}]}
    turns = [USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    final = same(
        client, messages=turns, tools=[WEATHER, TIME], tool_choice={"type": "none"}, max_tokens=4, temperature=0
    )
    assert final.content[0].type == "text"


def test_reasoning(client: Anthropic) -> None:
    """Reasoning comes as thinking blocks within its budget, and may be sent back."""
    body = {"thinking": {"type": "enabled", "budget_tokens": 12}, "max_tokens": 40, "temperature": 0}
    answer = same(client, **body)
    assert answer.content[0].type == "thinking"
    assert 0 < answer.usage.output_tokens_details.thinking_tokens <= 20
    turns = [USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "So?"}]
    assert client.messages.create(**for_client(messages=turns, max_tokens=2)).content
    off = client.messages.create(**for_client(**body | {"thinking": {"type": "disabled"}}))
    assert [block.type for block in off.content] == ["text"]


def test_a_budget_for_a_model_that_does_not_reason_is_no_error(drafting: Running) -> None:
    with connected(drafting) as client:
        assert client.messages.create(
            **asked(thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2)
        ).content


def test_stop_sequences(client: Anthropic, tiny: Tiny) -> None:
    free = client.messages.create(**for_client(temperature=0, max_tokens=30)).content[0].text
    stops = ["\x00never", free[9:12], free[6:8]]
    answer = same(client, temperature=0, max_tokens=30, stop_sequences=stops)
    first = min(free.index(stop) for stop in stops[1:])
    assert (answer.content[0].text, answer.stop_reason) == (free[:first], "stop_sequence")
    assert free[first:].startswith(answer.stop_sequence)


def test_an_answer_that_was_begun_goes_on(client: Anthropic, server: Running) -> None:
    turns = [USER, {"role": "assistant", "content": "It is"}]
    answer = client.messages.create(**for_client(messages=turns, max_tokens=8, temperature=0))
    chat = {"messages": turns, "add_generation_prompt": False, "continue_final_message": True}
    want = server.post("chat/completions", {**chat, "max_tokens": 8, "temperature": 0}).json()
    assert answer.content[0].text == want["choices"][0]["message"]["content"]


def test_json_of_a_schema(client: Anthropic) -> None:
    answer = same(client, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, seed=2)
    validate(json.loads(answer.content[0].text), SCHEMA)


def test_turns_as_messages() -> None:
    body = {
        "system": [{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "B"}],
        "messages": [
            USER,
            {"role": "user", "content": [{"type": "text", "text": "Soon."}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "redacted_thinking", "data": "y"},
                    {"type": "text", "text": "Look."},
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Zürich"}, "caller": {"type": "direct"}},
                    {"type": "tool_use", "id": "b", "name": "time", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "Sun."},
                    {"type": "tool_result", "tool_use_id": "b", "is_error": True, "content": [{"type": "text", "text": "No."}]},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
    }  # fmt: skip
    system, user, said, sun, no, and_ = chat_of(**body)
    assert system == {"role": "system", "content": "A\nB"}
    assert user == {"role": "user", "content": "How is the weather?\nSoon."}
    assert (said["content"], said["reasoning_content"]) == ("Look.", "Hm.")
    calls = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in said["tool_calls"]]
    assert calls == [("a", "weather", '{"city": "Zürich"}'), ("b", "time", "{}")]
    assert sun == {"role": "tool", "tool_call_id": "a", "content": "Sun."}
    assert no == {"role": "tool", "tool_call_id": "b", "content": "Error: No."}
    assert and_ == {"role": "user", "content": "And?"}


def test_tokens_are_counted(client: Anthropic, server: Running) -> None:
    body: Any = {"system": "Be brief.", "tools": [WEATHER], "messages": [USER]}
    counted = client.messages.count_tokens(model=MODEL, **body).input_tokens
    answer = client.messages.create(**for_client(**body, max_tokens=1))
    assert counted == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    chat = [{"role": "system", "content": "Be brief."}, USER]
    tool = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}}
    assert counted == server.client.post("/tokenize", json={"messages": chat, "tools": [tool]}).json()["count"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content: a block of type 'image' is not read here"),
        (
            {"messages": [USER, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}]},
            "a block of type 'image' is not read here",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, "messages.0.content.0.name: "),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content must be a string or a list"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": []}, "messages: "),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        ({"temperature": 9}, "temperature: "),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name: "),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema: Field required"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is required and there are no tools"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type: Input should be 'auto', 'any', 'tool' or 'none'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is for the type tool"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: thinking that is enabled has a budget"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort: "),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "oobject"}}}}, "output_config.format"),
        ({"stop_sequences": [""]}, "stop_sequences.0: "),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "x", "input": {}}]}]},
            "send their results",
        ),
        ({"system": "x" * 5000}, "maximum context length is 1024"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers is not supported"),
        ({"response_format": {"type": "json_object"}}, "use output_config.format"),
    ],
)  # fmt: skip
def test_errors_have_anthropics_form(server: Running, body: Any, message: str) -> None:
    response = server.post("messages", asked(**body))
    assert response.status_code == 400
    assert response.json()["type"] == "error"
    error = response.json()["error"]
    assert (set(error), error["type"]) == ({"type", "message"}, "invalid_request_error")
    assert message in error["message"]


@pytest.mark.slow
def test_errors_of_other_kinds(client: Anthropic, tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as missing:
        client.messages.create(**for_client(model="claude"))
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert missing.value.request_id
    assert client.messages.with_raw_response.create(**asked(max_tokens=1), timeout=30).status_code == 200
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    with running(tiny.engine(), api_key_file=keys) as guarded:
        with connected(guarded, api_key="wrong") as wrong, pytest.raises(anthropic.AuthenticationError) as refused:
            wrong.messages.create(**for_client(max_tokens=1))
        assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        for key in ({"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}):
            with connected(guarded, **key) as known:
                assert known.messages.create(**for_client(max_tokens=1)).content
        both = {"x-api-key": "secret", "authorization": "Bearer dummy"}
        assert guarded.post("messages", asked(max_tokens=1), headers=both).status_code == 200
        assert guarded.post("messages", asked(max_tokens=1)).status_code == 401
        guarded.settle()


def test_an_error_within_a_stream(server: Running) -> None:
    body = asked(stream=True, max_tokens=900, stop_sequences=["\x00"])
    text = server.post("messages", body, headers={"x-request-timeout": "0.3"}).text
    if "message_stop" not in text:  # a stop token may end it before
        last = text.strip().split("\n\n")[-1]
        assert last.startswith("event: error\n")
        assert json.loads(last.partition("data: ")[2])["error"]["type"] == "timeout_error"
    server.settle()


def test_what_claude_code_sends_is_taken(server: Running) -> None:
    body = asked(
        metadata={"user_id": "x"},
        system=[{"type": "text", "text": "You code.", "cache_control": {"type": "ephemeral"}}],
        tools=[
            {**WEATHER, "cache_control": {"type": "ephemeral"}},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        thinking={"type": "enabled", "budget_tokens": 31_999},
        context_management={"edits": []},
        max_tokens=2,
        num_ctx=4,
    )
    response = server.client.post("/v1/messages?beta=true", json=body, headers={"anthropic-version": "2023-06-01"})
    assert response.status_code == 200, response.text
    assert response.headers["x-volley-ignored"].split(", ") == ["num_ctx", "tools.web_search_20250305"]
    assert response.headers["request-id"] == response.headers["x-request-id"]


@pytest.mark.slow
def test_a_server_without_chat_template_counts_tools(tiny: Tiny, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE.replace("<tool_call>", "<call>"))
    with running(tiny.engine(), chat_template=file) as server:
        assert (
            server.post("messages/count_tokens", {"messages": [USER], "tools": [WEATHER]}).json()["input_tokens"] > 100
        )
        refused = server.post("messages", asked(tools=[WEATHER]))
        assert "not known how this model writes tool calls" in refused.json()["error"]["message"]


def test_the_models_are_listed(client: Anthropic) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.type, card.display_name) == (MODEL, "model", MODEL)
    assert card.created_at.year > 2000
    assert client.models.retrieve(MODEL) == card
