"""Request bodies: OpenAI's fields, some of vLLM's, and one of volley's own.

Unknown fields are ignored and reported in a header, or refused by name with ``--strict``. OpenAI's fields that volley does not
support are refused unless their value requests the default. Fields without effect on the answer are accepted.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, StrictBool, model_validator

from volley.errors import ConfigError
from volley.params import DiffusionMode, DiffusionParams, SamplingParams, Strategy
from volley.serve.fields import OPENAI_WITHOUT_EFFECT, Body, Strict, Text, refusal
from volley.serve.grammars import GrammarFields, grammar_of
from volley.serve.messages import Message, Reasoning, Tools

StopString = Annotated[Text, Field(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]

_GUIDED = ("guided_choice", "guided_grammar", "guided_json", "guided_json_object", "guided_regex")
"""Names that vLLM gave the parts of ``structured_outputs`` before."""
_OF_OTHERS: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "ec_transfer_params": (),
    **dict.fromkeys(_GUIDED, ()),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logprob_token_ids": ([],),
    "mm_payload": ("tensors",),
    "repetition_detection": (),
    "return_mm_kwargs": (True, False),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "separate_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "stream_reasoning": (True,),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left", "right"),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
"""Unsupported fields of vLLM and SGLang, with the values that request nothing, as their clients send them."""


LEAST_TOP_P = 1e-6
"""Value that replaces a ``top_p`` of 0: only the likeliest token remains."""


class Sampling(Strict):
    """Sampling parameters and stop conditions."""

    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, description="Keep so many of the likeliest tokens; 0 or -1 keeps all.")
    min_p: float = Field(0.0, ge=0, le=1, description="Keep tokens at least this share as likely as the likeliest.")
    draft_temperature: float | None = Field(
        None,
        ge=0,
        le=100,
        description="Temperature of drafts; by default the answer's. It changes speed, not the distribution.",
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=128)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, description="Tokens before which no end token may come.")
    skip_special_tokens: bool = Field(True, description="Whether special tokens are left out of the text.")
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=10)
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] = Field(
        {}, max_length=1024
    )
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="Lower is served first.")

    @model_validator(mode="after")
    def _ends_are_clear(self) -> Self:
        if self.min_tokens and self.stop:
            raise refusal("min_tokens", "min_tokens hold off end tokens, not stop strings; leave one of both out")
        return self


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: Annotated[bool, Field(description="Every chunk has the usage so far.")] = False
    include_obfuscation: bool = False


class Diffusion(Strict):
    """Options of diffusion language models (:class:`volley.DiffusionParams`). Omitted ones come from the checkpoint."""

    may_ignore = False

    mode: DiffusionMode | None = None
    canvas_length: int | None = Field(None, ge=1, le=4096)
    max_steps: int | None = Field(None, ge=1, le=4096)
    strategy: Strategy | None = None
    threshold: float | None = Field(None, ge=0, le=1)
    sub_block: int | None = Field(None, ge=1)
    entropy_bound: float | None = Field(None, ge=0)
    t_min: float | None = Field(None, ge=0)
    t_max: float | None = Field(None, ge=1e-3)
    stability_threshold: int | None = Field(None, ge=0, le=64)
    confidence_threshold: float | None = Field(None, ge=0)
    stream_drafts: StrictBool | None = Field(
        None, description="Stream what stands on the canvas after each pass: chunks without choices that have a draft."
    )

    @model_validator(mode="before")
    @classmethod
    def _is_object(cls, data: Any) -> Any:
        if not isinstance(data, Mapping | Diffusion):
            raise refusal("diffusion", f'diffusion is {data!r:.60}; it must be an object, such as {{"mode": "self"}}')
        return data

    @model_validator(mode="after")
    def _usable(self) -> Self:
        try:
            self.params()
        except ConfigError as error:
            raise refusal("diffusion", str(error)) from None
        return self

    def params(self) -> DiffusionParams:
        return DiffusionParams(**self.model_dump())


class _Request(Body, Sampling, GrammarFields):
    """Fields of both completion endpoints."""

    remedies: ClassVar[dict[str, str]] = dict.fromkeys(_GUIDED, "use structured_outputs")

    without_effect: ClassVar = ("guided_decoding_backend", "guided_whitespace_pattern", *OPENAI_WITHOUT_EFFECT)
    instead_of_streaming: ClassVar = "set stream to false"
    """Advice in the error for streams that request ``prompt_logprobs``."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=128)
    prompt_logprobs: int | None = Field(
        None, ge=0, le=20, description="vLLM's: the log-probabilities of the prompt's tokens, and of so many likeliest."
    )
    return_token_ids: bool = Field(False, description="vLLM's: answers have the token ids of prompt and text.")
    diffusion: Diffusion | None = Field(None, description="For diffusion language models only.")
    recalibrate: bool | None = Field(
        None,
        description="Whether a server that recalibrates its drafter may keep the token ids of this request for that.",
    )
    mark_draft: bool = Field(
        False, description="Streamed chunks say with from_draft whether they had been drafted, or found in the text."
    )

    @model_validator(mode="after")
    def _suits_its_stream(self) -> Self:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise refusal("stream_options", "stream_options is only allowed when stream is true")
        if self.diffusion is not None and self.diffusion.stream_drafts and not self.stream:
            raise refusal("diffusion.stream_drafts", "stream_drafts is only allowed when stream is true")
        if self.stream and self.prompt_logprobs is not None:
            raise refusal(
                "prompt_logprobs", f"prompt_logprobs is only allowed without stream; {self.instead_of_streaming}"
            )
        return self

    def sampling(
        self, max_tokens: int, top_logprobs: int | None, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> SamplingParams:
        """Return the engine's parameters. ``top_logprobs=None`` records no log-probabilities.

        ``defaults`` replace fields that the request omits.
        """
        params = SamplingParams(
            temperature=self.temperature,
            top_k=max(0, self.top_k),
            top_p=self.top_p or LEAST_TOP_P,
            min_p=self.min_p,
            draft_temperature=self.draft_temperature,
            seed=None if self.seed is None else self.seed % 2**63,
            max_tokens=max_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            logprobs=top_logprobs is not None,
            top_logprobs=top_logprobs or 0,
            prompt_logprobs=self.prompt_logprobs,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple((int(token), bias) for token, bias in self.logit_bias.items()),
            priority=self.priority,
            grammar=grammar_of(self),
            diffusion=None if self.diffusion is None else self.diffusion.params(),
        )
        return replace(params, **{name: own for name, own in defaults.items() if name not in self.model_fields_set})


class ChatRequest(_Request, Tools, Reasoning):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_OF_OTHERS,
        "add_special_tokens": (False,),
        "audio": (),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "return_prompt_text": (False,),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
    remedies: ClassVar[dict[str, str]] = {
        **_Request.remedies,
        "chat_template": "start the server with --chat-template",
        "function_call": "use tool_choice",
        "functions": "use tools",
        "store": "this server keeps nothing; set store to false",
    }
    elsewhere: ClassVar[dict[str, str]] = {
        "enable_thinking": "put it into chat_template_kwargs",
        "input": "use messages, or /v1/responses",
        "instructions": "use a message of the system, or /v1/responses",
        "max_new_tokens": "use max_completion_tokens",
        "max_output_tokens": "use max_completion_tokens",
        "prompt": "use messages, or /v1/completions",
        "reasoning": "use reasoning_effort",
        "thinking": "use reasoning_effort, or chat_template_kwargs",
    }

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    add_generation_prompt: bool = True
    continue_final_message: bool = Field(False, description="Go on with the last message instead of a new one.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise refusal("top_logprobs", "top_logprobs is only allowed when logprobs is true")
        check_opening(self.add_generation_prompt, self.continue_final_message)
        return self


class CompletionRequest(_Request):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_OF_OTHERS,
        "add_special_tokens": (True,),
        "prompt_embeds": (),
        "suffix": ("",),
    }
    remedies: ClassVar[dict[str, str]] = {
        **_Request.remedies,
        "suffix": "write the model's own marks into prompt, such as <|fim_prefix|>…<|fim_suffix|>…<|fim_middle|>",
    }
    elsewhere: ClassVar[dict[str, str]] = {
        "input": "use prompt, or /v1/responses",
        "max_completion_tokens": "use max_tokens",
        "max_new_tokens": "use max_tokens",
        "max_output_tokens": "use max_tokens",
        "messages": "use prompt, or /v1/chat/completions",
        "reasoning_effort": "it is for /v1/chat/completions",
        "thinking_token_budget": "it is for /v1/chat/completions",
        "tools": "they are for /v1/chat/completions",
        "top_logprobs": "use logprobs, which is a number here",
    }
    instead_of_streaming: ClassVar = "set stream to false, or use echo"

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=128)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=128)]
    )
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = Field(False, description="Begin the text, and the log-probabilities, with the prompt's.")

    @model_validator(mode="after")
    def _something_is_asked(self) -> Self:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise refusal("max_tokens", "max_tokens is 0, which requests nothing; set echo to score the prompt")
        return self

    def sampling(
        self, max_tokens: int, top_logprobs: int | None, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> SamplingParams:
        params = super().sampling(max_tokens, top_logprobs, defaults)
        asked = [self.prompt_logprobs, top_logprobs if self.echo else None]
        counts = [count for count in asked if count is not None]
        return replace(params, prompt_logprobs=max(counts)) if counts else params

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts as a list, even if one was given."""
        many = isinstance(self.prompt, list) and isinstance(self.prompt[0], str | list)
        return self.prompt if many else [self.prompt]  # type: ignore[return-value]


class TokenizeRequest(Reasoning, Tools):
    """Text or conversation to tokenize."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = Field(None, description="By default those of a text, none of a conversation.")
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise refusal("prompt", "give either a prompt or messages")
        check_opening(self.add_generation_prompt, self.continue_final_message)
        return self


def check_opening(add_generation_prompt: bool, continue_final_message: bool) -> None:
    if continue_final_message and add_generation_prompt:
        message = "continue_final_message needs add_generation_prompt to be false"
        raise refusal("continue_final_message", message)


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[TokenId] = Field(max_length=2**20)
