"""Answers of every model family, taken apart whole and in pieces of any size."""

import copy
import json
import re
from itertools import groupby
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.serve.notations import call_text, glm_text
from volley.errors import ConfigError
from volley.serve.arguments import TaggedArguments
from volley.serve.bare_calls import is_valid
from volley.serve.call_reader import CallReader
from volley.serve.formats import anchored, format_of, load_format
from volley.serve.parsing import AnswerParser

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


def in_notation(form: str, city: str, days: int) -> str:
    return call_text(form, "weather", {"city": city, "days": days})


BERN = {"city": "Bern", "days": 3}
CASES: list[tuple[str, str, str, Answer]] = [
    ("hermes", CHATML, "Hello.\n", ("", "Hello.\n", [])),
    ("hermes", CHATML, " <b> 1 < 2\n\n", ("", " <b> 1 < 2\n\n", [])),
    ("hermes", CHATML, "<think>\nHm, 1.\n</think>\n\nTwo.", ("Hm, 1.", "Two.", [])),
    ("hermes", CHATML + "<think>\n", "Hm.\n</think>\n\nTwo.", ("Hm.", "Two.", [])),
    ("hermes", CHATML + "<think>\n\n</think>\n\n", "\nTwo.", ("", "Two.", [])),
    ("hermes", CHATML + "<think>\n", "Never done", ("Never done", "", [])),
    ("hermes", CHATML + "<think>", "Hm.</think>Two.", ("Hm.", "Two.", [])),
    ("hermes", CHATML, "Use <think> and </think>.", ("", "Use <think> and </think>.", [])),
    ("hermes", CHATML, '{"tag": "<think>"}', ("", '{"tag": "<think>"}', [])),
    ("qwen3_5", CHATML + "<think>\n\n</think>\n\n", "A <think>.", ("", "A <think>.", [])),
    ("mistral", "[/INST]", "Write [THINK] so.", ("", "Write [THINK] so.", [])),
    ("hermes", CHATML, "def f():\n    ", ("", "def f():\n    ", [])),
    ("hermes", CHATML + "def f():\n    ", "return 1", ("", "return 1", [])),
    ("hermes", CHATML, "Look:\n" + hermes(("weather", ODD)), ("", "Look:", [("weather", ODD)])),
    (
        "hermes",
        CHATML,
        hermes(("weather", {}), ("time", {"in": []})),
        ("", "", [("weather", {}), ("time", {"in": []})]),
    ),
    ("hermes", CHATML, "<tool_call>\nno JSON</tool_call> So.", ("", "<tool_call>\nno JSON</tool_call> So.", [])),
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
        "Rain?\n</think>\n\n" + in_notation("qwen3_5", "Bern\n 2", 3) + "\n" + in_notation("qwen3_5", "4", 5),
        ("Rain?", "", [("weather", {"city": "Bern\n 2", "days": 3}), ("weather", {"city": "4", "days": 5})]),
    ),
    (
        "glm4_5",
        "<|assistant|>",
        "\n<think>Rain?</think>\nSee:\n"
        + in_notation("glm4_5", "Bern\n 2\n", 3)
        + "\n"
        + in_notation("glm4_5", " 4", 5),
        ("Rain?", "See:", [("weather", {"city": "Bern\n 2\n", "days": 3}), ("weather", {"city": " 4", "days": 5})]),
    ),
    (
        "glm4_5",
        "<|assistant|>\n<think></think>",
        glm_text("weather", {"city": "Bern", "days": "3"}, " ") + "So.",
        ("", "So.", [("weather", BERN)]),
    ),
    ("glm4_5", "<|assistant|>", "<tool_call>time\n</tool_call>", ("", "", [("time", {})])),
    ("glm4_5", "<|assistant|>", "<tool_call>no call</tool_call>", ("", "no call", [])),
    (
        "glm4_7",
        "<|assistant|><think>",
        "Rain?</think>" + in_notation("glm4_7", "\nBern", 3) + "<tool_call>time</tool_call>",
        ("Rain?", "", [("weather", {"city": "\nBern", "days": 3}), ("time", {})]),
    ),
    ("glm4_7", "<|assistant|></think>", in_notation("glm4_5", "Bern", 3), ("", "", [("weather", BERN)])),
    ("llama3", LLAMA, json.dumps({"name": "weather", "parameters": ODD}), ("", "", [("weather", ODD)])),
    ("llama3", LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}', ("", "", [("f", {})])),
    ("llama3", LLAMA, '{"type": "function", "name": "f", "parameters": {"a": 1}}', ("", "", [("f", {"a": 1})])),
    (
        "llama3",
        LLAMA,
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        ("", "", [("f", {}), ("g", {})]),
    ),
    ("llama3", LLAMA, '{"title": 1}', ("", '{"title": 1}', [])),
    ("llama3", LLAMA, '{"type": "function"}', ("", '{"type": "function"}', [])),
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
        "mistral",
        "[INST] a [/INST][TOOL_CALLS]weather[ARGS]{}</s>[TOOL_RESULTS]Sun[/TOOL_RESULTS]",
        "It is sunny.",
        ("", "It is sunny.", []),
    ),
    (
        "mistral_list",
        "[INST]a[/INST][TOOL_CALLS][{}]</s>[TOOL_RESULTS]{}[/TOOL_RESULTS]",
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {json.dumps(ODD)}}}, {{"name": "f", "arguments": {{}}, "id": "abcd"}}]',
        ("", "", [("weather", ODD), ("f", {})]),
    ),
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
    (
        "qwen3_5",
        CHATML,
        '<tool_call>\n<function=weather>\n<parameter=city>\n\n</param "\\\n\n</parameter>\n<parameter=where>\n'
        '{"a": [1]}\n</parameter>\n<parameter=days>\nsome\n</parameter>\n<parameter=x>2</parameter></function> </tool_call> So.',
        ("", "So.", [("weather", {"city": '\n</param "\\\n', "where": {"a": [1]}, "days": "some", "x": "2"})]),
    ),
    ("qwen3_5", CHATML, "<tool_call>\n<function=time>\n</function>\n</tool_call>", ("", "", [("time", {})])),
    ("qwen3_5", CHATML, "<tool_call>\nno call</tool_call>", ("", "<tool_call>\nno call</tool_call>", [])),
    (
        "gemma4",
        "<|turn>model\n",
        'Look: <|tool_call>call:weather{city:<|"|>a "\\ {<|"> b<|"|>,where:{a:[1,{b:<|"|>}<|"|>}], <|"|>c<|"|>: null},'
        'days: 3, x:12 May, "y" : "\\u00e9\\n", z: NaN }<tool_call|><|tool_call>call:time{}<tool_call|>',
        (
            "",
            "Look:",
            [
                (
                    "weather",
                    {
                        "city": 'a "\\ {<|"> b',
                        "where": {"a": [1, {"b": "}"}], "c": None},
                        "days": 3,
                        "x": "12 May",
                        "y": "é\n",
                        "z": "NaN",
                    },
                ),
                ("time", {}),
            ],
        ),
    ),
    ("gemma4", "<|turn>model\n", "<|tool_call>no call<tool_call|>", ("", "no call", [])),
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


