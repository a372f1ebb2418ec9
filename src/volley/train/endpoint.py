"""Answers from OpenAI-compatible endpoints: many requests in flight, failures retried on the next one after a while."""

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from volley.errors import ConfigError, EndpointError
from volley.train.collect import Answer, Job

_RETRIED = {408, 409, 425, 429, 500, 502, 503, 504}
_REFUSED_PROMPT = {400, 413, 422}
_REFUSALS_BEFORE_GIVING_UP = 8


class _PromptRefused(Exception):
    """The endpoint will never answer this prompt; others may fare better."""


@dataclass
class EndpointSource:
    """Chat completions over HTTP. ``urls`` end where ``/chat/completions`` begins (``http://host:8000/v1``)."""

    urls: tuple[str, ...]
    model: str | None = None
    """Asked of the first endpoint when not given."""
    api_key: str | None = None
    thinking: bool | None = None
    concurrency: int = 16
    retries: int = 6
    backoff_seconds: float = 1.0
    """Wait before the first retry; doubles with each, with jitter, up to a minute."""
    timeout_seconds: float = 600.0
    name: str = field(init=False)
    chat_template: str | bool = field(init=False, default=True)
    refusals: list[str] = field(init=False, default_factory=list)
    """Why prompts were given up, for the caller to show."""

    def __post_init__(self) -> None:
        if not self.urls:
            raise ConfigError("no endpoint given; name one such as http://127.0.0.1:8000/v1")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"endpoint {url!r} is not a URL; write it like http://127.0.0.1:8000/v1")
        if self.concurrency < 1:
            raise ConfigError(f"concurrency is {self.concurrency}; it must be at least 1")
        self.urls = tuple(url.rstrip("/") for url in self.urls)
        self.name = self.model or asyncio.run(self._only_model())

    def run(self, jobs: Iterable[Job], done: Callable[[Job], None]) -> int:
        """Answer every job; refused prompts are counted, any other lasting failure is an ``EndpointError``."""
        self.refusals = []
        asyncio.run(self._run(iter(jobs), done))
        return len(self.refusals)

    def _client(self) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limits = httpx.Limits(max_connections=self.concurrency)
        return httpx.AsyncClient(headers=headers, timeout=self.timeout_seconds, limits=limits)

    async def _only_model(self) -> str:
        async with self._client() as client:
            listed = (await self._request(client, "GET", "/models", None, 0))["data"]
        names = [str(model["id"]) for model in listed]
        if len(names) != 1:
            raise ConfigError(f"{self.urls[0]} serves {', '.join(names) or 'no model'}; say which with --model")
        return names[0]

    async def _run(self, jobs: Iterator[Job], done: Callable[[Job], None]) -> None:
        async with self._client() as client:
            finished = 0

            async def work(number: int) -> None:
                nonlocal finished
                for turn, job in enumerate(jobs):  # one iterator for all workers: each takes the next job
                    if await self._answer(client, job, number + turn):
                        done(job)
                        finished += 1
                    elif not finished and len(self.refusals) >= _REFUSALS_BEFORE_GIVING_UP:
                        raise EndpointError(f"every prompt so far was refused; the last one: {self.refusals[-1]}")

            workers = [asyncio.create_task(work(number)) for number in range(self.concurrency)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _answer(self, client: httpx.AsyncClient, job: Job, number: int) -> bool:
        try:
            while not job.add(await self._complete(client, job, number)):
                pass
        except _PromptRefused as refusal:
            self.refusals.append(f"{job.conversation.id}: {refusal}")
            return False
        return True

    async def _complete(self, client: httpx.AsyncClient, job: Job, number: int) -> Answer:
        params = job.params
        body: dict[str, Any] = {
            "model": self.name,
            "messages": job.messages,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "max_tokens": params.max_tokens,
            "seed": params.seed,
        }
        # Fields that OpenAI itself does not know are sent only where they say something.
        if params.top_k:
            body["top_k"] = params.top_k
        if params.min_p:
            body["min_p"] = params.min_p
        if self.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.thinking}
        return _parse(await self._request(client, "POST", "/chat/completions", body, number))

    async def _request(
        self, client: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None, number: int
    ) -> dict[str, Any]:
        """JSON of a successful answer, after as many attempts as it takes and ``retries`` allows."""
        problem, wait = "", 0.0
        for attempt in range(self.retries + 1):
            url = self.urls[(number + attempt) % len(self.urls)]
            if attempt:
                jitter = random.uniform(0.5, 1.0)
                await asyncio.sleep(max(wait, jitter * min(60.0, self.backoff_seconds * 2 ** (attempt - 1))))
            wait = 0.0
            try:
                response = await client.request(method, url + path, json=body)
            except httpx.HTTPError as error:
                problem = f"{url}: {type(error).__name__} {error}".rstrip()
                continue
            problem = f"{url}: HTTP {response.status_code} {response.text[:200]}".rstrip()
            if response.is_success:
                try:
                    return dict(response.json())
                except (ValueError, TypeError):
                    problem = f"{url}: not a JSON object: {response.text[:200]!r}"
            elif response.status_code in _REFUSED_PROMPT and method == "POST":
                raise _PromptRefused(problem)
            elif response.status_code in _RETRIED:
                wait = _retry_after(response)
            else:
                raise EndpointError(f"{problem}; check the URL, the model's name and the API key")
        raise EndpointError(
            f"{problem} (attempt {self.retries + 1} of {self.retries + 1}); what was collected is kept: "
            "run the same command again once the endpoint answers"
        )


def _retry_after(response: httpx.Response) -> float:
    try:
        return min(60.0, float(response.headers.get("retry-after", 0)))
    except ValueError:  # an HTTP date
        return 0.0


def _parse(raw: dict[str, Any]) -> Answer:
    try:
        choice = raw["choices"][0]
        message = choice["message"]
        text = message.get("content") or ""
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        usage = raw.get("usage") or {}
        return Answer(text, choice.get("finish_reason") or "stop", int(usage.get("completion_tokens", 0)), reasoning)
    except (KeyError, IndexError, TypeError, AttributeError):
        raise EndpointError(
            f"not a chat completion: {str(raw)[:200]}; is this an OpenAI-compatible endpoint?"
        ) from None
