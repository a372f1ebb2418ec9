"""Conversations and tools as clients send them and as chat templates read them."""

import json
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from transformers import PreTrainedTokenizerBase

from volley.serve.fields import FunctionName, Strict, Text, refusal

_TAKEN = {"messages", *signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"documents"}
"""Names that template variables cannot have."""

_KINDS = {"text", "message"}
"""Values that some clients send as the type of a whole message."""
MARKS = ("cache_control", "prompt_cache_breakpoint")
"""Fields that mark prompt prefixes to cache; here every prompt is cached."""


class TextPart(Strict):
    unread = MARKS

    type: Literal["text"]
    text: Text


class FunctionCall(Strict):
    unread = ("parsed_arguments",)  # added by the openai client's ``parse``

    name: Text
    arguments: Text

    def decoded_arguments(self) -> dict[str, Any] | str:
        """Return the arguments as the object that templates need, or as text if the model wrote no object or was cut."""
        try:
            found = json.loads(self.arguments or "{}")
            is_object = isinstance(found, dict) and bool(json.dumps(found, ensure_ascii=False).encode())
        except (ValueError, RecursionError):  # half of a surrogate pair is no character
            is_object = False
        return found if is_object else self.arguments


class ToolCall(Strict):
    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.decoded_arguments()}
        return {"id": self.id, "type": "function", "function": function}


class Message(Strict):
    unread = (
        *MARKS,
        *("annotations", "parsed", "provider_specific_fields", "reasoning_details", "refusal", "thinking_blocks"),
    )
    """Fields of an answer that gateways and the openai client's ``parse`` add, and that clients send back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(min_length=1)] = ""
    name: str | None = None
    tool_calls: list[ToolCall] = Field([], max_length=128)
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = Field(None, description="Another name of reasoning_content.")

    @model_validator(mode="before")
    @classmethod
    def _without_its_type(cls, data: Any) -> Any:
        is_whole = isinstance(data, Mapping) and data.get("type") in _KINDS
        return {**data, "type": None} if is_whole else data

    @model_validator(mode="after")
    def _suits_its_role(self) -> Self:
        if "content" not in self.model_fields_set and not (self.tool_calls or self.reasoning_content or self.reasoning):
            raise refusal(
                "messages", f"a message of the {self.role} has no content; give it a text, if need be an empty one"
            )
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content or self.reasoning):
            raise refusal("messages", "only messages of the assistant have tool_calls or reasoning_content")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise refusal(
                "messages", "messages of the role tool, and no others, say which call they answer: tool_call_id"
            )
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it. Newer clients write ``developer`` for ``system``."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if reasoning := self.reasoning_content or self.reasoning:
            message |= {"reasoning_content": reasoning, "thinking": reasoning}  # templates use either name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        return message


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return all messages as chat templates expect them. Tool results get the name of the called function."""
    names: dict[str, str] = {}
    rendered = []
    for message in messages:
        names |= {call.id: call.function.name for call in message.tool_calls}
        own = message.for_template()
        if message.role == "tool" and message.tool_call_id in names:
            own.setdefault("name", names[message.tool_call_id])
        rendered.append(own)
    return rendered


class Function(Strict):
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema; left out, the function takes nothing.")
    strict: bool | None = Field(None, description="Arguments are always valid under the schema.")


class Tool(Strict):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": "function", "function": {**function, "parameters": self.schema_of_arguments}}

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return self.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


class NamedFunction(Strict):
    name: FunctionName


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=128)


class SomeTools(Strict):
    """``tool_choice`` that allows some of the given tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | SomeTools


class Tools(Strict):
    """Tools of a request, and which of them an answer may or must call."""

    tools: list[Tool] = Field([], max_length=128)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _choice_is_among_them(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise refusal("tools", "two tools have the same name")
        if missing := [name for name in self._chosen or () if name not in names]:
            known = ", ".join(names) or "there are none"
            raise refusal("tool_choice", f"no tool is named {missing[0]!r} (tools: {known})")
        if self.tool_choice == "required" and not names:
            raise refusal("tool_choice", "tool_choice is required and there are no tools; give tools")
        return self

    @property
    def _chosen(self) -> list[str] | None:
        """Return the names in ``tool_choice``, or ``None`` if it has none."""
        match self.tool_choice:
            case NamedTool(function=function):
                return [function.name]
            case SomeTools(allowed_tools=allowed):
                return [tool.function.name for tool in allowed.tools]
        return None

    @property
    def offered(self) -> list[Tool]:
        """Return the tools that the answer may call."""
        if self.tool_choice == "none":
            return []
        chosen = self._chosen
        return self.tools if chosen is None else [tool for tool in self.tools if tool.function.name in chosen]

    @property
    def shown(self) -> list[Tool]:
        """Return the tools that the chat template receives. A model that is free to choose must not see tools it may not call."""
        return self.offered if isinstance(self.tool_choice, SomeTools) or not self.offered else self.tools

    @property
    def is_forced(self) -> bool:
        """Return whether the answer must be a call."""
        choice = self.tool_choice
        mode = choice.allowed_tools.mode if isinstance(choice, SomeTools) else choice
        return bool(self.offered) and mode != "auto"


class Reasoning(Strict):
    """Reasoning options of a request."""

    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: dict[str, Any] = Field({}, description="Variables for the chat template.")
    thinking_token_budget: int | None = Field(None, ge=0, description="Reasoning is closed after so many tokens.")

    @model_validator(mode="after")
    def _leaves_the_messages_alone(self) -> Self:
        if clash := sorted(_TAKEN & self.chat_template_kwargs.keys()):
            raise refusal(
                "chat_template_kwargs", f"chat_template_kwargs cannot set {clash[0]}; use the request's fields"
            )
        return self

    def variables(self) -> dict[str, Any]:
        """Return the variables for the chat template."""
        own: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            own["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":  # templates use one of two names for this switch
            own |= {"enable_thinking": False, "thinking": False}
        return own | self.chat_template_kwargs
