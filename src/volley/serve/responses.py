"""Request bodies of ``/v1/responses`` and their translation into chat requests. No state is stored between requests."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError, model_validator

from volley.serve.errors import ApiError
from volley.serve.fields import (
    KINDS_OF_ITEMS,
    OPENAI_WITHOUT_EFFECT,
    Body,
    FunctionName,
    Strict,
    Text,
    first_problem,
    refusal,
)
from volley.serve.messages import MARKS
from volley.serve.protocol import ChatRequest, Diffusion, Sampling

_OTHER_TOOLS = {"custom", "image_generation", "local_shell", "namespace", "web_search", "web_search_preview"}
_PARSED = ("parsed", "parsed_arguments")
"""Fields that the openai client's ``parse`` adds to an answer."""
_CALLED_HERE = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Names that the fields of a chat request have in this endpoint."""


class _Item(Strict):
    """Item of an answer that a client sends back. Its id and status mean nothing to the model."""

    unread = _PARSED

    id: str | None = None
    status: str | None = None


class ContentPart(Strict):
    unread = (*_PARSED, *MARKS)

    type: Literal["input_text", "output_text", "text", "reasoning_text"]
    text: Text
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)


Content = Text | list[ContentPart]


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: str | None = None


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class CustomCallItem(_Item):
    """Call with a plain string as argument; here it becomes a function's argument in an object."""

    type: Literal["custom_tool_call"]
    call_id: Text
    name: Text
    input: Text
    namespace: str | None = None

    @property
    def arguments(self) -> str:
        return json.dumps({"input": self.input}, ensure_ascii=False)


