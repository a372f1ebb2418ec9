"""Tools and reasoning through the ``openai`` client: the whole loop, with a model that grammars have to hold by the hand."""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from jsonschema import validate
from openai import OpenAI

from tests.serve.running import MODEL, Running, Tiny, running
from tests.serve.test_openai_client import openai_client
from volley import SamplingParams
from volley.chat import render_chat
from volley.decode.grammars import Grammars
from volley.decode.thinking import ThinkingBudget
from volley.serve.calls import grammar_of_answer
from volley.serve.formats import load_format
from volley.serve.messages import Tool, Tools

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %} {{ tool | tojson }}{% endfor %} Call them in <tool_call>."
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}: "
    "{{ m.content }}{% for call in m.tool_calls %}<tool_call>{{ call.function.name }}({{ call.function.arguments.city }})"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
CHAT: list[Any] = [{"role": "user", "content": "How is the weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}}
TIME: Any = {"type": "function", "function": {"name": "time"}}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@contextmanager
def templated(tiny: Tiny, folder: Path) -> Iterator[Running]:
    """A server whose chat template knows tools; it must be left idle."""
    file = folder / "chat.jinja"
    file.write_text(TEMPLATE)
    with running(tiny.engine(), chat_template=file) as server:
        yield server
        server.settle()


@pytest.fixture(scope="module")
def server(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with templated(tiny, tmp_path_factory.mktemp("template")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    with openai_client(server) as client:
        yield client


def ask(client: OpenAI, **body: Any) -> Any:
    asked = {"model": MODEL, "messages": CHAT, "tools": [WEATHER, TIME], "max_tokens": 300, "seed": 1, **body}
    return client.chat.completions.create(**asked)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_is_valid_and_streams_as_it_is_written(client: OpenAI, choice: Any, temperature: float) -> None:
    asked = {"tool_choice": choice, "parallel_tool_calls": False, "temperature": temperature}
    (whole,) = ask(client, **asked).choices
    assert whole.message.content is None
    assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop")
    (call,) = whole.message.tool_calls
    if call.function.name == "weather":
        validate(json.loads(call.function.arguments), SCHEMA)
    else:
        assert choice == "required"
        assert isinstance(json.loads(call.function.arguments), dict)
    name, arguments, deltas, reasons = "", "", 0, []
    for chunk in ask(client, **asked, stream=True):
        (choice_,) = chunk.choices
        reasons.append(choice_.finish_reason)
        for part in choice_.delta.tool_calls or []:
            assert part.index == 0
            assert not choice_.delta.content
            name += part.function.name or ""
            arguments += part.function.arguments or ""
            deltas += 1
    assert (name, arguments) == (call.function.name, call.function.arguments)
    assert reasons == [None] * (len(reasons) - 1) + [whole.finish_reason]
    assert deltas > 2 or name == "time", "arguments come before the call is complete"


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_some_of_the_tools_may_be_allowed(client: OpenAI, server: Running) -> None:
    answer = ask(client, tool_choice=allowed("required", "weather"), n=2, parallel_tool_calls=False, temperature=1)
    for choice in answer.choices:
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        validate(json.loads(call.function.arguments), SCHEMA)
        assert choice.finish_reason == "tool_calls"
    (choice,) = ask(client, tool_choice=allowed("auto", "time"), max_tokens=4).choices
    assert choice.message.content, "nothing forces a call"
    body = {"messages": CHAT, "tools": [WEATHER, TIME], "tool_choice": allowed("auto", "time")}
    tokens = server.client.post("/tokenize", json=body).json()["tokens"]
    text = server.engine.tokenizer.decode(tokens)
    assert '"name": "time"' in text
    assert '"name": "weather"' not in text, "what may not be called is not shown"


def test_several_answers_and_several_calls(client: OpenAI) -> None:
    answer = ask(client, tool_choice="required", n=2, tools=[WEATHER], max_tokens=260, extra_body={"ignore_eos": True})
    most = 0
    for choice in answer.choices:
        calls = choice.message.tool_calls
        whole = calls if choice.finish_reason == "tool_calls" else calls[:-1]
        most = max(most, len(whole))
        for call in whole:
            validate(json.loads(call.function.arguments), SCHEMA)
        assert len({call.id for call in calls}) == len(calls)
    assert most > 1, "some answer has several"


def test_the_whole_loop(client: OpenAI, server: Running) -> None:
    """Ask, call, answer the call, and ask on, with the client's own objects."""
    messages = list(CHAT)
    for _ in range(2):
        (choice,) = ask(
            client, messages=messages, tool_choice="required", tools=[WEATHER], parallel_tool_calls=False
        ).choices
        messages.append(choice.message)
        for call in choice.message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"Sun in {city}."})
    (last,) = ask(client, messages=messages, tool_choice="none", max_tokens=5).choices
    assert last.message.tool_calls is None
    sent = [m if isinstance(m, dict) else m.to_dict() for m in messages]
    sent[1] |= {"provider_specific_fields": {"refusal": None}, "annotations": []}  # as litellm sends an answer back
    tokens = server.client.post("/tokenize", json={"messages": sent, "tools": [WEATHER]}).json()["tokens"]
    text = server.engine.tokenizer.decode(tokens)
    assert '"name": "weather"' in text, "the template is shown the tools"
    assert f"<tool_call>weather({city})</tool_call>" in text, "and the arguments as an object"
    assert f"tool weather: Sun in {city}." in text, "and whose result it is"


def test_what_the_model_calls_by_itself_is_found(client: OpenAI) -> None:
    """A random model calls nothing; an answer that a grammar dictates stands for one that does."""
    said = 'Let me see. <tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>'
    extra = {"guided_choice": [said]}
    answer = client.completions.create(model=MODEL, prompt="x", max_tokens=200, extra_body=extra)
    assert answer.choices[0].text == said, "a text completion has no calls"
    (choice,) = client.chat.completions.create(model=MODEL, messages=CHAT, extra_body=extra).choices
    assert choice.message.content == said, "nor has a chat without tools"
    (choice,) = ask(client, tools=[WEATHER], extra_body={"logit_bias": {}} | extra).choices
    assert choice.message.tool_calls or choice.message.content == said


def test_strict_tools_bind_calls_wherever_they_begin(server: Running) -> None:
    strict = Tool.model_validate({"type": "function", "function": {**WEATHER["function"], "strict": True}})
    engine = server.engine
    grammar = grammar_of_answer(load_format("hermes"), Tools(tools=[strict]), None, engine.tokenizer, is_thinking=False)
    assert grammar is not None
    call = '<tool_call>\n{"name": "weather", "arguments": {"city":"Bern","days":3}}\n</tool_call>'
    for text, is_allowed in (
        ("Sun < rain, <tool>.", True),
        (f"See: {call} and {call}", True),
        (call.replace("Bern", "Oslo"), False),
        (call.replace("weather", "time"), False),
        (f"See: {call.replace('3', 'null')}", False),
    ):
        matcher = engine.grammars.compile(grammar).deep_copy()
        token_ids = engine.encode(text)
        assert (matcher.validate_tokens(token_ids) == len(token_ids)) is is_allowed, text
    loose = Tools(tools=[Tool.model_validate(WEATHER)])
    assert grammar_of_answer(load_format("hermes"), loose, None, engine.tokenizer, is_thinking=False) is None


@pytest.mark.parametrize(
    ("name", "special", "call", "is_alone"),
    [
        ("mistral", True, '[TOOL_CALLS]weather[ARGS]{"city":"Bern","days":3}', False),
        ("mistral", False, '[TOOL_CALLS]weather[ARGS]{"city":"Bern","days":3}', False),
        ("llama3", False, '{"name": "weather", "parameters": {"city":"Bern","days":3}}', True),
    ],
)
def test_strict_tools_of_other_formats(tiny: Tiny, name: str, special: bool, call: str, is_alone: bool) -> None:
    tokenizer = copy.deepcopy(tiny.plain.tokenizer)
    if special:
        tokenizer.add_special_tokens({"extra_special_tokens": ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"]})
    strict = Tool.model_validate({"type": "function", "function": {**WEATHER["function"], "strict": True}})
    grammar = grammar_of_answer(load_format(name), Tools(tools=[strict]), None, tokenizer, is_thinking=False)
    assert grammar is not None
    grammars = Grammars(tokenizer, len(tokenizer), {tokenizer.eos_token_id})
    texts = {"": True, "Sun [x]": True, ' {"x": 1}': True, "[THINK]Is it?[/THINK]Yes.": True, call: True}
    texts |= {
        call.replace("Bern", "Oslo"): False,
        call.replace("weather", "time"): False,
        call.replace("3", "null"): False,
    }
    texts |= {f"See: {call}": True, f"See: {call.replace('Bern', 'Oslo')}": is_alone, f"See: {call}{call}": True}
    for text, is_allowed in texts.items():
        rule, token_ids = grammars.rule(grammar), tokenizer.encode(text, add_special_tokens=False)
        assert (rule.num_allowed(token_ids) == len(token_ids)) is is_allowed, text


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_apart_and_ends_at_its_budget(client: OpenAI, tiny: Tiny, stream: bool) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 20}
    asked = {"model": MODEL, "messages": CHAT, "max_tokens": 60, "temperature": 0, "extra_body": extra}
    close = tiny.plain.tokenizer("</think>")["input_ids"]
    rules = (lambda *_: ThinkingBudget([1], close, 20, is_open=True),)
    prompt = render_chat(tiny.plain.tokenizer, CHAT, template=TEMPLATE, variables={"enable_thinking": True})
    (plain,) = tiny.plain.generate(prompt, SamplingParams(max_tokens=60, rules=rules))
    reasoning, found, content = plain.text.partition("</think>")
    assert found
    if stream:
        texts = {"reasoning_content": "", "content": ""}
        for chunk in client.chat.completions.create(**asked, stream=True):
            delta = chunk.choices[0].delta.model_dump(exclude_none=True)
            for name in texts.keys() & delta.keys():
                texts[name] += delta[name]
        assert texts == {"reasoning_content": reasoning.strip(), "content": content.lstrip()}
        return
    answer = client.chat.completions.create(**asked)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == (reasoning.strip(), content.lstrip())
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 20 + len(close)
    again = [*CHAT, message, *CHAT]
    assert client.chat.completions.create(model=MODEL, messages=again, max_tokens=1).choices


def test_effort_none_switches_reasoning_off(client: OpenAI, server: Running) -> None:
    extra = {"chat_template_kwargs": {}, "reasoning_effort": "none"}
    tokens = server.client.post("/tokenize", json={"messages": CHAT, **extra}).json()["tokens"]
    assert "<think>" not in server.engine.tokenizer.decode(tokens)
    extra = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "high"}
    tokens = server.client.post("/tokenize", json={"messages": CHAT, **extra}).json()["tokens"]
    assert server.engine.tokenizer.decode(tokens).endswith("<think>\n")
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=4, reasoning_effort="none")
    assert answer.choices[0].message.content is not None


def test_a_schema_begins_after_reasoning(client: OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA, "strict": True}}
    extra = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 12}
    (choice,) = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=200, response_format=form, extra_body=extra, seed=4
    ).choices
    assert choice.finish_reason == "stop"
    assert choice.message.reasoning_content
    validate(json.loads(choice.message.content or ""), SCHEMA)


