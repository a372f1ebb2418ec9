"""``client.responses`` of the ``openai`` package: text, tools, schemas and reasoning, whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import validate
from openai import OpenAI

from tests.serve.running import MODEL, Running, Tiny, openai_client
from tests.serve.test_openai_client import CHAT
from tests.serve.test_tools import SCHEMA, Weather, templated
from volley.serve.responses import MessageItem, ReasoningItem, ResponsesRequest, _messages

WEATHER: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 12}


@pytest.fixture(scope="module")
def server(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with templated(tiny, tmp_path_factory.mktemp("template")) as server:
        yield server


def test_text_is_a_chats(drafting: Running, tiny: Tiny) -> None:
    want = tiny.answer(CHAT, max_tokens=24)
    with openai_client(drafting) as client:
        answer = client.responses.create(model=MODEL, input="Hello", temperature=0, max_output_tokens=24)
        assert answer.output_text == want
        assert answer.status == "incomplete"
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert answer.usage is not None
        assert answer.usage.output_tokens == 24
        items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
        assert (
            client.responses.create(model=MODEL, input=items, temperature=0, max_output_tokens=24).output_text == want
        )
        told = client.responses.create(
            model=MODEL, input="Hello", instructions="Be brief.", temperature=0, max_output_tokens=24
        )
        assert told.output_text == tiny.answer([{"role": "system", "content": "Be brief."}, *CHAT], max_tokens=24)


def streamed(client: OpenAI, **body: Any) -> tuple[Any, list[Any]]:
    events = list(client.responses.create(model=MODEL, stream=True, **body))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    return events[-1].response, events


def test_a_stream_says_the_same(client: OpenAI) -> None:
    body = {"input": "Hello", "temperature": 0, "max_output_tokens": 24}
    whole = client.responses.create(model=MODEL, **body)
    last, events = streamed(client, **body)
    assert last.output_text == whole.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert [event.type for event in events if "delta" not in event.type] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert whole.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens


@pytest.mark.slow
def test_the_whole_loop_with_tools(client: OpenAI, server: Running) -> None:
    given: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    forced = {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 200}
    for seed in range(2):
        answer = client.responses.create(model=MODEL, input=given, **forced, extra_body={"seed": seed, **THINKING})
        assert answer.status == "completed"
        reasoning, call = answer.output
        assert reasoning.type == "reasoning"
        assert call.type == "function_call"
        validate(json.loads(call.arguments), SCHEMA)
        given += answer.output
        given.append({"type": "function_call_output", "call_id": call.call_id, "output": "Sun."})
    end = client.responses.create(model=MODEL, input=given, max_output_tokens=4, tools=[WEATHER])
    assert end.output[0].type == "message"
    last, events = streamed(client, input="Weather?", **forced, extra_body={"seed": 0, **THINKING})
    pieces = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 2
    assert "".join(event.delta for event in pieces) == last.output[1].arguments
    thoughts = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert thoughts == last.output[0].content[0].text
    assert last.usage.output_tokens_details.reasoning_tokens > 8


def test_some_of_the_tools_may_be_allowed(client: OpenAI) -> None:
    other = {"type": "function", "name": "time"}
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    body: Any = {"tools": [WEATHER, other], "tool_choice": choice, "parallel_tool_calls": False}
    answer = client.responses.create(model=MODEL, input="Weather?", max_output_tokens=200, **body)
    (call,) = answer.output
    assert call.type == "function_call"
    assert call.name == "weather"
    assert answer.tool_choice.model_dump() == choice


def test_what_asks_for_nothing_is_taken(client: OpenAI) -> None:
    body: Any = {"text": {"verbosity": "medium"}, "reasoning": {"effort": "low", "summary": "auto"}, "store": False}
    body |= {"truncation": "disabled", "include": ["reasoning.encrypted_content"], "top_logprobs": 0}
    assert client.responses.create(model=MODEL, input="Hello", max_output_tokens=4, **body).output_text


def test_a_schema_for_the_text(client: OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA, "strict": True}}
    answer = client.responses.create(model=MODEL, input="Hello", text=form, max_output_tokens=200)
    validate(json.loads(answer.output_text), SCHEMA)
    assert answer.status == "completed"


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_what_the_client_has_parsed_comes_back(client: OpenAI) -> None:
    answer = client.responses.parse(model=MODEL, input="Hello", text_format=Weather, max_output_tokens=200)
    assert answer.output_parsed is not None
    assert json.loads(answer.output_text) == answer.output_parsed.model_dump()
    with client.responses.stream(model=MODEL, input="Hello", text_format=Weather, max_output_tokens=200) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Weather)
    hello: Any = {"role": "user", "content": "Hello"}
    for items in (answer.output, [item.model_dump() for item in answer.output]):
        assert (
            client.responses.create(model=MODEL, input=[hello, *items, hello], max_output_tokens=2).output_text
            is not None
        )


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"store": True}, "store", "set store to false"),
        ({"background": True}, "background", "leave it out"),
        ({"include": ["message.output_text.logprobs"]}, "include", "/v1/chat/completions"),
        ({"diffusion": {}}, "diffusion", "diffusion"),
        ({"tools": [{"type": "mcp"}]}, "tools.0.type", "function"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"response_format": {"type": "json_object"}}, "response_format", "use text.format"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs", "use text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "medium"),
        ({"input": []}, "input", "at least 1"),
        ({"input": "x" * 5000}, "input", "tokens; you asked for 5020 in the input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "'message'"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort", "none"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "oobject"}}}}, "text.format", "oobject"),
        ({"model": "gpt-9"}, "model", "does not exist"),
    ],
)
def test_bad_fields_are_named(server: Running, body: Any, param: str, message: str) -> None:
    response = server.post("responses", {"input": "Hello", **body})
    assert response.status_code in (400, 404)
    error = response.json()["error"]
    assert message in error["message"]
    assert (error["param"] or "").startswith(param)


def test_custom_calls_of_a_conversation_are_read(server: Running) -> None:
    """As a function's, whose argument is the text."""
    patch = '*** Begin Patch\n"ü"'
    items: list[Any] = [
        {"role": "user", "content": "Patch it."},
        {
            "type": "custom_tool_call",
            "id": "1",
            "call_id": "a",
            "name": "apply_patch",
            "input": patch,
            "status": "completed",
        },
        {"type": "custom_tool_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "Done."}]},
    ]
    chat = ResponsesRequest.model_validate({"input": items}).as_chat()
    (call,) = chat.messages[1].tool_calls
    assert (call.id, call.function.name) == ("a", "apply_patch")
    assert json.loads(call.function.arguments) == {"input": patch}
    assert (chat.messages[2].tool_call_id, chat.messages[2].for_template()["content"]) == ("a", "Done.")
    assert server.post("responses", {"input": items, "max_output_tokens": 2}).status_code == 200
    wrong = server.post("responses", {"input": [{"type": "custom_tool_call", "call_id": "a", "name": "x"}]})
    assert wrong.json()["error"]["param"] == "input.0.input"


def test_what_codex_sends_is_taken(server: Running) -> None:
    tools = [
        {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}},
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
    ]
    text = {"type": "input_text", "text": "Hello", "prompt_cache_breakpoint": {"mode": "explicit"}}
    called = {"type": "function_call", "call_id": "a", "name": "no such tool", "arguments": "{}"}
    items = [
        {"role": "user", "content": [text]},
        called,
        {"type": "function_call_output", "call_id": "a", "output": "x"},
    ]
    body = {"client_metadata": {"session_id": "1"}, "tool_choice": "auto", "max_output_tokens": 2}
    response = server.post("responses", {"input": items, "tools": tools, **body})
    assert response.status_code == 200, response.text
    assert [tool["name"] for tool in response.json()["tools"]] == ["shell"]


def test_what_was_thought_in_several_items_of_a_turn_stays() -> None:
    parts = [[{"type": "reasoning_text", "text": text}] for text in ("a", "b")]
    thought = [ReasoningItem.model_validate({"type": "reasoning", "content": part}) for part in parts]
    said = MessageItem.model_validate({"role": "assistant", "content": "well"})
    (message,) = _messages([thought[0], said, thought[1]], None)
    assert (message["reasoning_content"], message["content"]) == ("ab", "well")