class OutputItem(_Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: Content


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: list[Any] = Field(default_factory=list)
    content: list[ContentPart] = Field(default_factory=list)
    encrypted_content: str | None = None


def _kind(item: Any) -> str:
    given = item.get("type", "message") if isinstance(item, Mapping) else getattr(item, "type", "message")
    return given if given in KINDS_OF_ITEMS else "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[OutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


def _functions(given: Any) -> Any:
    """Leave out tools that are not functions, such as others that Codex offers, as if the model never chose them."""
    if not isinstance(given, list):
        return given
    return [own for own in given if not isinstance(own, Mapping) or own.get("type") not in _OTHER_TOOLS]


def _as_items(given: Any) -> Any:
    """Turn a plain string into a user message."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class FunctionTool(Strict):
    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(Strict):
    type: Literal["function"]
    name: FunctionName


class AllowedFunctions(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ChosenFunction] = Field(min_length=1, max_length=128)


class TextFormat(Strict):
    may_ignore = False

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Strict):
    effort: str | None = None
    summary: str | None = None  # no effect: reasoning is always in the answer


class ResponsesStreamOptions(Strict):
    include_obfuscation: bool = False


class ResponsesRequest(Body, Sampling):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "access_programs": (),
        "background": (False,),
        "cache_salt": (),
        "context_management": ([],),
        "conversation": (),
        "enable_response_messages": (False,),
        "image": (),
        "include_reasoning": (True,),
        "include_stop_str_in_output": (False,),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "previous_input_messages": (),
        "prompt": (),
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "structured_outputs": ({},),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    remedies: ClassVar[dict[str, str]] = {
        "store": "this server keeps no responses; set store to false",
        "previous_response_id": "this server keeps no responses; send the whole conversation as input",
        "conversation": "this server keeps no conversations; send the whole conversation as input",
        "background": "this server answers while the client waits; leave it out, or set stream",
        "response_format": "use text.format",
        "structured_outputs": "use text.format",
    }
    elsewhere: ClassVar[dict[str, str]] = {
        "max_completion_tokens": "use max_output_tokens",
        "max_new_tokens": "use max_output_tokens",
        "max_tokens": "use max_output_tokens",
        "messages": "use input, or /v1/chat/completions",
        "reasoning_effort": "use reasoning.effort",
    }
    without_effect: ClassVar = ("client_metadata", *OPENAI_WITHOUT_EFFECT)

    model: str | None = None
    input: Annotated[
        list[Item],
        Field(min_length=1, max_length=4096),
        BeforeValidator(_as_items, json_schema_input_type=str | list[Item]),
    ]
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: Annotated[list[FunctionTool], BeforeValidator(_functions)] = Field(default_factory=list, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | AllowedFunctions = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    stream: bool = False
    stream_options: ResponsesStreamOptions = ResponsesStreamOptions()
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    thinking_token_budget: int | None = Field(None, ge=0)
    diffusion: Diffusion | None = None
    recalibrate: bool | None = None
    include: list[str] = Field(default_factory=list, description="Without effect: reasoning is in the answer as it is.")

    @model_validator(mode="after")
    def _includes_what_there_is(self) -> Self:
        if "message.output_text.logprobs" in self.include:
            raise refusal(
                "include", "include: a response has no log-probabilities here; use /v1/chat/completions with logprobs"
            )
        return self

    def as_chat(self) -> ChatRequest:
        """Translate the request into a chat request. Raises as :func:`chat_of` does."""
        form = self.text.format
        body: dict[str, Any] = {
            "model": self.model,
            "messages": _messages(self.input, self.instructions),
            "max_tokens": self.max_output_tokens,
            **{name: getattr(self, name) for name in Sampling.model_fields.keys() & self.model_fields_set},
            "tools": [
                {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
                for tool in self.tools
            ],
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
            "thinking_token_budget": self.thinking_token_budget,
            "stream": self.stream,
            "diffusion": self.diffusion,
            "recalibrate": self.recalibrate,
        }
        if form is not None:
            inner = form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
            body["response_format"] = {"type": form.type} | ({"json_schema": inner} if form.schema_ is not None else {})
        return chat_of(body)


def _choice(given: Any) -> Any:
    """Return ``tool_choice`` in the form of a chat request."""
    match given:
        case ChosenFunction():
            return {"type": "function", "function": {"name": given.name}}
        case AllowedFunctions():
            allowed = {"mode": given.mode, "tools": [_choice(tool) for tool in given.tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return given


def chat_of(fields: Mapping[str, Any], called: Mapping[str, str] = MappingProxyType(_CALLED_HERE)) -> ChatRequest:
    """Return the chat request with these fields. Raises :class:`ApiError` (400) that names fields as :func:`here` does."""
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        message, param = first_problem(error.errors())
        raise here(ApiError(400, message, param=param), called) from None


def here(error: ApiError, called: Mapping[str, str] = MappingProxyType(_CALLED_HERE)) -> ApiError:
    """Rename a chat's field in an error to its name in another endpoint, by default this one."""
    own = error.body["error"]
    given = own["param"] or ""
    first, _, rest = given.partition(".")
    name = called.get(given) or (f"{called[first]}.{rest}" if first in called else None)
    if name is not None:
        own["message"], own["param"] = str(own["message"]).replace(given, name), name
    return error


def _messages(given: Sequence[Item], instructions: str | None) -> list[dict[str, Any]]:
    """Return the items as chat messages. Consecutive reasoning, text and calls of the assistant become one message."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    is_open = False  # the last message is the assistant's and may receive more

    def assistant() -> dict[str, Any]:
        if not is_open:
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for item in given:
        match item:
            case OutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            case CallItem() | CustomCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                assistant().setdefault("tool_calls", []).append(call)
            case ReasoningItem():
                own = assistant()
                own["reasoning_content"] = own.get("reasoning_content", "") + _text(item.content)
            case MessageItem(role="assistant"):
                assistant()["content"] += _text(item.content)
            case MessageItem():
                messages.append({"role": item.role, "content": _text(item.content)})
        is_open = messages[-1]["role"] == "assistant"
    return messages


def _text(content: str | Sequence[ContentPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