def test_a_forced_call_may_be_thought_about(client: OpenAI) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 12}
    (choice,) = ask(client, tool_choice=NAMED, extra_body=extra).choices
    assert choice.message.reasoning_content
    validate(json.loads(choice.message.tool_calls[0].function.arguments), SCHEMA)


ASKED = {"messages": CHAT, "tools": [WEATHER]}
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (
            {**ASKED, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "no tool is named 'x'",
        ),
        ({"messages": CHAT, "tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({**ASKED, "tool_choice": "never"}, "tool_choice", "none, auto, required"),
        ({**ASKED, "tool_choice": allowed("auto", "weather", "x")}, "tool_choice", "no tool is named 'x'"),
        ({**ASKED, "tool_choice": allowed("auto")}, "tool_choice", "allowed_tools"),
        ({**ASKED, "tools": [WEATHER, WEATHER]}, "tools", "same name"),
        ({**ASKED, "tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "required"),
        ({**ASKED, "tools": [{**WEATHER, "type": "web"}]}, "tools.0.type", "function"),
        ({**ASKED, "tool_choice": NAMED, "response_format": {"type": "json_object"}}, "tools", "leave one of both out"),
        (
            {
                "messages": CHAT,
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "oobject"}}}],
            },
            "tools",
            "oobject",
        ),
        ({"messages": [*CHAT, {"role": "tool", "content": "x"}]}, "messages", "tool_call_id"),
        ({"messages": [*CHAT, {"role": "user"}]}, "messages", "no content"),
        ({"messages": [*CHAT, {"role": "user", "content": "", "tool_calls": [CALL]}]}, "messages", "assistant"),
        (
            {
                "messages": [
                    *CHAT,
                    {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1"}}]},
                ]
            },
            "messages",
            "not a JSON object",
        ),
        ({"messages": CHAT, "reasoning_effort": "some"}, "reasoning_effort", "'none'"),
        ({"messages": CHAT, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "cannot set tools"),
        ({"messages": CHAT, "chat_template_kwargs": {"conversation": 1}}, "chat_template_kwargs", "cannot set"),
        ({"messages": CHAT, "thinking_token_budget": -1}, "thinking_token_budget", "greater than or equal to 0"),
    ],
)
def test_bad_fields_are_named(server: Running, body: Any, param: str, message: str) -> None:
    response = server.post("chat/completions", body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"]
    assert error["param"] == param


def test_a_notation_that_is_not_json_is_replaced_when_a_call_is_forced(tiny: Tiny, tmp_path: Path) -> None:
    """Qwen 3.5's, here. It reasons as it always does."""
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE + "{# <function= #}")
    with running(tiny.engine(), chat_template=file) as server, openai_client(server) as client:
        assert server.service.form is not None
        assert server.service.form.name == "qwen3_5"
        extra = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 12}
        (choice,) = ask(client, tool_choice=NAMED, extra_body=extra).choices
        assert choice.message.reasoning_content
        validate(json.loads(choice.message.tool_calls[0].function.arguments), SCHEMA)


def test_a_model_without_a_format_calls_when_it_is_forced_to(tiny: Tiny, tmp_path: Path) -> None:
    with running(tiny.engine()) as server, openai_client(server) as client:
        with pytest.raises(openai.BadRequestError, match="answer-format") as error:
            ask(client)
        assert error.value.param == "tools"
        (choice,) = ask(client, tool_choice=NAMED).choices
        validate(json.loads(choice.message.tool_calls[0].function.arguments), SCHEMA)
        response = server.chat("x", thinking_token_budget=3)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "thinking_token_budget"
    with (
        running(tiny.engine(), answer_format="hermes") as server,
        openai_client(server) as client,
        pytest.raises(openai.BadRequestError, match="chat-template"),
    ):
        ask(client)