@pytest.mark.parametrize(
    ("form", "prompt", "pieces", "deltas"),
    [
        (
            "hermes",
            CHATML,
            ['<tool_call>{"name": "f", "arguments": {"text": "a long', ' story"}'],
            [["f", '{"text": "a long'], [' story"}']],
        ),
        (
            "qwen3_5",
            CHATML,
            [
                "<tool_call>\n<function=weather>\n",
                "<parameter=city>\nZü",
                "rich\n</par",
                "ts\n</parameter>\n<parameter=",
                "days>\n1",
                "2\n</parameter>",
                "\n</function>\n",
            ],
            [["weather", "{"], ['"city": "Zü'], ["rich"], ['\\n</parts"'], [', "days": '], [], ["12}"]],
        ),
        (
            "glm4_7",
            "<|assistant|>",
            [
                "<tool_call>wea",
                "ther<arg_key>city</arg_key><arg_value>Zü",
                "rich</arg",
                "s</arg_value>",
                "</tool_call>",
            ],
            [[], ["weather", '{"city": "Zü'], ["rich"], ["</args"], ['"}']],
        ),
        (
            "gemma4",
            "<|turn>model\n",
            ["<|tool_call>call:wea", "ther{ci", 'ty:<|"|>Zü', "rich<|", '"|>,days:1', "2}"],
            [[], ["weather", "{"], ['"city": "Zü'], ["rich"], ['", "days": '], ["12}"]],
        ),
    ],
)
def test_arguments_arrive_as_they_are_written(
    form: str, prompt: str, pieces: list[str], deltas: list[list[str]]
) -> None:
    parser = AnswerParser(load_format(form), prompt, [WEATHER], with_calls=True)
    assert [[part.text for part in parser.feed(piece)] for piece in pieces] == deltas


