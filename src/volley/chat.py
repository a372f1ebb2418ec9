"""Prompts and chat templates: from strings and messages to the token ids that a model was taught to answer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from volley.errors import ConfigError, InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # the command line loads it only when it is needed


Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is a prompt rather than a list of them."""
    return isinstance(prompts, str) or (
        isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], int | Mapping)
    )


def encode_prompt(tokenizer: "PreTrainedTokenizerBase | None", prompt: Prompt) -> list[int]:
    """The token ids of a string, of a list of token ids as it is, or of chat messages through the chat template."""
    if prompt and all(isinstance(part, int) for part in prompt):
        return list(cast(Sequence[int], prompt))
    is_chat = not isinstance(prompt, str) and all(isinstance(part, Mapping) for part in prompt)
    if not prompt:
        raise InputError("the prompt is empty; give at least one token to continue from")
    if not isinstance(prompt, str) and not is_chat:
        raise InputError("a prompt is a string, a list of token ids, or a list of chat messages; this is a mixture")
    if tokenizer is None:
        raise InputError("this target was loaded without a tokenizer; pass prompts as lists of token ids")
    if is_chat:
        return encode_chat(tokenizer, cast(Sequence[Message], prompt))
    token_ids = list(tokenizer(prompt)["input_ids"])
    if not token_ids:
        raise InputError("the prompt is empty; give at least one token to continue from")
    return token_ids


def check_template(tokenizer: "PreTrainedTokenizerBase", thinking: bool | None = None) -> str:
    """The tokenizer's chat template; an error if there is none, or if it ignores the switch ``thinking``."""
    template = tokenizer.chat_template
    if not template:
        raise InputError(
            "the target's tokenizer has no chat template; pass the prompt as a string or as token ids, or set "
            "tokenizer.chat_template and save the tokenizer"
        )
    if thinking is not None and "enable_thinking" not in str(template):
        raise ConfigError("the target's chat template has no thinking switch; leave thinking unset")
    return str(template)


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
    """The text of ``messages``, by default with the opening of the assistant's answer.

    ``thinking`` reaches the template as ``enable_thinking``; with ``None`` the template decides. ``tools`` are functions in
    OpenAI's form. ``variables`` reach the template by their names. ``continue_final_message`` leaves the last message open.
    ``template`` takes the place of the tokenizer's own.
    """
    for message in messages:
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise InputError(f"a chat message has 'role' and 'content'; this one has {sorted(message)}")
    if template is None:
        check_template(tokenizer)
    given = dict(variables or {})
    if thinking is not None:
        given["enable_thinking"] = thinking
    if tools:
        given["tools"] = [dict(tool) for tool in tools]
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=template,
            **given,
        )
    except (ValueError, TypeError) as error:
        raise InputError(f"the messages cannot be rendered: {error}") from error
    return str(text)


def encode_chat(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, Any]], *, thinking: bool | None = None
) -> list[int]:
    """The token ids of ``messages`` with the opening of the assistant's answer."""
    return list(tokenizer(render_chat(tokenizer, messages, thinking=thinking), add_special_tokens=False)["input_ids"])


def end_of_turn(tokenizer: "PreTrainedTokenizerBase", stop_token_ids: set[int]) -> int | None:
    """The token the target ends its turn with: the first stop token that the template writes after a response.

    Without such a token, or without a template, it is the tokenizer's own end of text.
    """
    own: int | None = tokenizer.eos_token_id
    if not tokenizer.chat_template:
        return own
    mark = "volleyvolley"
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": mark}]
    _, found, rest = render_chat(tokenizer, chat, add_generation_prompt=False).rpartition(mark)
    after = tokenizer(rest, add_special_tokens=False)["input_ids"] if found else []
    return next((int(token) for token in after if token in stop_token_ids), own)
