"""Service of one model: turns request bodies into jobs, prompts into tokens, and enforces limits."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Protocol

from volley.chat import Prompt
from volley.decode.rules import AtLeast
from volley.decode.thinking import Spelt, ThinkingBudget
from volley.engine.engine import Engine
from volley.engine.memory import memory_of
from volley.engine.start import warm_up
from volley.errors import ConfigError, VolleyError, did_you_mean
from volley.models.drafters.draft_model import load_drafter
from volley.models.drafters.drafter import Drafter
from volley.models.targets.sampling_defaults import sampling_defaults
from volley.params import SamplingParams
from volley.serve.anthropic import CALLED_HERE, CountRequest, MessagesRequest
from volley.serve.anthropic_events import MessagesDialect
from volley.serve.calls import grammar_of_answer
from volley.serve.config import ServeConfig
from volley.serve.errors import ApiError, engine_dead, shutting_down
from volley.serve.fields import IGNORED
from volley.serve.formats import AnswerFormat, plain_calls
from volley.serve.grammars import asked_for, compile_grammar
from volley.serve.markers import special_tokens
from volley.serve.messages import NamedTool, for_template
from volley.serve.metrics import Metrics
from volley.serve.parsing import AnswerParser, PlainText
from volley.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from volley.serve.replies import ChatDialect, CompletionDialect, Dialect, Echo
from volley.serve.response_events import ResponsesDialect
from volley.serve.responses import ResponsesRequest, here
from volley.serve.spelling import Spelling
from volley.serve.template import ChatTemplate, ChatTemplates
from volley.serve.worker import Job, Worker

log = logging.getLogger("volley.serve")


def memory(engine: Engine) -> dict[str, float]:
    """Return the MiB of weights, pools and graphs, and of the recurrent states of a hybrid target."""
    sizes = {f"{part}_mib": size for part, size in memory_of(engine.core).items()}
    if engine.core.recurrent is not None:
        sizes["recurrent_states_mib"] = engine.core.recurrent.store.nbytes
        sizes["recurrent_state_mib"] = engine.core.recurrent.store.bytes_per_state
    return {name: round(size / 2**20, 3) for name, size in sizes.items()}


class BackgroundTask(Protocol):
    """Task that runs beside a service in the server's event loop, as long as the server runs."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...