WORDS = st.text(alphabet='ab<|">}{,:\\\n é/', max_size=12).filter(lambda text: '<|"|>' not in text)
MARKS = [
    *("<tool_call>", "</tool_call>", "</think>", "<function=f>", "</function>", "<parameter=x>", "</parameter>"),
    *(
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<|tool_call>",
        "<tool_call|>",
        "[TOOL_CALLS]",
        "[ARGS]",
    ),
    *("<|call|>", "<|end|>", "<|start|>assistant", "<|python_tag|>", '"', "\\", "\n", "}", "a"),
]
"""Texts that mean something in some notation."""
IN_JSON = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>',
    "mistral": "[TOOL_CALLS]weather[ARGS]%s",
    "mistral_list": '[TOOL_CALLS][{"name": "weather", "arguments": %s}]',
    "llama3": '{"name": "weather", "parameters": %s}',
    "gpt_oss": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>%s<|call|>",
    "plain": '{"name": "weather", "arguments": %s}',
}
PROMPTS = {"gemma4": "<|turn>model\n", "glm4_5": "<|assistant|>", "glm4_7": "<|assistant|>", "llama3": LLAMA}
PROMPTS |= {"mistral": "[INST] a [/INST]", "mistral_list": "[INST] a [/INST]", "gpt_oss": OSS, "plain": "x"}
CLOSES = {  # what ends an argument, wherever it stands in one
    "qwen3_5": r"(?:\A|\n)</parameter>\s*(?:<parameter=|</function>|\Z)",
    "glm4_5": r"</arg_value>\s*(?:<arg_key>|</tool_call>|\Z)",
    "glm4_7": r"</arg_value>\s*(?:<arg_key>|</tool_call>|\Z)",
}


@given(
    form=st.sampled_from([*IN_JSON, "qwen3_5", "glm4_5", "glm4_7", "gemma4"]),
    city=st.lists(st.sampled_from(MARKS) | WORDS, max_size=8).map("".join),
    days=st.integers(),
    where=st.dictionaries(st.sampled_from("abc"), WORDS | st.sampled_from(MARKS) | st.lists(st.booleans())),
    num_calls=st.integers(1, 2),
    data=st.data(),
)
def test_any_argument_is_found_in_every_notation(
    form: str, city: str, days: int, where: dict[str, Any], num_calls: int, data: st.DataObject
) -> None:
    """Also one that holds marks of the notation, in pieces of any size."""
    if form in CLOSES:
        assume(not re.search(CLOSES[form], city) and not re.search(CLOSES[form].replace("(?:\\A|\\n)", ""), str(where)))
    elif form == "gemma4":
        assume('<|"|>' not in city + "".join(map(str, where.values())))
    arguments = {"city": city, "days": days, "where": where}
    text = IN_JSON[form] % json.dumps(arguments) if form in IN_JSON else call_text(form, "weather", arguments)
    if form == "llama3":
        num_calls = 1
    text = ("\n" if form in ("hermes", "glm4_5", "qwen3_5", "plain") else "").join([text] * num_calls)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    prompt = PROMPTS.get(form, CHATML)
    expected = ("", "", [("weather", arguments)] * num_calls)
    assert take_apart(form, prompt, [text]) == expected
    assert take_apart(form, prompt, pieces) == expected


@pytest.mark.parametrize(
    ("value", "tail"),
    [
        ("x\n</parameter>\nno tag", ""),
        ("<tool_call>\n<function=f>\n</function>\n</tool_call>", ""),
        ("a</parameter>\n<parameter=days>\n3", ""),
        ("a</parameter>\n</function>\n</tool_call> b", " So."),
    ],
)
def test_a_tag_on_no_line_of_its_own_closes_nothing(value: str, tail: str) -> None:
    text = call_text("qwen3_5", "weather", {"city": value}) + tail
    for pieces in ([text], list(text)):
        assert take_apart("qwen3_5", CHATML, pieces) == ("", tail.strip(), [("weather", {"city": value})])


