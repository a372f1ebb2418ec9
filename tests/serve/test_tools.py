"""Tools and reasoning through the ``openai`` client: the whole loop, with a model that grammars have to hold by the hand."""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from jsonschema import validate
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

from tests.serve.notations import call_text
from tests.serve.running import MODEL, Running, Tiny, openai_client, running
from volley import Grammar, SamplingParams
from volley.chat import render_chat
from volley.decode.grammars import Grammars
from volley.decode.thinking import ThinkingBudget
from volley.serve.calls import grammar_of_answer
from volley.serve.formats import load_format
from volley.serve.messages import Tool, Tools
from volley.serve.parsing import AnswerParser

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


CALLING: dict[str, Any] = {"model": MODEL, "messages": CHAT, "tools": [WEATHER, TIME], "max_tokens": 300, "seed": 1}


def ask(client: OpenAI, **body: Any) -> Any:
    return client.chat.completions.create(**{**CALLING, **body})


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


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Bern", "Rome"]


@pytest.mark.parametrize("skips", [True, False])
def test_a_grammar_that_is_complete_ends_with_its_last_token(tiny: Tiny, skips: bool) -> None:
    """If special tokens are shown, as many formats need, only the token that ends a text is left out."""
    params = SamplingParams(grammar=Grammar.choice(['{"a": 1}']), max_tokens=60, skip_special_tokens=skips)
    (result,) = tiny.plain.generate("x", params)
    assert (result.text, result.finish_reason) == ('{"a": 1}', "stop")


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_what_the_client_has_parsed_comes_back(client: OpenAI) -> None:
    """``parse`` and the stream helper put their own objects into messages, and clients send these as they are."""
    asked: Any = {"model": MODEL, "max_tokens": 200, "seed": 1}
    form = client.chat.completions.parse(messages=CHAT, response_format=Weather, **asked).choices[0].message
    assert form.parsed is not None
    assert json.loads(form.content or "") == form.parsed.model_dump()
    tools: Any = {
        "tools": [openai.pydantic_function_tool(Weather)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    call = client.chat.completions.parse(messages=CHAT, **tools, **asked).choices[0].message
    assert call.tool_calls is not None
    assert isinstance(call.tool_calls[0].function.parsed_arguments, Weather)
    with client.chat.completions.stream(messages=CHAT, **tools, **asked) as stream:
        (streamed_,) = stream.get_final_completion().choices
    assert streamed_.message.tool_calls is not None
    assert streamed_.message.tool_calls[0].function.parsed_arguments == call.tool_calls[0].function.parsed_arguments
    result: Any = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": [{"type": "text", "text": "Sun."}]}
    for said in ([form, *CHAT], [call, result], [call.model_dump(), result]):
        answer = client.chat.completions.create(messages=[*CHAT, *said], **{**asked, "max_tokens": 2})
        assert answer.choices[0].finish_reason in ("length", "stop")


def test_what_the_model_calls_by_itself_is_found(client: OpenAI) -> None:
    """A random model calls nothing; an answer that a grammar dictates stands for one that does."""
    said = 'Let me see. <tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>'
    extra = {"structured_outputs": {"choice": [said]}}
    answer = client.completions.create(model=MODEL, prompt="x", max_tokens=200, extra_body=extra)
    assert answer.choices[0].text == said, "a text completion has no calls"
    (choice,) = client.chat.completions.create(model=MODEL, messages=CHAT, extra_body=extra).choices
    assert choice.message.content == said, "nor has a chat without tools"
    (choice,) = ask(client, tools=[WEATHER], extra_body={"logit_bias": {}} | extra).choices
    assert choice.message.tool_calls or choice.message.content == said


def allows(grammar: Grammar | None, tokenizer: Any, text: str) -> bool:
    """Return whether a grammar allows the whole text."""
    assert grammar is not None
    rule = Grammars(tokenizer, len(tokenizer), {tokenizer.eos_token_id}).rule(grammar)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return rule.num_allowed(token_ids) == len(token_ids)


def test_a_forced_call_may_hold_any_words(tiny: Tiny) -> None:
    """Also those that stand for something while its grammar is made."""
    words = {"type": "object", "properties": {"when": {"enum": ["BEFORE", "AFTER"]}}, "required": ["when"]}
    tool = Tool.model_validate({"type": "function", "function": {"name": "BEFORE", "parameters": words}})
    offered, tokenizer = Tools(tools=[tool], tool_choice="required"), tiny.plain.tokenizer
    grammar = grammar_of_answer(load_format("hermes"), offered, None, tokenizer, is_thinking=False)
    assert allows(grammar, tokenizer, '<tool_call>\n{"name": "BEFORE", "arguments": {"when":"BEFORE"}}\n</tool_call>')


MARKERS = {
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
    "mistral_list": ["[TOOL_CALLS]"],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"],
    "gpt_oss": ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>"],
}
"""Special tokens of models of these formats."""
IN_FORM = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city":"Bern","days":3}}\n</tool_call>',
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city":"Bern","days":3}',
    "llama3": '{"name": "weather", "parameters": {"city":"Bern","days":3}}',
    "mistral_list": '[TOOL_CALLS][{"name": "weather", "arguments": {"city":"Bern","days":3}}]',
    "gpt_oss": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Bern","days":3}',
}
"""A call in each format."""


def with_markers(tiny: Tiny, name: str) -> Any:
    """Return a tokenizer that has a format's special tokens."""
    tokenizer = copy.deepcopy(tiny.plain.tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": MARKERS.get(name, [])})
    return tokenizer


@pytest.mark.parametrize("with_tools", [False, True])
def test_a_form_of_gpt_oss_is_an_answer_of_its_own(tiny: Tiny, with_tools: bool) -> None:
    """The model may think first; its answer is opened, otherwise it would not be found."""
    tokenizer = with_markers(tiny, "gpt_oss")
    tools = Tools(tools=[Tool.model_validate(WEATHER)] if with_tools else [])
    own = Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    grammar = grammar_of_answer(load_format("gpt_oss"), tools, own, tokenizer, is_thinking=False)
    final, thought = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    texts = {final + '{"a":1}': True, thought + final + '{"a":1}': True, '{"a":1}': False, final + "Hm.": False}
    texts |= {IN_FORM["gpt_oss"]: with_tools}
    for text, want in texts.items():
        assert allows(grammar, tokenizer, text) == want, text
    parser = AnswerParser(load_format("gpt_oss"), "<|start|>assistant", with_calls=False)
    parts = [*parser.feed(thought + final + '{"a":1}'), *parser.finish()]
    assert "".join(part.text for part in parts if part.kind == "content") == '{"a":1}'


def test_a_form_goes_on_in_an_answer_that_the_prompt_has_opened(tiny: Tiny) -> None:
    form, own = load_format("gpt_oss"), Grammar.choice(["Bern", "Rome"])
    final = "<|start|>assistant<|channel|>final<|message|>Be"
    opened = AnswerParser(form, final, with_calls=False)
    assert opened.is_answering
    assert not AnswerParser(form, "<|start|>assistant", with_calls=False).is_answering
    for tools in (Tools(), Tools(tools=[Tool.model_validate(WEATHER)])):
        found = grammar_of_answer(form, tools, own, tiny.plain.tokenizer, is_thinking=False, is_answering=True)
        assert found is own


def test_an_answer_may_be_opened_where_nothing_is_known_of_reasoning(tiny: Tiny) -> None:
    form, tokenizer = replace(load_format("gpt_oss"), thinking=None), tiny.plain.tokenizer
    grammar = grammar_of_answer(form, Tools(), Grammar.choice(["Bern", "Rome"]), tokenizer, is_thinking=False)
    assert allows(grammar, tokenizer, "<|channel|>final<|message|>Rome")


def in_strict(tool: Any, **changes: Any) -> Any:
    return {"type": "function", "function": {**tool["function"], "strict": True, **changes}}


@pytest.mark.parametrize(
    ("name", "is_special"),
    [
        ("hermes", False),
        ("mistral", True),
        ("mistral", False),
        ("mistral_list", True),
        ("llama3", False),
        ("gpt_oss", True),
    ],
)
def test_strict_tools_bind_calls_wherever_they_begin(tiny: Tiny, name: str, is_special: bool) -> None:
    tokenizer = with_markers(tiny, name) if is_special else tiny.plain.tokenizer
    loose, strict = (Tools(tools=[Tool.model_validate(tool)]) for tool in (WEATHER, in_strict(WEATHER)))
    assert grammar_of_answer(load_format(name), loose, None, tokenizer, is_thinking=False) is None
    grammar = grammar_of_answer(load_format(name), strict, None, tokenizer, is_thinking=False)
    call = IN_FORM[name]
    texts = {"": True, "Sun [x]": True, ' {"x": 1}': True, call: True}
    texts |= {
        call.replace("Bern", "Oslo"): False,
        call.replace("weather", "time"): False,
        call.replace("3", "null"): False,
    }
    is_alone = name == "llama3"
    if is_alone:  # the other way in which these models begin a call is not let through unbound
        texts[call.replace('{"name"', '{"type": "function", "name"')] = False
    match name:
        case "gpt_oss":
            texts["<|channel|>analysis<|message|>Is it?<|end|><|start|>assistant" + call] = True
            texts[call + "<|call|>"] = True
            texts["<|channel|>final<|message|>Sun to=functions.x, and {rain}."] = True
            first = ' to=functions.weather<|channel|>commentary json<|message|>{"city":"Bern","days":3}'
            texts |= {first: True, first.replace("Bern", "Oslo"): False, first.replace("weather", "time"): False}
        case "mistral":
            texts["[THINK]Is it?[/THINK]Yes."] = True
        case "hermes":
            texts["Sun < rain, <tool>."] = True
    if name != "gpt_oss":
        texts |= {f"See: {call}": True, f"See: {call.replace('Bern', 'Oslo')}": is_alone, f"See: {call}{call}": True}
    for text, is_allowed in texts.items():
        assert allows(grammar, tokenizer, text) is is_allowed, text


def test_calls_in_other_notations_are_let_through_beside_a_form(tiny: Tiny) -> None:
    """Only calls whose arguments are JSON are bound."""
    own = Grammar.choice(["Bern", "Rome"])
    for name in ("qwen3_5", "glm4_5", "gemma4"):
        tokenizer = with_markers(tiny, name)
        tools = Tools(tools=[Tool.model_validate(in_strict(WEATHER))])
        assert grammar_of_answer(load_format(name), tools, None, tokenizer, is_thinking=False) is None
        grammar = grammar_of_answer(load_format(name), tools, own, tokenizer, is_thinking=False)
        call = call_text(name, "weather", {"city": "Oslo", "days": 3})
        for text, is_allowed in ((call, True), (call + "Oslo", False), ("Bern", True), ("Oslo", False)):
            assert allows(grammar, tokenizer, text) is is_allowed, text


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_model_without_a_format_calls_when_it_is_forced_to(tiny: Tiny, tmp_path: Path) -> None:
    with running(tiny.engine()) as server, openai_client(server) as client:
        with pytest.raises(openai.BadRequestError, match="answer-format") as error:
            ask(client)
        assert error.value.param == "tools"
        answer = client.chat.completions.with_raw_response.create(**CALLING, tool_choice=NAMED)
        assert answer.headers["x-volley-ignored"] == "tools"  # the template shows them to no model
        (choice,) = answer.parse().choices
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