class Service:
    """One served model. Everything except the worker runs in the event loop."""

    def __init__(self, engine: Engine, config: ServeConfig, model: str) -> None:
        self.config = config
        self.model = model
        graphs, seconds = warm_up(engine)
        holds = engine.snapshot()
        self.metrics = Metrics(holds.num_pages, memory_of(engine.core))
        self.worker = Worker(engine, self.metrics, config.max_waiting)
        self.max_model_len = holds.max_tokens
        self.memory = memory(engine)
        if graphs:
            self.memory |= {"cuda_graphs": graphs, "cuda_graphs_seconds": round(seconds, 1)}
        self.draining = False
        self.preparing = 0
        """Number of accepted requests not yet handed to the worker. Only the event loop changes it."""
        self.background_tasks: list[BackgroundTask] = []
        self.on_reloaded: list[Callable[[Drafter], None]] = []
        """Callbacks that the event loop calls with the new drafter after :meth:`reload_drafter` has replaced the old one."""
        self._engine = engine
        self._tokenizer_in_use = threading.Lock()
        self._templates = ChatTemplates(engine.tokenizer, config.chat_template, config.answer_format)
        chosen = sampling_defaults(engine.target.model.generation_config) if config.generation_config == "auto" else {}
        self.sampling = {name: value for name, value in chosen.items() if name != "max_tokens"}
        """Sampling parameters for fields that a request omits."""
        self.most_tokens: int | None = chosen.get("max_tokens")
        """Maximum tokens of a chat answer without its own limit; ``None``: as many as fit the context."""
        self._spelling = Spelling(engine.tokenizer)
        self._longest_token = max(map(len, engine.tokenizer.get_vocab()))
        engine.encode("a")  # initialises the tokenizer's options before the worker decodes

    async def reload_drafter(self) -> bool:
        """Reload the drafter while requests continue. Return whether the new one was accepted."""
        fields = {"model": self.model}
        try:
            drafter = await asyncio.to_thread(self._load_drafter)
            await asyncio.wrap_future(self.worker.swap(drafter))
        except Exception as error:  # after any failure the old drafter is still in place
            self.metrics.reloads.labels("refused").inc()
            log.error("a drafter was refused; the old one stays", extra={"fields": fields | {"reason": str(error)}})
            return False
        self.metrics.holds(memory_of(self._engine.core))
        self.metrics.reloads.labels("done").inc()
        log.info("a drafter was reloaded", extra={"fields": fields})
        for listener in self.on_reloaded:
            listener(drafter)
        return True

    def _load_drafter(self) -> Drafter:
        if self._engine.drafter_source is None:
            raise ConfigError("this model has no drafter that was loaded from a folder; start the server with one")
        path, weights = self._engine.drafter_source
        return load_drafter(path, self._engine.target, weights, compiled=self._engine.config.compile)

    # -- from bodies to jobs -------------------------------------------------------------------------------------------
    async def chat(self, body: ChatRequest, client: str = "") -> tuple[Job, Dialect]:
        job, parsers = await self.converse(body, client)
        dialect = ChatDialect(
            self.model,
            self.spell,
            logprobs=body.logprobs,
            mark_draft=body.mark_draft,
            include_usage=body.stream_options.include_usage,
            continuous_usage=body.stream_options.continuous_usage_stats,
            parsers=parsers,
            is_named=isinstance(body.tool_choice, NamedTool),
            bytes_of=self._spelling.bytes,
            prompts=job.prompts,
            prompt_logprobs=body.prompt_logprobs,
            token_ids=body.return_token_ids,
        )
        return job, dialect

    async def respond(self, body: ResponsesRequest, client: str = "") -> tuple[Job, Dialect]:
        chat = body.as_chat()
        try:
            job, parsers = await self.converse(chat, client)
        except ApiError as error:
            raise here(error) from None
        return job, ResponsesDialect(self.model, self.spell, body, job.params[0], parsers[0])

    async def message(self, body: MessagesRequest, client: str = "") -> tuple[Job, Dialect]:
        try:
            job, parsers = await self.converse(self._as_chat(body), client, body.max_tokens)
        except ApiError as error:
            raise here(error, CALLED_HERE) from None
        stops = job.params[0].stop
        return job, MessagesDialect(self.model, self.spell, job.prompts[0], stops, self.decode, parsers[0])

    async def count_tokens(self, body: CountRequest) -> dict[str, int]:
        self.check(body.model)
        chat = self._as_chat(body)
        prompt = await asyncio.to_thread(self._render, chat)
        (token_ids,) = await self._encode([prompt], "messages", special=not self._template_of(chat).text)
        return {"input_tokens": len(token_ids)}

    def _as_chat(self, body: CountRequest) -> ChatRequest:
        """Return the chat request. A reasoning budget is dropped if the model's reasoning format is unknown, because agents
        always send one."""
        chat = body.as_chat()
        form = self._template_of(chat).form
        is_known = form is not None and form.thinking is not None
        return chat if is_known else chat.model_copy(update={"thinking_token_budget": None})

    async def converse(
        self, body: ChatRequest, client: str = "", most: int | None = None
    ) -> tuple[Job, Sequence[PlainText]]:
        """Return the job of a conversation and the parsers of its answers.

        An answer without its own limit has at most ``most`` tokens, or as many as fit the context.
        """
        self.check(body.model)
        template = self._template_of(body)
        form = self._form_of(body, template)
        self.worker.check_room()  # a full server does no preparation
        prompt = await asyncio.to_thread(self._render, body)
        (token_ids,) = await self._encode([prompt], "messages", special=not template.text)
        asked = body.max_completion_tokens or body.max_tokens
        self._check_length(token_ids, asked, "messages")
        params = body.sampling(asked or 1, body.top_logprobs if body.logprobs else None, self.sampling)
        if asked is None:
            room = max(1, self._engine.room(len(token_ids), params))
            params = replace(params, max_tokens=min(room, most or self.most_tokens or room))
        parsers: Sequence[PlainText] = [PlainText() for _ in range(body.n)]
        if form is not None:
            tools = [tool.for_template() for tool in body.offered]
            is_bare = not body.is_forced and not asked_for(body)
            own: Any = {"tools": tools, "with_calls": bool(tools), "bare_calls": is_bare}
            parsers = [AnswerParser(form, prompt, **own) for _ in range(body.n)]
            shows = self._shows_special_tokens(form) or not body.skip_special_tokens
            params = replace(params, skip_special_tokens=not shows)
        grammar = await compile_grammar(self._engine.grammars, body)  # errors name a field
        params = replace(params, grammar=grammar)
        params = await self._bind(params, body, form, parsers[0])
        params = self._held_open(params, body.min_tokens)
        others = replace(params, prompt_logprobs=None)  # one of the answers reads the prompt for all of them
        choices = [params, *(others.for_choice(choice) for choice in range(1, body.n))]
        return self._submit(Job([token_ids] * body.n, choices, client, body.recalibrate)), parsers

    def _held_open(self, params: SamplingParams, least: int) -> SamplingParams:
        """Return the parameters with a rule that forbids end tokens before ``least`` tokens."""
        problem = None
        if least > params.max_tokens:
            problem = f"is {least}, and the answer has {params.max_tokens} tokens at most; give a smaller number"
        elif least and params.grammar is not None:
            problem = "cannot go with a form of the answer, which says itself where it ends; leave one of both out"
        if problem:
            raise ApiError(400, f"min_tokens {problem}", param="min_tokens")
        target = self._engine.target
        own = frozenset() if params.ignore_eos else target.stop_token_ids
        ends = sorted(token for token in own | frozenset(params.stop_token_ids) if token < target.vocab_size)
        if not least or not ends:
            return params

        def at_least(_prompt: Any, _vocab_size: int, device: Any) -> AtLeast:
            return AtLeast(least, ends, device)

        return replace(params, rules=(*params.rules, at_least))

    def _template_of(self, body: ChatRequest | TokenizeRequest) -> ChatTemplate:
        return self._templates.choose(with_tools=bool(body.shown))

    def _form_of(self, body: ChatRequest, template: ChatTemplate) -> AnswerFormat | None:
        """Return the answer's format, or ``None`` for plain text. A forced call works without a format of the model's own."""
        form, ignored = template.form, IGNORED.get()
        if body.is_forced and not template.takes_tools and ignored is not None:
            ignored["tools"] = "the chat template has no place for their descriptions; describe them in a message"
        if body.is_forced and (form is None or form.call is None or not form.call.is_json):
            return plain_calls(form)
        if body.offered and not body.is_forced:
            problem = None
            if form is None or not form.has_calls:
                problem = "it is not known how this model writes tool calls", "--answer-format"
            elif not template.takes_tools:
                problem = "the model's chat template has no place for tools", "a --chat-template that has one"
            if problem:
                message = f"tools: {problem[0]}; force a call with tool_choice, or start the server with {problem[1]}"
                raise ApiError(400, message, param="tools")
        return form

    def _render(self, body: ChatRequest | TokenizeRequest) -> str:
        assert body.messages is not None
        try:
            prompt = self._template_of(body).render(
                for_template(body.messages),
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                tools=[tool.for_template() for tool in body.shown],
                variables=body.variables(),
            )
            prompt.encode()
        except VolleyError as error:
            raise ApiError(400, f"messages: {error}", param="messages") from None
        except UnicodeEncodeError:
            message = (
                "messages: with tools and template variables they hold half of a surrogate pair; send whole characters"
            )
            raise ApiError(400, message, param="messages") from None
        return prompt

    def _shows_special_tokens(self, form: AnswerFormat) -> bool:
        """Return whether the format's markers are special tokens, which decoding would otherwise drop."""
        markers = form.markers()
        return any(token in markers for token in special_tokens(self._engine.tokenizer))

    async def _bind(
        self, params: SamplingParams, body: ChatRequest, form: AnswerFormat | None, parser: PlainText
    ) -> SamplingParams:
        """Return the parameters with the grammar of the whole answer and its reasoning budget. ``parser`` has read the prompt."""
        tokenizer, is_thinking = self._engine.tokenizer, parser.is_thinking
        field = "tools" if body.offered else next((asked[0] for asked in asked_for(body)), "response_format")
        try:
            grammar = grammar_of_answer(
                form, body, params.grammar, tokenizer, is_thinking=is_thinking, is_answering=parser.is_answering
            )
            if grammar is not None:
                await asyncio.to_thread(self._engine.grammars.compile, grammar)
        except ConfigError as error:
            raise ApiError(400, f"{field}: {error}", param=field) from None
        if body.thinking_token_budget is None:
            return replace(params, grammar=grammar)
        if form is None or form.thinking is None:
            message = "thinking_token_budget: it is not known how this model reasons; leave it out"
            raise ApiError(400, message, param="thinking_token_budget")
        opens, closes = (tokenizer(mark, add_special_tokens=False)["input_ids"] for mark in form.thinking)
        spelt = Spelt(*form.thinking, self.spell, form.thinks_first)

        def budget(*_: Any) -> ThinkingBudget:
            return ThinkingBudget(opens, closes, body.thinking_token_budget or 0, is_open=is_thinking, spelt=spelt)

        return replace(params, grammar=grammar, rules=(*params.rules, budget))

    async def complete(self, body: CompletionRequest, client: str = "") -> tuple[Job, Dialect]:
        self.check(body.model)
        self.worker.check_room()
        prompts = await self._encode(body.prompts, "prompt")
        for prompt in prompts:
            self._check_length(prompt, body.max_tokens, "prompt")
        grammar = await compile_grammar(self._engine.grammars, body)
        params = replace(body.sampling(body.max_tokens, body.logprobs, self.sampling), grammar=grammar)
        params = self._held_open(params, body.min_tokens)
        choices = [(prompt, params.for_choice(choice)) for prompt in prompts for choice in range(body.n)]
        echoes: list[Echo] = []
        if body.echo:
            given = [self.decode(prompt) if isinstance(prompt, list) else prompt for prompt in body.prompts]
            echoes = [self._echo(text, ids) for text, ids in zip(given, prompts, strict=True) for _ in range(body.n)]
        prompts, params_of = [prompt for prompt, _ in choices], [own for _, own in choices]
        dialect = CompletionDialect(
            self.model,
            self.spell,
            logprobs=body.logprobs is not None,
            mark_draft=body.mark_draft,
            include_usage=body.stream_options.include_usage,
            continuous_usage=body.stream_options.continuous_usage_stats,
            echoes=echoes,
            num_echoed=body.logprobs or 0,
            prompts=prompts,
            prompt_logprobs=body.prompt_logprobs,
            token_ids=body.return_token_ids,
        )
        return self._submit(Job(prompts, params_of, client, body.recalibrate)), dialect

    def _echo(self, text: str, token_ids: list[int]) -> Echo:
        is_special = bool(token_ids) and token_ids[0] in self._engine.tokenizer.all_special_ids
        first = self.spell(token_ids[0]) if is_special else ""
        return Echo(text, token_ids, 0 if text.startswith(first) else len(first))

    def check(self, model: str | None) -> None:
        """Refuse a request for another model, or one that comes too late."""
        self.check_name(model)
        if self.draining:
            raise shutting_down(self.config.shutdown_timeout)
        if not self.worker.is_alive:
            raise engine_dead()

    def check_name(self, model: str | None) -> None:
        """Refuse a name that is not the model's."""
        if model is not None and model != self.model:
            hint = did_you_mean(model, [self.model])
            message = f"the model {model!r} does not exist; this server has {self.model!r}" + (
                f"; {hint}" if hint else ""
            )
            raise ApiError(404, message, param="model", code="model_not_found")

    @property
    def held(self) -> int:
        """Return the number of accepted requests that have not ended."""
        return self.preparing + self.worker.held

    def _check_length(self, prompt: Sequence[int], asked: int | None, field: str) -> None:
        """Refuse a prompt that leaves too little of the context for the requested tokens, or for one token."""
        room = self.max_model_len - len(prompt)
        if room < (1 if asked is None else asked):
            wanted = f"{len(prompt)} in the {field}" + (f", {asked} in the completion" if asked else "")
            raise self._too_long(wanted, field)

    def _too_long(self, wanted: str, field: str) -> ApiError:
        message = f"this model's maximum context length is {self.max_model_len} tokens; you asked for {wanted}"
        return ApiError(400, message, param=field, code="context_length_exceeded")

    def _submit(self, job: Job) -> Job:
        if len(job.prompts) > self.worker.capacity:
            message = (
                f"n and prompts ask for {len(job.prompts)} answers; this server holds {self.worker.capacity} at once"
            )
            raise ApiError(400, message, param="n")
        self.worker.submit(job)
        return job

    # -- text and tokens -----------------------------------------------------------------------------------------------
    async def _encode(self, prompts: Sequence[Prompt], field: str, *, special: bool = True) -> list[list[int]]:
        """Return token ids. Without ``special`` the texts already contain their special tokens."""
        fewest = max(map(len, prompts)) // self._longest_token
        if fewest > self.max_model_len:  # too long in any case; an exact count could take seconds
            raise self._too_long(f"at least {fewest} in the {field}", field)

        def encode() -> list[list[int]]:
            with self._tokenizer_in_use:
                if special:
                    return [self._encode_one(prompt, field) for prompt in prompts]
                return list(self._engine.tokenizer(list(prompts), add_special_tokens=False)["input_ids"])

        return await asyncio.to_thread(encode)

    def _encode_one(self, prompt: Prompt, field: str) -> list[int]:
        try:
            return self._engine.encode(prompt)
        except VolleyError as error:
            raise ApiError(400, str(error), param=field) from None

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """Return token ids of a text or a conversation in vLLM's form."""
        self.check(body.model)
        is_chat, tokenizer = body.messages is not None, self._engine.tokenizer
        own = not (is_chat and self._template_of(body).text)  # a template writes special tokens itself
        special = own if body.add_special_tokens is None else body.add_special_tokens

        def encode() -> list[int]:
            text = self._render(body) if is_chat else body.prompt
            with self._tokenizer_in_use:
                return list(tokenizer(text, add_special_tokens=special)["input_ids"])

        token_ids = await asyncio.to_thread(encode)
        pieces = tokenizer.convert_ids_to_tokens(token_ids) if body.return_token_strs else None
        return {"count": len(token_ids), "max_model_len": self.max_model_len, "tokens": token_ids, "token_strs": pieces}

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, str]:
        """Return the text of token ids."""
        self.check(body.model)
        if body.tokens:
            await asyncio.to_thread(self._encode_one, body.tokens, "tokens")  # refuses ids that are no tokens
        return {"prompt": await asyncio.to_thread(self.decode, body.tokens)}

    def tokenizer_info(self) -> dict[str, Any]:
        """Return what a client needs to use the tokenizer remotely."""
        tokenizer = self._engine.tokenizer
        own = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token")}
        own["chat_template"] = self._templates.plain.text or None
        return {"tokenizer_class": type(tokenizer).__name__, "max_model_len": self.max_model_len} | own

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self._spelling.text(token_ids)

    def spell(self, token_id: int) -> str:
        """Return the text of one token within a sequence."""
        return self._spelling.one(token_id)

    def card(self, created: int) -> dict[str, Any]:
        """Return the model as ``/v1/models`` lists it, with the fields of OpenAI's and Anthropic's APIs."""
        return {
            "id": self.model,
            "object": "model",
            "created": created,
            "owned_by": "volley",
            "type": "model",
            "display_name": self.model,
            "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
            "root": str(self._engine.target.model.config._name_or_path or self.model),
            "max_model_len": self.max_model_len,
            **({"diffusion": True} if self._engine.target.diffusion is not None else {}),
        }