@pytest.mark.parametrize("end", ["</parameter>", "</parameter>\n", "</parameter>\n</function>\n</tool_call>"])
def test_a_tag_that_a_model_forgot_to_put_on_its_line_closes_at_the_end(end: str) -> None:
    text = "<tool_call>\n<function=weather>\n<parameter=city>\nBern</parameter>\n<parameter=days>\n3\n</parameter>\n"
    inline = f"<tool_call>\n<function=weather>\n<parameter=days>\n3</parameter>\n<parameter=city>\nBern{end}"
    for pieces in ([inline], list(inline)):
        assert take_apart("qwen3_5", CHATML, pieces)[2] == [("weather", {"days": 3, "city": "Bern"})]
    assert take_apart("qwen3_5", CHATML, [text])[2] == [("weather", {"city": "Bern</parameter>\n<parameter=days>\n3"})]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": ["string", "null"]}, "None", None),
        ({"$ref": "#/$defs/age"}, "12", 12),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, "1.5", 1.5),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": "2"}, "2", "2"),
        ({"type": "boolean"}, "True", True),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({}, "[1]", "[1]"),
        ({"$ref": "#/$defs/none"}, "1", "1"),
        ({"$ref": "#/$defs/loop"}, "1", "1"),
    ],
)
def test_tagged_values_are_read_as_their_schema_says(schema: Any, text: str, value: Any) -> None:
    defs = {"age": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}
    call = load_format("qwen3_5").call
    assert call is not None
    assert call.parameter is not None
    arguments = TaggedArguments(call.parameter, {"properties": {"x": schema}, "$defs": defs})
    told = arguments.feed(f"<parameter=x>\n{text}\n</parameter>\n</function>")
    assert arguments.is_done
    assert json.loads(told) == {"x": value}


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


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("qwen3_5", "<tool_call>\n<function=weather>\n<parameter=city>\nBer", '{"city": "Ber'),
        ("qwen3_5", "<tool_call>\n<function=weather>\n<parameter=days>\n3", "{"),
        ("qwen3_5", "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n", '{"city": "Bern"}'),
        ("glm4_5", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ber", '{"city": "Ber'),
    ],
)
def test_a_tagged_call_cut_short_has_no_mark_of_its_format(form: str, text: str, expected: str) -> None:
    prompt = "<|assistant|>" if form == "glm4_5" else CHATML
    parser = AnswerParser(load_format(form), prompt, [WEATHER], with_calls=True)
    parts = parser.feed(text) + parser.finish()
    assert "".join(part.text for part in parts if part.kind == "arguments").startswith(expected)
    assert not any(mark in part.text for part in parts for mark in ("</", "tool_call>"))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_line_breaks_that_a_model_writes_into_strings_become_json(size: int) -> None:
    text = '<tool_call>{"name": "f",\n "arguments": {"a": "x\ny\tz", "b": "\\\n",\n"c": 1}}</tool_call>'
    parser = AnswerParser(load_format("hermes"), CHATML, with_calls=True)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    found = json.loads("".join(part.text for part in parts if part.kind == "arguments"))
    assert found == {"a": "x\ny\tz", "b": "\n", "c": 1}


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


def test_a_format_learns_how_a_template_begins_answers() -> None:
    form, opening = load_format("thinking"), "<eot>\n<bot>\n<think>\n"
    learnt = anchored(form, opening)
    assert learnt is not None
    parser = AnswerParser(learnt, "<user>Hi" + opening, with_calls=False)
    assert parser.is_thinking
    assert not AnswerParser(form, "<user>Hi" + opening, with_calls=False).is_thinking
    assert not AnswerParser(learnt, "<user>What is <think>", with_calls=False).is_thinking
    assert anchored(form, CHATML) is form
    assert anchored(form, "") is form
    assert anchored(None, opening) is None


def test_brackets_without_end_are_text() -> None:
    parser = AnswerParser(load_format("hermes"), CHATML, with_calls=True)
    parser.feed('<tool_call>{"name": "f", "arguments": ' + "[" * 100_000)
    parser.finish()


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<|im_start|> <tool_call> {'arguments'}", "hermes"),
        ("<tool_call> <function=", "qwen3_5"),
        ('<|start_header_id|> "parameters"', "llama3"),
        ("[TOOL_CALLS][ARGS]", "mistral"),
        ("[TOOL_CALLS]", "mistral_list"),
        ("<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>", "glm4_5"),
        ("<think><tool_call>{{ name }}<arg_key>{{ k }}</arg_key><arg_value>", "glm4_7"),
        ("<tool_call><arg_key>", None),
        ("<think><tool_call><arg_key>", "thinking"),
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
    found = format_of(Tokenizer(own), "<|start|>assistant<|channel|>")
    assert found is not None
    assert (found.thinking, found.answer) == (load_format("gpt_oss").thinking, load_format("gpt_oss").answer)


def test_marks_of_the_prompt_are_none_of_the_answer() -> None:
    """Or special tokens would be shown in answers that have none of the format's."""
    learnt = anchored(load_format("thinking"), "<eot>\n<bot>\n<think>\n")
    assert learnt is not None
    assert "<bot>" not in learnt.markers()
    assert "<think>" in learnt.markers()
    assert "<|channel|>" in load_format("gpt_oss").markers()


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ConfigError, match="known: gemma4, glm4_5, glm4_7, gpt_oss, hermes"):
        load_format("qwen")


