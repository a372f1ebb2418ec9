"""Between HTTP and the worker: prompts become tokens, bodies become jobs, limits are kept."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from volley.chat import Prompt
from volley.engine.engine import Engine
from volley.serve.config import ServeConfig
from volley.serve.errors import ApiError, shutting_down
from volley.serve.metrics import Metrics
from volley.serve.protocol import ChatRequest, CompletionRequest
from volley.serve.replies import ChatDialect, CompletionDialect, Dialect
from volley.serve.worker import Job, Worker


def memory(engine: Engine) -> dict[str, float]:
    """MiB of what the engine keeps of its requests: the target's K/V, and the recurrent states of a hybrid target."""
    sizes = {"kv_mib": engine.runner.store.nbytes}
    if engine.recurrent is not None:
        sizes["recurrent_states_mib"] = engine.recurrent.store.nbytes
        sizes["recurrent_state_mib"] = engine.recurrent.store.bytes_per_state
    return {name: round(size / 2**20, 3) for name, size in sizes.items()}


class Service:
    """One model being served. Everything but the worker runs in the event loop."""

    def __init__(self, engine: Engine, config: ServeConfig, model: str) -> None:
        self.config = config
        self.model = model
        holds = engine.snapshot()
        self.metrics = Metrics(holds.num_pages)
        self.worker = Worker(engine, self.metrics, config.max_waiting)
        self.max_model_len = holds.max_tokens
        self.memory = memory(engine)
        self.draining = False
        self._engine = engine
        self._tokenizer_in_use = threading.Lock()
        self._longest_token = max(map(len, engine.tokenizer.get_vocab()))
        engine.encode("a")  # a tokenizer settles its options on first use, and must not while the worker decodes

    @property
    def is_ready(self) -> bool:
        return self.worker.is_alive and not self.draining

    # -- from bodies to jobs -------------------------------------------------------------------------------------------
    async def chat(self, body: ChatRequest) -> tuple[Job, Dialect]:
        self._check(body.model)
        (prompt,) = await self._encode([[message.for_template() for message in body.messages]], "messages")
        asked = body.max_completion_tokens or body.max_tokens
        max_tokens = self._check_length(prompt, asked, "messages")
        params = body.sampling(max_tokens, body.top_logprobs if body.logprobs else None)
        dialect = ChatDialect(
            self.model,
            self.spell,
            logprobs=body.logprobs,
            mark_draft=body.mark_draft,
            include_usage=body.stream_options.include_usage,
        )
        job = self._submit(Job([prompt] * body.n, [params.for_choice(choice) for choice in range(body.n)]))
        return job, dialect

    async def complete(self, body: CompletionRequest) -> tuple[Job, Dialect]:
        self._check(body.model)
        prompts = await self._encode(body.prompts, "prompt")
        for prompt in prompts:
            self._check_length(prompt, body.max_tokens, "prompt")
        params = body.sampling(body.max_tokens, body.logprobs)
        dialect = CompletionDialect(
            self.model,
            self.spell,
            logprobs=body.logprobs is not None,
            mark_draft=body.mark_draft,
            include_usage=body.stream_options.include_usage,
        )
        choices = [(prompt, params.for_choice(choice)) for prompt in prompts for choice in range(body.n)]
        return self._submit(Job([prompt for prompt, _ in choices], [own for _, own in choices])), dialect

    def _check(self, model: str | None) -> None:
        if self.draining:
            raise shutting_down(self.config.shutdown_timeout)
        if not self.worker.is_alive:
            raise ApiError(503, "the engine has stopped; restart the server", kind="server_error", code="engine_dead")
        if model is not None and model != self.model:
            message = f"the model {model!r} does not exist; this server has {self.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _check_length(self, prompt: Sequence[int], asked: int | None, field: str) -> int:
        """Tokens to generate at most."""
        room = self.max_model_len - len(prompt)
        if room < (asked or 1):
            wanted = f"{len(prompt)} in the {field}" + (f", {asked} in the completion" if asked else "")
            raise self._too_long(wanted, field)
        return asked or room

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
    async def _encode(self, prompts: Sequence[Prompt], field: str) -> list[list[int]]:
        fewest = max(map(_characters, prompts)) // self._longest_token
        if fewest > self.max_model_len:  # too long in any case; counting exactly could take seconds
            raise self._too_long(f"at least {fewest} in the {field}", field)

        def encode() -> list[list[int]]:
            with self._tokenizer_in_use:
                return [self._engine.encode(prompt) for prompt in prompts]

        return await asyncio.to_thread(encode)

    def spell(self, token_id: int) -> str:
        """The text of one token alone."""
        return str(self._engine.tokenizer.decode([token_id], clean_up_tokenization_spaces=False))

    def card(self, created: int) -> dict[str, Any]:
        """The model as ``/v1/models`` shows it."""
        return {
            "id": self.model,
            "object": "model",
            "created": created,
            "owned_by": "volley",
            "max_model_len": self.max_model_len,
        }


def _characters(prompt: Prompt) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(part["content"]) if isinstance(part, Mapping) else 1 for part in prompt)
