"""Conversations through templates that each take less than clients send: nothing is lost, and nothing changes without need."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.serve.test_tools import TEMPLATE
from volley.chat import render_chat
from volley.files import REFERENCE
from volley.serve.conversations import Conversations, calls_as_text, one_call_each, short_ids
from volley.serve.messages import Message, for_template

TOKENIZER = AutoTokenizer.from_pretrained(REFERENCE / "target")
CALLS = "{% for call in m.tool_calls %}<call>{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
PLAIN = f"{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ m.content }}}}{CALLS}{{% endfor %}}"
STRICT_IDS = PLAIN.replace(
    "<call>", "{% if call.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}<call {{ call.id }}>"
).replace("{{ m.role }}", "{{ m.role }} {{ m.tool_call_id }}")
SINGLE_CALL = PLAIN.replace(
    "{{ m.content }}",
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    "{% if not m.tool_calls %}{{ m.content }}{% endif %}",
)
FIRST_CALL = PLAIN.replace("in m.tool_calls %}", "in (m.tool_calls or [])[:1] %}").replace(
    "{{ m.content }}",
    "{% if m.tool_calls and m.thinking and m.content %}{{ raise_exception('not both') }}{% endif %}"
    "{{ m.thinking }}{{ m.content }}",
)
IN_THE_CALL = (
    "{% for m in messages %}{% if m.role == 'tool' %}<turn>tool{{ m.content }}{% else %}<turn>{{ m.role }} "
    + CALLS
    + "{% endif %}"
    "{% for own in m.tool_responses %}<response>{{ own.name }}{{ own.response }}{% endfor %}"
    "{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}"
)
ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('once') }}{% endif %}"
    + PLAIN.removeprefix("{% for m in messages %}")
)
NO_CALLS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NO_TOOLS = (
    "{% for m in messages %}{% if (m.role == 'user') == (loop.index0 % 2 == 1) or m.role == 'tool' %}"
    "{{ raise_exception('turns') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
AS_TEXT = (
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{% if m.content is none %}{% for call in m.tool_calls %}"
    "{{ '<call>' + call.function.name + ' ' + call.function.arguments }}{% endfor %}{% endif %}{% else %}{{ m.content }}"
    "{% endif %}{% endfor %}"
)
AS_GIVEN = PLAIN.replace(" | tojson", "")
AS_TEXT_WITH_IDS = AS_GIVEN.replace(
    "<call>", "{% if call.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}<call>"
)
USER = {"role": "user", "content": "Weather?"}


def call(call_id: str, name: str = "weather", city: str = "Bern") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": f'{{"city": "{city}"}}'}}


def result(call_id: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def told(template: str, *messages: dict[str, Any]) -> str:
    """The text of messages as the server has them rendered."""
    render = partial(render_chat, TOKENIZER, template=template)
    parsed = for_template([Message.model_validate(message) for message in messages])
    return render(Conversations(render)(parsed))


BOTH = {"role": "assistant", "content": None, "tool_calls": [call("call_1"), call("call_2", "time", "Rome")]}
SAID = {"role": "assistant", "content": "Look.", "reasoning_content": "Hm.", "tool_calls": [call("call_1")]}
RESULTS = [result("call_2", "Noon."), result("call_1", "Sun.")]


@pytest.mark.parametrize(
    ("template", "messages", "want"),
    [
        (
            PLAIN,
            [USER, {**BOTH, "content": "Look."}, *RESULTS],
            '<user>Weather?<assistant>Look.<call>weather{"city": "Bern"}<call>time{"city": "Rome"}<tool>Noon.<tool>Sun.',
        ),
        (
            SINGLE_CALL,
            [USER, BOTH, *RESULTS, {"role": "assistant", "content": "So."}],
            '<user>Weather?<assistant><call>weather{"city": "Bern"}<tool>Sun.<assistant><call>time{"city": "Rome"}<tool>Noon.'
            "<assistant>So.",
        ),
        (SINGLE_CALL, [USER, SAID], '<user>Weather?<assistant>Look.<assistant><call>weather{"city": "Bern"}'),
        (
            FIRST_CALL,
            [USER, {**BOTH, "reasoning": "Hm.", "content": "Look."}, *RESULTS],
            '<user>Weather?<assistant>Hm.\n\nLook.<call>weather{"city": "Bern"}<tool>Sun.'
            '<assistant><call>time{"city": "Rome"}<tool>Noon.',
        ),
        (
            IN_THE_CALL,
            [USER, BOTH, *RESULTS[::-1], {"role": "assistant", "content": "So."}, USER],
            '<turn>user Weather?<turn>assistant <call>weather{"city": "Bern"}<call>time{"city": "Rome"}'
            "<response>weatherSun.<response>timeNoon.So.<turn>user Weather?",
        ),
        (
            ONE_SYSTEM,
            [{"role": "system", "content": "A"}, {"role": "developer", "content": [{"type": "text", "text": "B"}]}, USER],
            "<system>A\n\nB<user>Weather?",
        ),
        (
            AS_TEXT,
            [USER, {**BOTH, "content": "Look."}, *RESULTS],
            '<user>Weather?<assistant>Look.<assistant><call>weather {"city": "Bern"}<call>time {"city": "Rome"}'
            "<tool>Noon.<tool>Sun.",
        ),
        (
            AS_GIVEN,
            [USER, {"role": "assistant", "tool_calls": [call("call_1", city="Zürich")]}, RESULTS[1]],
            '<user>Weather?<assistant><call>weather{"city": "Zürich"}<tool>Sun.',
        ),
        (
            AS_TEXT_WITH_IDS,
            [USER, BOTH, *RESULTS],
            '<user>Weather?<assistant><call>weather{"city": "Bern"}<call>time{"city": "Rome"}<tool>Noon.<tool>Sun.',
        ),
        (
            NO_CALLS,
            [USER, SAID, result("call_1", "Sun.")],
            '<user>Weather?<assistant>Look.\n{"name": "weather", "arguments": {"city": "Bern"}}<tool>Sun.',
        ),
        (
            NO_TOOLS,
            [USER, BOTH, *RESULTS],
            '<user>Weather?<assistant>{"name": "weather", "arguments": {"city": "Bern"}}\n'
            '{"name": "time", "arguments": {"city": "Rome"}}<user>Noon.\nSun.',
        ),
    ],
)  # fmt: skip
def test_a_template_gets_what_it_can_write(template: str, messages: list[dict[str, Any]], want: str) -> None:
    assert told(template, *messages) == want


EACH_CALL = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
AS_IT_IS = (
    "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}{% endfor %}{{ m.content }}{% endfor %}"
)
AN_OBJECT = (
    "{% for k, v in c.function.arguments | items %}<{{ k }}>{{ v }}{% endfor %}{% endfor %}{{ m.content }}{% endfor %}"
)
NO_OBJECTS = ['{"city": "Be', "[1]", "null", '"\\ud800"', '{"a": "\\ud800"}', "[" * 100_000]


@pytest.mark.parametrize(
    ("template", "text", "first", "second"),
    [
        *((AS_IT_IS, text, text, '{"city": "Bern"}') for text in NO_OBJECTS),
        (AN_OBJECT, '{"city": "Be', '<arguments>{"city": "Be', "<city>Bern"),
    ],
)
def test_what_a_model_wrote_instead_of_arguments_reaches_the_template(
    template: str, text: str, first: str, second: str
) -> None:
    """As it is, or as an object where the template asks for one."""
    sent = {"id": "call_1", "type": "function", "function": {"name": "no tool", "arguments": text}}
    said = {"role": "assistant", "tool_calls": [sent, call("call_2")]}
    written = told(EACH_CALL + template, USER, said, result("call_1", "No JSON."))
    assert written == f"Weather?no tool{first}weather{second}No JSON."


@pytest.mark.parametrize(
    ("template", "want"),
    [
        (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<bot><think>",
            "><bot><think>",
        ),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}<bot>", ""),
        ("{{ raise_exception('never') }}", ""),
    ],
)
def test_what_begins_an_answer_is_what_stands_behind_users_and_tools(template: str, want: str) -> None:
    conversations = Conversations(partial(render_chat, TOKENIZER, template=template))
    assert conversations.opening() == want


def test_arguments_that_are_no_json_reach_a_template_that_takes_text() -> None:
    sent = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Be'}}
    assert told(AS_TEXT, USER, {"role": "assistant", "tool_calls": [sent]}).endswith('<call>weather {"city": "Be')


def test_ids_of_nine_characters() -> None:
    mine, theirs = "abcDEF123", "call_0123456789"
    sent = {"role": "assistant", "tool_calls": [call(mine), call(theirs)]}
    text = told(STRICT_IDS, USER, sent, result(mine, "Sun."), result(theirs, [{"type": "text", "text": "Rain."}]))
    (short,) = {own["id"] for own in short_ids(for_template([Message.model_validate(sent)]))[0]["tool_calls"]} - {mine}
    assert len(short) == 9
    assert short.isalnum()
    for call_id, told_ in ((mine, "Sun."), (short, "Rain.")):
        assert f"<call {call_id}>" in text
        assert f"<tool {call_id}>{told_}" in text, "result and call go by one id"


@pytest.mark.parametrize("template", [PLAIN, TEMPLATE, "{{ raise_exception('never') }}"])
def test_nothing_changes_without_need(template: str) -> None:
    """Templates that take all, and one that takes nothing: messages stay as they are."""
    conversations = Conversations(partial(render_chat, TOKENIZER, template=template))
    assert conversations.ways == []
    messages = for_template([Message.model_validate(own) for own in (USER, BOTH, *RESULTS)])
    assert conversations(messages) == messages


def test_a_forced_call_of_the_bundled_model_stays_in_its_conversation() -> None:
    assert Conversations(partial(render_chat, TOKENIZER)).ways == [calls_as_text]


@given(st.lists(st.integers(0, 3), max_size=4), st.randoms(use_true_random=False))
def test_calls_one_by_one_lose_nothing(counts: list[int], random: Any) -> None:
    """Whatever calls there are and however their results are sorted, each result comes right after its call."""
    messages: list[dict[str, Any]] = [dict(USER)]
    for turn, count in enumerate(counts):
        ids = [f"{turn}-{index}" for index in range(count)]
        messages.append({"role": "assistant", "content": "", **({"tool_calls": list(map(call, ids))} if ids else {})})
        random.shuffle(ids)
        messages += [result(own, f"of {own}") for own in ids]
    apart = one_call_each(messages)
    assert all(len(own.get("tool_calls", ())) < 2 for own in apart)
    for before, after in zip(apart, [*apart[1:], USER], strict=True):
        for own in before.get("tool_calls", ()):
            assert after["tool_call_id"] == own["id"]
    assert sum(own["role"] == "tool" for own in apart) == sum(counts)
