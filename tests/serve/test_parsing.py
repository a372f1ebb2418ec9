"""Answers of every model family, taken apart whole and in pieces of any size."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from volley.errors import ConfigError
from volley.serve.formats import format_of, load_format
from volley.serve.parsing import AnswerParser, CallReader

CHATML, LLAMA = "<|im_start|>assistant\n", "<|start_header_id|>assistant<|end_header_id|>\n\n"
OSS = "<|start|>assistant"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
WEATHER["function"]["parameters"]["properties"] = {  # type: ignore[index]
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "where": {"type": "object"},
}
ODD = {"city": 'Zü"rich {[,\\', "days": 3, "where": {"a": [1, {"b": "}"}]}}
Answer = tuple[str, str, list[tuple[str, Any]]]


def take_apart(form: str, prompt: str, pieces: list[str], *, with_calls: bool = True) -> Answer:
    """Reasoning, content, and the calls with their arguments decoded."""
    parser = AnswerParser(load_format(form), prompt, [WEATHER], with_calls=with_calls)
    texts = {"reasoning": "", "content": ""}
    calls: list[tuple[str, str]] = []
    for parts in [*map(parser.feed, pieces), parser.finish()]:
        for part in parts:
            if part.kind == "call":
                assert part.index == len(calls)
                calls.append((part.text, ""))
            elif part.kind == "arguments":
                assert part.index == len(calls) - 1
                calls[-1] = calls[-1][0], calls[-1][1] + part.text
            else:
                texts[part.kind] += part.text
    assert parser.num_calls == len(calls)
    return texts["reasoning"], texts["content"], [(name, json.loads(arguments)) for name, arguments in calls]


def hermes(*calls: tuple[str, Any]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(own)}}}\n</tool_call>' for name, own in calls
    )


def qwen_xml(city: str, days: int) -> str:
    return (
        f"<tool_call>\n<function=weather>\n<parameter=city>\n{city}\n</parameter>\n<parameter=days>\n{days}\n</parameter>\n"
        "</function>\n</tool_call>"
    )


CASES: list[tuple[str, str, str, Answer]] = [
    ("hermes", CHATML, "Hello.\n", ("", "Hello.\n", [])),
    ("hermes", CHATML, " <b> 1 < 2\n\n", ("", " <b> 1 < 2\n\n", [])),
    ("hermes", CHATML, "<think>\nHm, 1.\n</think>\n\nTwo.", ("Hm, 1.", "Two.", [])),
    ("hermes", CHATML + "<think>\n", "Hm.\n</think>\n\nTwo.", ("Hm.", "Two.", [])),
    ("hermes", CHATML + "<think>\n\n</think>\n\n", "\nTwo.", ("", "Two.", [])),
    ("hermes", CHATML + "<think>\n", "Never done", ("Never done", "", [])),
    ("hermes", CHATML, "Look:\n" + hermes(("weather", ODD)), ("", "Look:", [("weather", ODD)])),
    (
        "hermes",
        CHATML,
        hermes(("weather", {}), ("time", {"in": []})),
        ("", "", [("weather", {}), ("time", {"in": []})]),
    ),
    ("hermes", CHATML, "<tool_call>\nno JSON</tool_call> So.", ("", "\nno JSONSo.", [])),
    ("hermes", CHATML, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", "", [("f", {"a": 1})])),
    ("hermes", CHATML, '<tool_call>{"name": "f", "id": 12}</tool_call>', ("", "", [("f", {})])),
    (
        "hermes",
        CHATML,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ("", "", [("f", {"a": 1})]),
    ),
    (
        "qwen3_5",
        CHATML + "<think>\n",
        "Rain?\n</think>\n\n" + qwen_xml("Bern\n 2", 3) + "\n" + qwen_xml("4", 5),
        ("Rain?", "", [("weather", {"city": "Bern\n 2", "days": 3}), ("weather", {"city": "4", "days": 5})]),
    ),
    ("llama3", LLAMA, json.dumps({"name": "weather", "parameters": ODD}), ("", "", [("weather", ODD)])),
    ("llama3", LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}', ("", "", [("f", {})])),
    ("llama3", LLAMA, '{"title": 1}', ("", '{"title": 1}', [])),
    (
        "mistral",
        "[INST] a [/INST]",
        f"[TOOL_CALLS]weather[ARGS]{json.dumps(ODD)}[TOOL_CALLS]time[ARGS]{{}}",
        ("", "", [("weather", ODD), ("time", {})]),
    ),
    (
        "mistral",
        "[INST] a [/INST]",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {json.dumps(ODD)}}}, {{"name": "f", "arguments": {{}}}}]',
        ("", "", [("weather", ODD), ("f", {})]),
    ),
    ("mistral", "[INST] a [/INST]", "[THINK]Hm.[/THINK]Yes.", ("Hm.", "Yes.", [])),
    (
        "gpt_oss",
        OSS,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        ("Hm.", "Yes.", []),
    ),
    (
        "gpt_oss",
        OSS,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        f"<|constrain|>json<|message|>{json.dumps(ODD)}",
        ("Hm.", "", [("weather", ODD)]),
    ),
    ("gpt_oss", OSS, " to=functions.f<|channel|>commentary json<|message|>{}<|call|>", ("", "", [("f", {})])),
    (
        "gemma4",
        "<|turn>model\n",
        '<|channel>thought\nHm.<channel|><|tool_call>call:weather{city:<|"|>Bern: 4<|"|>,days:3}<tool_call|>',
        ("Hm.", "", [("weather", {"city": "Bern: 4", "days": 3})]),
    ),
    ("thinking", CHATML, "<think>a</think>b<tool_call>", ("a", "b<tool_call>", [])),
    ("plain", "anything", '{"name": "f", "arguments": {}}\n{"name": "g"}', ("", "", [("f", {}), ("g", {})])),
]


@pytest.mark.parametrize(("form", "prompt", "text", "want"), CASES)
def test_whole_answers(form: str, prompt: str, text: str, want: Answer) -> None:
    assert take_apart(form, prompt, [text]) == want


@given(case=st.sampled_from(CASES), data=st.data())
def test_pieces_of_any_size_give_the_same(case: tuple[str, str, str, Answer], data: st.DataObject) -> None:
    form, prompt, text, want = case
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert take_apart(form, prompt, pieces) == want


def test_arguments_arrive_before_the_call_is_complete() -> None:
    parser = AnswerParser(load_format("hermes"), CHATML, with_calls=True)
    parts = parser.feed('<tool_call>{"name": "f", "arguments": {"text": "a long')
    assert [(part.kind, part.text) for part in parts] == [("call", "f"), ("arguments", '{"text": "a long')]
    assert [part.text for part in parser.feed(' story"}')] == [' story"}']


def test_without_tools_a_call_is_text() -> None:
    text = hermes(("f", {}))
    assert take_apart("hermes", CHATML, list(text), with_calls=False) == ("", text, [])


def test_what_users_write_opens_nothing() -> None:
    prompt = "<|im_start|>user\n<think> <tool_call><|im_end|>\n" + CHATML
    assert take_apart("hermes", prompt, ["Hello"]) == ("", "Hello", [])
    assert take_apart("hermes", "no assistant here <think>", ["Hello"]) == ("", "Hello", [])


def test_a_call_cut_short_keeps_what_there_was() -> None:
    parser = AnswerParser(load_format("hermes"), CHATML, with_calls=True)
    parts = parser.feed('<tool_call>{"name": "f", "arguments": {"a": ') + parser.finish()
    assert [(part.kind, part.text) for part in parts] == [("call", "f"), ("arguments", '{"a": ')]


@given(st.text(alphabet='{}[]",:\\ namef\n', max_size=60))
def test_junk_gives_no_error(text: str) -> None:
    whole, pieces = CallReader(0).feed(text), []
    reader = CallReader(0)
    for character in text:
        pieces += reader.feed(character)
    assert [part.text for part in whole if part.kind == "call"] == [part.text for part in pieces if part.kind == "call"]


class Tokenizer:
    def __init__(self, response_template: Any = None) -> None:
        self.response_template = response_template


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<|im_start|> <tool_call> {'arguments'}", "hermes"),
        ("<tool_call> <function=", "qwen3_5"),
        ('<|start_header_id|> "parameters"', "llama3"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|start|>assistant<|channel|>", "gpt_oss"),
        ("<|tool_call>", "gemma4"),
        ("<think>", "thinking"),
        ("nothing", None),
    ],
)
def test_a_chat_template_tells_the_format(template: str, name: str | None) -> None:
    found = format_of(Tokenizer(), template)
    assert (found and found.name) == name
    assert format_of(Tokenizer(), template, "none") is None


def test_a_tokenizers_own_template_comes_first() -> None:
    own = {"start_anchor": ":", "fields": {"content": {"content": "text"}}}
    found = format_of(Tokenizer(own), "<tool_call>")
    assert found is not None
    assert found.response == own
    assert not found.has_calls


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ConfigError, match="known: gemma4, gpt_oss, hermes"):
        load_format("qwen")
