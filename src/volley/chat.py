"""Prompts and chat templates: conversion of strings and messages to the token ids that a model was trained on.

A base model has no chat template. It receives the text of a single user message unchanged and continues it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

from volley.errors import ConfigError, InputError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # the command line imports it only when needed


Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
_EMPTY = "the prompt is empty; give at least one token to continue from"


def is_one_prompt(prompts: Any) -> bool:
    """Return whether this is one prompt rather than a list of them."""
    return isinstance(prompts, str) or (
        isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], int | Mapping)
    )


def encode_prompt(
    tokenizer: "PreTrainedTokenizerBase | None", prompt: Prompt, *, thinking: bool | None = None
) -> list[int]:
    """Return the token ids of a string or of chat messages through the chat template; a list of token ids is returned
    unchanged."""
    if not isinstance(prompt, Sequence):
        raise InputError(f"a prompt is a string, a list of token ids, or a list of chat messages, not {prompt!r}")
    if prompt and all(isinstance(part, int) for part in prompt):
        return list(cast(Sequence[int], prompt))
    is_chat = not isinstance(prompt, str) and all(isinstance(part, Mapping) for part in prompt)
    if not prompt:
        raise InputError(_EMPTY)
    if not isinstance(prompt, str) and not is_chat:
        raise InputError("a prompt is a string, a list of token ids, or a list of chat messages; this is a mixture")
    if tokenizer is None:
        raise InputError("this target was loaded without a tokenizer; pass prompts as lists of token ids")
    if is_chat:
        check_template(tokenizer, thinking)
        return encode_chat(tokenizer, cast(Sequence[Message], prompt), thinking=thinking)
    return _some(tokenizer(_encodable(str(prompt)))["input_ids"])


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError("the prompt is not valid Unicode: it has a lone surrogate; send text in UTF-8") from None
    return text


def _some(token_ids: Sequence[int]) -> list[int]:
    if not token_ids:
        raise InputError(_EMPTY)
    return list(token_ids)


def own_template(tokenizer: "PreTrainedTokenizerBase", *, with_tools: bool = False) -> str | None:
    """Return the chat template that the tokenizer chooses, ``None`` for a base model.

    Among several named templates it chooses ``tool_use`` for a conversation with tools, and ``default`` otherwise.
    """
    template = tokenizer.chat_template
    if isinstance(template, Mapping) and template:
        try:
            return str(tokenizer.get_chat_template(tools=[] if with_tools else None))
        except ValueError:
            names = ", ".join(sorted(template))
            raise ConfigError(
                f"the tokenizer has the chat templates {names}, and none is the default; choose one with --chat-template"
            ) from None
    return str(template) if template else None


def find_template(tokenizer: "PreTrainedTokenizerBase", choice: str | Path) -> str:
    """Return the chat template that ``choice`` names: one of the tokenizer's, or a file in Jinja."""
    own = tokenizer.chat_template or {}
    named: Mapping[str, str] = own if isinstance(own, Mapping) else {"default": own}
    if (template := named.get(str(choice))) is not None:
        return template
    try:
        return Path(choice).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = f"one of the tokenizer's templates ({', '.join(sorted(named)) or 'it has none'})"
        remedy = did_you_mean(str(choice), named) or f"give a file of Jinja, or {names}"
        raise ConfigError(f"the chat template {str(choice)!r} cannot be read ({error}); {remedy}") from error


def check_template(tokenizer: "PreTrainedTokenizerBase", thinking: bool | None = None) -> str | None:
    """Return :func:`own_template`; an error if it ignores the switch ``thinking``."""
    template = own_template(tokenizer)
    if thinking is not None and "enable_thinking" not in (template or ""):
        raise ConfigError("the target's chat template has no thinking switch; leave thinking unset")
    return template


def template_digest(tokenizer: "PreTrainedTokenizerBase") -> str | bool:
    """Return an identifier of the chat template; ``False`` for a base model."""
    template = check_template(tokenizer)
    return template is not None and hashlib.sha256(template.encode()).hexdigest()[:16]


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, Any]],
    *,
    thinking: bool | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
    template: str | None = None,
) -> str:
    """Return the text of ``messages``, by default with the opening of the assistant's answer.

    ``thinking`` reaches the template as ``enable_thinking``; with ``None`` the template decides. ``tools`` are functions in
    OpenAI's form. ``variables`` reach the template by their names. ``continue_final_message`` leaves the last message open.
    ``template`` replaces the tokenizer's own. For a base model the result is the text of the only message.
    """
    for message in messages:
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise InputError(f"a chat message has 'role' and 'content'; this one has {sorted(message)}")
    messages = [{**message, "content": _text_of(message["content"])} for message in messages]
    if template is None and check_template(tokenizer) is None:
        return _as_it_is(messages)
    given = dict(variables or {})
    if thinking is not None:
        given["enable_thinking"] = thinking
    if tools:
        given["tools"] = [dict(tool) for tool in tools]
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=template,
            **given,
        )
    except TemplateError as error:
        raise InputError(f"the model's chat template refuses these messages: {error}", field="messages") from error
    except (ValueError, TypeError) as error:
        raise InputError(f"the messages cannot be rendered: {error}") from error
    return str(text)


def _text_of(content: object) -> str | None:
    """Return the text of a message with its parts joined; ``None`` for an answer that only calls tools."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InputError(f"a chat message's content is {content!r}; it must be a string or a list of text parts")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise InputError(
                f"a chat message has a part of type {kind!r}, which volley does not read; its content must be a string or a "
                "list of text parts, such as {'type': 'text', 'text': 'Hello'}"
            )
        texts.append(part["text"])
    return "".join(texts)


def _as_it_is(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the prompt of a base model."""
    if len(messages) != 1 or messages[0]["role"] != "user":
        raise InputError(
            "the target's tokenizer has no chat template, so it takes single prompts and no chats; send one user message, or "
            "set tokenizer.chat_template and save the tokenizer"
        )
    return str(messages[0]["content"])


def tokenize_rendered(tokenizer: "PreTrainedTokenizerBase", text: str | list[str]) -> list[Any]:
    """Return the token ids of one or many texts from :func:`render_chat`. A template writes special tokens itself; without one
    the tokenizer adds them."""
    return list(tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"])


def encode_chat(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, Any]], *, thinking: bool | None = None
) -> list[int]:
    """Return the token ids of ``messages`` with the opening of the assistant's answer."""
    return _some(tokenize_rendered(tokenizer, _encodable(render_chat(tokenizer, messages, thinking=thinking))))


def end_of_turn(tokenizer: "PreTrainedTokenizerBase", stop_token_ids: set[int]) -> int | None:
    """Return the token that ends the target's turn: the first stop token that the template writes after a response.

    Without such a token, or without a template, it is the tokenizer's end of text.
    """
    own: int | None = tokenizer.eos_token_id
    if not tokenizer.chat_template:
        return own
    mark = "volleyvolley"
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": mark}]
    _, found, rest = render_chat(tokenizer, chat, add_generation_prompt=False).rpartition(mark)
    after = tokenizer(rest, add_special_tokens=False)["input_ids"] if found else []
    return next((int(token) for token in after if token in stop_token_ids), own)
