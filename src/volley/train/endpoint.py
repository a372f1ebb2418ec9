"""Collect answers from an OpenAI-compatible endpoint. Failed requests are repeated after a delay."""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from volley.errors import ConfigError, EndpointError
from volley.train.collect import Answer, CollectJob, check_single

log = logging.getLogger(__name__)

_RETRIED = {408, 409, 425, 429, 500, 502, 503, 504}
_REFUSED_PROMPT = {400, 413, 422}
_REFUSALS_BEFORE_GIVING_UP = 8


class _PromptRefused(Exception):
    """Raised if the endpoint will never answer a prompt."""


@dataclass
class EndpointSource:
    """Source that requests chat completions over HTTP. ``url`` is the part before ``/chat/completions``
    (``http://host:8000/v1``)."""

    url: str
    model: str | None = None
    """Model to request; by default the endpoint's only one."""
    api_key: str | None = None
    thinking: bool | None = None
    concurrency: int = 16
    """Requests in flight."""
    retries: int = 6
    backoff_seconds: float = 1.0
    """Delay before the first retry. Each retry doubles the delay, with jitter, up to a minute."""
    timeout_seconds: float = 600.0
    name: str = field(init=False)
    chat_template: str | bool = field(init=False, default=True)
    raw: bool = False
    """Send prompts as they are to ``/completions``: for a base model, which has no chat template."""
    _told: str = field(init=False, default="")  # the last problem that was logged
    refusals: list[str] = field(init=False, default_factory=list)
    """Reasons why prompts were given up, for the caller to show."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"endpoint {self.url!r} is not a URL; write it like http://127.0.0.1:8000/v1")
        self.chat_template = not self.raw
        if self.concurrency < 1:
            raise ConfigError(f"concurrency is {self.concurrency}; it must be at least 1")
        self.url = self.url.rstrip("/")
        self.name = self.model or asyncio.run(self._only_model())

    def run(self, jobs: Iterable[CollectJob], done: Callable[[CollectJob], None]) -> int:
        """Answer every job, and return the number of refused prompts. Raise ``EndpointError`` for any other lasting failure."""
        self.refusals = []
        jobs = list(jobs)
        if self.raw:
            for job in jobs:
                check_single(job)
        asyncio.run(self._run(iter(jobs), done))
        return len(self.refusals)

    def _client(self) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limits = httpx.Limits(max_connections=self.concurrency)
        return httpx.AsyncClient(headers=headers, timeout=self.timeout_seconds, limits=limits)

    async def _only_model(self) -> str:
        async with self._client() as client:
            listed = (await self._request(client, "GET", "/models", None))["data"]
        names = [str(model["id"]) for model in listed]
        if len(names) != 1:
            raise ConfigError(f"{self.url} serves {', '.join(names) or 'no model'}; say which with --model")
        return names[0]

    async def _run(self, jobs: Iterator[CollectJob], done: Callable[[CollectJob], None]) -> None:
        async with self._client() as client:
            finished = 0

            async def work() -> None:
                nonlocal finished
                for job in jobs:  # one iterator for all workers: each takes the next job
                    if await self._answer(client, job):
                        done(job)
                        finished += 1
                    elif not finished and len(self.refusals) >= _REFUSALS_BEFORE_GIVING_UP:
                        raise EndpointError(f"every prompt so far was refused; the last one: {self.refusals[-1]}")

            workers = [asyncio.create_task(work()) for _ in range(self.concurrency)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _answer(self, client: httpx.AsyncClient, job: CollectJob) -> bool:
        try:
            while not job.add(await self._complete(client, job)):
                pass
        except _PromptRefused as refusal:
            self.refusals.append(f"{job.conversation.id}: {refusal}")
            return False
        return True

    async def _complete(self, client: httpx.AsyncClient, job: CollectJob) -> Answer:
        params = job.params
        body: dict[str, Any] = {
            "model": self.name,
            **({"prompt": job.messages[0]["content"]} if self.raw else {"messages": job.messages}),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "max_tokens": params.max_tokens,
            "seed": params.seed,
        }
        # Fields that OpenAI's API lacks are sent only if they differ from the default.
        if params.top_k:
            body["top_k"] = params.top_k
        if params.min_p:
            body["min_p"] = params.min_p
        if self.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.thinking}
        path = "/completions" if self.raw else "/chat/completions"
        return _parse(await self._request(client, "POST", path, body))

    async def _request(
        self, client: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Return the JSON of a successful answer. A request that fails is repeated up to ``retries`` times."""
        for attempt in range(1, self.retries + 2):
            wait = 0.0
            try:
                response = await client.request(method, self.url + path, json=body)
                problem = f"{self.url}: HTTP {response.status_code} {response.text[:200]}".rstrip()
                if response.is_success:
                    return dict(response.json())
                if response.status_code in _REFUSED_PROMPT and method == "POST":
                    raise _PromptRefused(problem)
                if response.status_code not in _RETRIED:
                    raise EndpointError(f"{problem}; check the URL, the model's name and the API key")
                wait = retry_after(response)
            except httpx.HTTPError as error:
                problem = f"{self.url}: {type(error).__name__} {error}".rstrip()
            except (ValueError, TypeError):
                problem = f"{self.url}: not a JSON object: {response.text[:200]!r}"
            if attempt <= self.retries:
                pause = random.uniform(0.5, 1.0) * min(60.0, self.backoff_seconds * 2.0 ** (attempt - 1))
                if problem != self._told:
                    log.warning("%s; trying again", problem)
                    self._told = problem
                await asyncio.sleep(max(wait, pause))
        raise EndpointError(
            f"{problem} (attempt {attempt} of {attempt}); what was collected is kept: run the same command again once the "
            "endpoint answers"
        )


def retry_after(response: httpx.Response) -> float:
    """Return the seconds that the server asks to wait, at most 60."""
    try:
        return min(60.0, float(response.headers.get("retry-after", 0)))
    except ValueError:  # an HTTP date
        return 0.0


def _parse(raw: dict[str, Any]) -> Answer:
    try:
        choice = raw["choices"][0]
        message = {"content": choice["text"]} if "text" in choice else choice["message"]
        text = message.get("content") or ""
        is_parted = bool(message.get("reasoning_content") or message.get("reasoning"))
        usage = raw.get("usage") or {}
        answer = Answer(text, choice.get("finish_reason") or "stop", int(usage.get("completion_tokens", 0)))
    except (KeyError, IndexError, TypeError, AttributeError):
        raise EndpointError(
            f"not a chat completion: {str(raw)[:200]}; is this an OpenAI-compatible endpoint?"
        ) from None
    if is_parted:
        raise EndpointError(
            "the endpoint takes reasoning out of its answers, and a drafter learns the text as the target writes it; start the "
            "server without a reasoning parser, ask with --no-thinking, or collect with the target here"
        )
    return answer
