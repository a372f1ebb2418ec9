"""Chats become the text and the token ids of the tokenizer's template; what cannot be rendered is named."""

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from volley.chat import check_template, encode_chat, end_of_turn, render_chat
from volley.errors import ConfigError, InputError

from .conftest import byte_tokenizer

ASKED = [{"role": "user", "content": "hi"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "yes"}]


def test_a_chat_ends_with_the_opening_of_the_answer_unless_told_otherwise() -> None:
    tokenizer = byte_tokenizer()
    opened = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render_chat(tokenizer, ASKED) == opened
    assert render_chat(tokenizer, ANSWERED, add_generation_prompt=False).rstrip() == f"{opened}yes<|im_end|>"


def test_text_parts_are_joined_as_the_server_does() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert render_chat(byte_tokenizer(), [{"role": "user", "content": parts}]) == render_chat(byte_tokenizer(), ASKED)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "a"}}],
            "a part of type 'image_url'",
        ),
        ([{"type": "text", "text": None}], "a part of type 'text'"),
        (["hi"], "a part of type 'hi'"),
        ({"type": "image"}, r"content is \{'type': 'image'\}"),
    ],
)
def test_what_is_no_text_is_refused_and_never_put_into_the_prompt(content: object, said: str) -> None:
    with pytest.raises(InputError, match=said + ".*must be a string or a list of text parts"):
        render_chat(byte_tokenizer(), [{"role": "user", "content": content}])


def test_token_ids_are_those_of_the_rendered_text_and_of_the_tokenizer_itself() -> None:
    tokenizer = byte_tokenizer()
    token_ids = encode_chat(tokenizer, ASKED)
    assert tokenizer.decode(token_ids) == render_chat(tokenizer, ASKED)
    assert token_ids == tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize(("thinking", "text"), [(True, "T"), (False, "F"), (None, "default")])
def test_the_thinking_switch_reaches_the_template(thinking: bool | None, text: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% if enable_thinking is defined %}{{ 'T' if enable_thinking else 'F' }}{% else %}default{% endif %}"
    )
    assert render_chat(tokenizer, ASKED, thinking=thinking) == text
    assert tokenizer.decode(encode_chat(tokenizer, ASKED, thinking=thinking)) == text
    assert check_template(tokenizer, thinking) == tokenizer.chat_template


def test_a_switch_that_the_template_ignores_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no thinking switch; leave thinking unset"):
        check_template(byte_tokenizer(), thinking=False)


@pytest.mark.parametrize("template", [None, ""])
def test_a_base_model_takes_a_prompt_as_it_is_and_no_chat(template: str | None) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    opening = [{"role": "user", "content": "Once"}]
    assert check_template(tokenizer) is None
    assert render_chat(tokenizer, opening) == "Once"
    assert encode_chat(tokenizer, opening) == tokenizer("Once")["input_ids"]  # with the token that begins a text
    assert encode_chat(tokenizer, opening)[0] == 0
    for chat in ([*opening, {"role": "assistant", "content": "a"}, *opening], [{"role": "system", "content": "a"}]):
        with pytest.raises(InputError, match=r"no chat template, so it takes single prompts.*tokenizer\.chat_template"):
            encode_chat(tokenizer, chat)


@pytest.mark.parametrize("message", [{"role": "user"}, {"content": "hi"}, {"role": 1, "content": "hi"}])
def test_a_message_without_role_or_content_is_named(message: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"a chat message has 'role' and 'content'; this one has \['"):
        encode_chat(byte_tokenizer(), [message])


@pytest.mark.parametrize("template", ["{{ foo(", "{{ raise_exception('one turn') }}", "{{ nothing() }}"])
def test_a_template_that_cannot_be_used_is_an_error_with_its_words(template: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=r"chat template refuses these messages: (unexpected|one turn|'nothing' is)"):
        encode_chat(tokenizer, ASKED)


def test_the_end_of_turn_is_the_stop_token_the_template_writes() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    assert end_of_turn(tokenizer, {0, 2}) == 2
    assert end_of_turn(tokenizer, set()) == 0
    tokenizer.chat_template = None
    assert end_of_turn(tokenizer, {2}) == 0
