"""Request bodies of ``/v1/messages``, Anthropic's Messages API, and their translation into chat requests."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from volley.serve.fields import BLOCKS, IGNORED, Body, FunctionName, Strict, Text, refusal
from volley.serve.messages import MARKS
from volley.serve.protocol import ChatRequest, Sampling, StopString
from volley.serve.responses import chat_of

CALLED_HERE = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
}
"""Names that the fields of a chat request have in this endpoint."""


class _Block(Strict):
    unread = (*MARKS, "caller", "citations", "toolset_name")


class TextBlock(_Block):
    type: Literal["text"]
    text: Text


def _as_blocks(given: Any, kinds: Sequence[str] = ("text",)) -> Any:
    """Turn a plain string into a text block, and refuse blocks of other types by name."""
    if isinstance(given, str):
        return [{"type": "text", "text": given}]
    for own in given if isinstance(given, list) else ():
        kind = own.get("type") if isinstance(own, Mapping) else None
        if isinstance(kind, str) and kind not in kinds:
            known = ", ".join(kinds)
            raise refusal(
                None, f"a block of type {kind!r} is not read here; images and files are not read (known: {known})"
            )
    return given


Texts = Annotated[list[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])]


class ThinkingBlock(_Block):
    type: Literal["thinking"]
    thinking: Text
    signature: str = ""


class RedactedBlock(_Block):
    """Encrypted reasoning of another model, which cannot be read here."""

    type: Literal["redacted_thinking"]
    data: str = ""


class CallBlock(_Block):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any] = Field(default_factory=dict)


class ResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: Texts = Field(default_factory=list)
    is_error: bool = False


Block = Annotated[TextBlock | ThinkingBlock | RedactedBlock | CallBlock | ResultBlock, Field(discriminator="type")]


class Turn(Strict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Block],
        BeforeValidator(lambda given: _as_blocks(given, BLOCKS), json_schema_input_type=str | list[Block]),
    ]


class OfferedTool(Strict):
    unread = (*MARKS, "allowed_callers", "defer_loading", "eager_input_streaming", "input_examples")

    type: Literal["custom"] = "custom"
    name: FunctionName
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


def _own_tools(given: Any) -> Any:
    """Leave out tools that Anthropic's servers execute, as if the model never chose them. A strict server refuses them."""
    ignored = IGNORED.get()
    if ignored is None or not isinstance(given, list):
        return given
    kept = []
    for tool in given:
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if isinstance(kind, str) and kind != "custom":
            ignored[f"tools.{kind}"] = "only functions can be called here"
        else:
            kept.append(tool)
    return kept


class CallChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_a_tool(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise refusal("tool_choice.name", "tool_choice.name is for the type tool, and must be there then")
        return self

    def for_chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return {"auto": "auto", "any": "required", "none": "none"}[self.type]


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1)
    display: str | None = None  # no effect: reasoning is always in the answer

    @model_validator(mode="after")
    def _has_a_budget(self) -> Self:
        if self.type == "enabled" and self.budget_tokens is None:
            raise refusal(
                "thinking.budget_tokens", "thinking.budget_tokens: thinking that is enabled has a budget; give one"
            )
        return self


class JsonFormat(Strict):
    may_ignore = False

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None


class OutputConfig(Strict):
    effort: str | None = None
    format: JsonFormat | None = None


class CountRequest(Body):
    """Conversation whose tokens can be counted."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "container": (),
        "mcp_servers": ([],),
        "response_format": ({"type": "text"},),
        "structured_outputs": ({},),
    }
    remedies: ClassVar[dict[str, str]] = dict.fromkeys(
        ("response_format", "structured_outputs"), "use output_config.format"
    )
    without_effect: ClassVar = (
        *("betas", "cache_control", "context_management", "diagnostics", "inference_geo", "metadata", "service_tier"),
        *("speed", "user_profile_id", "workspace_id"),
    )
    elsewhere: ClassVar[dict[str, str]] = {
        "max_completion_tokens": "use max_tokens",
        "reasoning_effort": "use output_config.effort",
    }

    model: str | None = None
    messages: list[Turn] = Field(min_length=1, max_length=4096)
    system: Texts = Field(default_factory=list)
    tools: Annotated[list[OfferedTool], BeforeValidator(_own_tools)] = Field(default_factory=list, max_length=128)
    tool_choice: CallChoice = CallChoice(type="auto")
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: JsonFormat | None = Field(None, description="The earlier name of output_config.format.")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _ends_where_an_answer_may_begin(self) -> Self:
        last = self.messages[-1]
        if last.role == "assistant" and any(isinstance(block, CallBlock) for block in last.content):
            raise refusal("messages", "the last message calls tools; send their results in a user message after it")
        return self

    def as_chat(self) -> ChatRequest:
        """Translate the request into a chat request. Raises as :func:`chat_of` does."""
        return chat_of(self._fields(), CALLED_HERE)

    def _fields(self) -> dict[str, Any]:
        messages = _messages(self.system, self.messages)
        goes_on = messages[-1]["role"] == "assistant"
        variables = self.chat_template_kwargs
        if self.thinking is not None:  # templates use one of two names for this switch
            variables = dict.fromkeys(("enable_thinking", "thinking"), self.thinking.type != "disabled") | variables
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "add_generation_prompt": not goes_on,
            "continue_final_message": goes_on,
            "tools": [_function(tool) for tool in self.tools],
            "tool_choice": self.tool_choice.for_chat(),
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
            "reasoning_effort": self.output_config.effort,
            "thinking_token_budget": self.thinking and self.thinking.budget_tokens,
            "chat_template_kwargs": variables,
        }
        if form := self.output_config.format or self.output_format:
            body["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
        return body


class MessagesRequest(CountRequest, Sampling):
    max_tokens: int = Field(ge=1, description="No more than there is room for: a larger number is no error.")
    stop_sequences: Annotated[list[StopString], Field(max_length=16)] = Field(default_factory=list)
    stream: bool = False
    recalibrate: bool | None = None

    def _fields(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in Sampling.model_fields.keys() & self.model_fields_set}
        if self.stop_sequences:
            own["stop"] = self.stop_sequences
        return super()._fields() | own | {"stream": self.stream, "recalibrate": self.recalibrate}


def _function(tool: OfferedTool) -> dict[str, Any]:
    own = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    return {"type": "function", "function": own}


def _text(blocks: Sequence[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


def _messages(system: Sequence[TextBlock], turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return the turns as chat messages. Consecutive turns of one role are joined; each tool result becomes a message of its
    own."""
    told: list[dict[str, Any]] = [{"role": "system", "content": _text(system)}] if system else []

    def said_by(role: str) -> dict[str, Any]:
        if not told or told[-1]["role"] != role:
            told.append({"role": role, "content": ""})
        return told[-1]

    for turn in turns:
        if not turn.content:
            said_by(turn.role)
        for block in turn.content:
            match block:
                case TextBlock():
                    own = said_by(turn.role)
                    own["content"] = f"{own['content']}\n{block.text}" if own["content"] else block.text
                case ThinkingBlock():
                    own = said_by(turn.role)
                    own["reasoning_content"] = own.get("reasoning_content", "") + block.thinking
                case CallBlock():
                    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                    call = {"id": block.id, "type": "function", "function": function}
                    said_by(turn.role).setdefault("tool_calls", []).append(call)
                case ResultBlock():
                    text = ("Error: " if block.is_error else "") + _text(block.content)
                    told.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
                case RedactedBlock():
                    said_by(turn.role)
    if told[-1] == {"role": "assistant", "content": ""}:
        told.pop()  # an empty message cannot be continued
    return told