TIME = {"type": "function", "function": {"name": "time"}}


def read_bare(
    text: str, size: int, form: str = "hermes", prompt: str = CHATML, on: bool = True
) -> list[tuple[str, str]]:
    """Kinds and texts of an answer's parts, those of the same kind joined."""
    parser = AnswerParser(load_format(form), prompt, [STRICT, TIME], with_calls=True, bare_calls=on)
    told: list[tuple[str, str]] = []
    for start in range(0, len(text), size):
        told += [(part.kind, part.text) for part in parser.feed(text[start : start + size])]
    told += [(part.kind, part.text) for part in parser.finish()]
    assert parser.num_calls == sum(kind == "call" for kind, _ in told)
    kinds = groupby(told, key=lambda one: one[0])
    return [(kind, "".join(text for _, text in some)) for kind, some in kinds]


STRICT: Any = copy.deepcopy(WEATHER)
STRICT["function"]["parameters"] |= {"required": ["city"], "additionalProperties": False}
BARE = '{"name": "weather", "arguments": {"city": "Bern"}}'
CALLED = [("call", "weather"), ("arguments", '{"city": "Bern"}')]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_whole_answer_that_is_one_object_of_a_tool_is_a_call(size: int) -> None:
    for text in (
        BARE,
        f"\n {BARE}\n",
        '{"arguments": {"city":"Bern"},"name": "weather"}',
        '{ "name" : "weather", "parameters": {"city": "Bern"} }',
        '{"type": "function", "name": "weather", "parameters": {"city": "Bern"}}',
        '{"name": "weather", "arguments": "{\\"city\\": \\"Bern\\"}"}',
        f"```json\n{BARE}\n```",
        f"```\n{BARE}\n```\n",
    ):
        assert read_bare(text, size) == CALLED, text
        assert read_bare(text, size, on=False) == [("content", text)]
    assert read_bare(f"<think>\nHm.\n</think>\n\n{BARE}", size) == [("reasoning", "Hm."), *CALLED]
    assert read_bare('{"name": "time", "arguments": {}}', size) == [("call", "time"), ("arguments", "{}")]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    "text",
    [
        BARE + " So.",
        "So: " + BARE,
        BARE + BARE,
        BARE[:-1],
        f"```json\n{BARE}\n",
        f"```json\n{BARE}\n```\n```",
        f"```python\n{BARE}\n```",
        BARE + "```",
        BARE.replace("weather", "whether"),
        BARE.replace("city", "town"),
        BARE.replace('"Bern"', "3"),
        BARE.replace('"Bern"', "NaN"),
        '{"name": "weather"}',
        '{"name": "weather", "arguments": {"city": "Bern"}, "parameters": {"city": "Bern"}}',
        '{"name": "weather", "arguments": {"city": "Bern"}, "more": 1}',
        '{"name": "weather", "arguments": [1]}',
        '{"name": "weather", "arguments": "Bern"}',
        '{"title": "weather"}',
        f"[{BARE}]",
        "{",
        "",
    ],
)
def test_any_other_answer_stays_text(text: str, size: int) -> None:
    assert read_bare(text, size) == ([("content", text)] if text else [])


def test_text_is_held_back_no_longer_than_it_may_be_a_call() -> None:
    for text, held in (
        ('{"title', 3),
        ("{1", 1),
        ('{"name": "wh', 11),
        ("```py", 3),
        ("Sun", 0),
        (BARE + "x", len(BARE)),
    ):
        parser = AnswerParser(load_format("hermes"), CHATML, [STRICT, TIME], with_calls=True, bare_calls=True)
        told = [bool(parser.feed(letter)) for letter in text]
        assert told.index(True) == held, text


def test_a_schema_of_any_kind_is_checked_in_bounded_time() -> None:
    doubled = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {}}
    hard = {"properties": {"a": {"pattern": "^(a+)+$"}}}
    for schema in (
        {"$ref": "#/$defs/d0", "$defs": doubled},
        {"$ref": "#"},
        {"$ref": "http://127.0.0.1:9/schema"},
        {"type": 3},
        {"patternProperties": {"(a+)+$": {}}},
        hard,
    ):
        assert not is_valid({"a": "a" * 60 + "b"}, schema), schema
    assert is_valid({"a": "aa"}, hard)
    assert is_valid({"a": "x"}, {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"const": "x"}}})
