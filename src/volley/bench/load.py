"""Load test of any OpenAI-compatible server: fixed concurrency (closed loop), or a fixed request rate (open loop, Poisson)."""

import asyncio
import contextlib
import itertools
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import httpx
import numpy as np

from volley.bench.tasks import BenchConfig
from volley.errors import ConfigError, EndpointError
from volley.prompts import Conversation

_COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")


DECIDED_BY_ENGINES = (
    "block_sizes",
    "policies",
    "denoising_steps",
    "tree_nodes",
    "repeats",
    "unseeded",
    "against",
    "draft_models",
    "score",
)
"""Options of a benchmark that do not apply to a server."""


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Requests of a load test. Prompts are used in turn."""

    url: str
    model: str | None = None
    """Model to request; by default the server's only one."""
    api_key: str | None = None
    concurrencies: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    """Requests per second; requests start whether or not earlier ones have ended."""
    requests: int = 64
    """Requests at each level of load."""
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    raw: bool = False
    """Send prompts as texts to complete, not as chats."""
    ignore_eos: bool = False
    thinking: bool | None = None
    """Value of ``enable_thinking`` for the chat template."""
    timeout: float = 600.0

    @classmethod
    def of(cls, bench: BenchConfig, **options: Any) -> Self:
        """Return the load test for a benchmark's options. Options that do not apply to a server raise an error."""
        usual, own = asdict(BenchConfig()), asdict(bench)
        if given := [f"--{name.replace('_', '-')}" for name in DECIDED_BY_ENGINES if own[name] != usual[name]]:
            raise ConfigError(f"--server has its own settings; leave {', '.join(given)} out")
        if len(bench.temperatures) > 1:
            raise ConfigError("--server is measured at one temperature; give one with --temperatures")
        asked = {name: own[name] for name in ("max_tokens", "seed", "raw", "ignore_eos", "thinking")}
        return cls(**options, **asked, temperature=bench.temperatures[0])

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"server {self.url!r} is not a URL; write it like http://127.0.0.1:8000")
        if any(number < 1 for number in self.concurrencies):
            raise ConfigError(f"concurrencies are {self.concurrencies}; each must be at least 1")
        if not all(rate > 0 for rate in self.rates):
            raise ConfigError(f"rates are {self.rates}; each must be more than 0 requests a second")
        if self.requests < 1:
            raise ConfigError(f"requests is {self.requests}; it must be at least 1")

    @property
    def base_url(self) -> str:
        url = self.url.rstrip("/")
        return url if url.endswith("/v1") else f"{url}/v1"


@dataclass(frozen=True)
class Sample:
    """One request as its client saw it. Times are in seconds since it was sent."""

    started: float
    """Start in seconds since the level began."""
    first: float
    """Seconds to the first text."""
    total: float
    gaps: list[float]
    """Seconds between arrivals of text. One chunk may hold a whole accepted block."""
    tokens: int
    acceptance_length: float | None = None
    """Tokens per pass of an answer from canvases or from drafts made of canvases."""
    has_canvases: bool = False
    error: str | None = None

    @property
    def seconds_per_token(self) -> float:
        """Return the time per token, without the first token and its time. Tokens of a canvas arrive at once; then it is all
        time per all tokens."""
        return self.total / self.tokens if self.has_canvases else (self.total - self.first) / (self.tokens - 1)


@dataclass(frozen=True)
class Level:
    """Results of one load level, complete or interrupted."""

    label: str
    seconds: float
    samples: list[Sample]
    counted: float | None = None
    """Acceptance length from the server's counters, if it exports vLLM's."""

    def to_json(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "seconds": self.seconds,
            "summary": self.summary(),
            "samples": [asdict(sample) for sample in self.samples],
        }

    def summary(self) -> dict[str, Any]:
        """Return rates over the whole level, and percentiles in seconds over successful requests."""
        good = [sample for sample in self.samples if sample.error is None]
        taus = [sample.acceptance_length for sample in good if sample.acceptance_length is not None]
        per_token = [sample.seconds_per_token for sample in good if sample.tokens > 1]
        return {
            "requests": len(self.samples),
            "errors": len(self.samples) - len(good),
            "requests_per_second": len(good) / self.seconds,
            "output_tokens_per_second": sum(sample.tokens for sample in good) / self.seconds,
            "time_to_first_token": percentiles([sample.first for sample in good]),
            "inter_token_latency": percentiles(per_token),
            "gap_between_chunks": percentiles([gap for sample in good for gap in sample.gaps]),
            "latency": percentiles([sample.total for sample in good]),
            "acceptance_length": sum(taus) / len(taus) if taus else self.counted,
        }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median, 90th and 99th percentile; zeros for no values."""
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist() if values else (0.0, 0.0, 0.0)
    return {"p50": p50, "p90": p90, "p99": p99}


def run_load(
    config: LoadConfig, conversations: Sequence[Conversation], progress: Callable[[str, int], None] | None = None
) -> list[Level]:
    """Run every level after a warm-up of one token per prompt: levels share prompts, and servers cache them.

    Ctrl-C ends the run and keeps the results so far; then levels, or samples of the last level, are missing.
    """
    levels: list[Level] = []
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(config, conversations, progress or (lambda label, done: None), levels))
    return levels


async def _run(
    config: LoadConfig,
    conversations: Sequence[Conversation],
    progress: Callable[[str, int], None],
    levels: list[Level],
) -> None:
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(headers=headers, timeout=config.timeout, limits=limits) as client:
        model = await _model(config, client)
        bodies = [_body(config, model, conversation) for conversation in conversations]
        warm = await _ask(config, client, bodies[0], time.perf_counter())
        if warm.error is not None:
            raise EndpointError(f"{config.url} did not answer: {warm.error}; check the URL, the model and the key")
        for body in bodies[1:]:
            await _ask(config, client, {**body, "max_tokens": 1}, time.perf_counter())
        for kind, loads in (("closed", config.concurrencies), ("open", config.rates)):
            for load in loads:
                await run_level(config, client, bodies, kind, load, progress, levels)


async def run_level(
    config: LoadConfig,
    client: httpx.AsyncClient,
    bodies: list[dict[str, Any]],
    kind: str,
    load: float,
    progress: Callable[[str, int], None],
    levels: list[Level],
) -> None:
    """Run one load level and append it to ``levels`` even if it is interrupted.

    ``kind`` gives the meaning of ``load``: ``closed``, concurrent requests; ``open``, requests per second.
    """
    label = f"{load:g} at once" if kind == "closed" else f"{load:g} a second"
    before = await _speculated(config, client)
    began = time.perf_counter()
    samples: list[Sample] = []

    async def ask(number: int) -> None:
        samples.append(await _ask(config, client, bodies[number % len(bodies)], began))
        progress(label, len(samples))

    try:
        if kind == "closed":
            await _closed(ask, config.requests, int(load))
        else:
            await _open(ask, config.requests, load, random.Random(config.seed))
    finally:
        level = Level(label, time.perf_counter() - began, samples)
        levels.append(level)
    after = await _speculated(config, client)
    if after[0] > before[0]:
        levels[-1] = replace(level, counted=1 + (after[1] - before[1]) / (after[0] - before[0]))


async def _speculated(config: LoadConfig, client: httpx.AsyncClient) -> tuple[float, float]:
    """Return the verified drafts and accepted draft tokens so far from vLLM's counters; zeros if the server has none."""
    try:
        text = (await client.get(f"{config.base_url.removesuffix('/v1')}/metrics")).text
    except httpx.HTTPError:
        return 0.0, 0.0
    counts = {name: sum(map(float, re.findall(rf"^{name}_total(?:{{.*}})? (\S+)$", text, re.M))) for name in _COUNTERS}
    return counts[_COUNTERS[0]], counts[_COUNTERS[1]]


async def _closed(ask: Callable[[int], Any], requests: int, concurrency: int) -> None:
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:  # one iterator for all workers: each takes the next request
            await ask(number)

    await asyncio.gather(*(client() for _ in range(concurrency)))


async def _open(ask: Callable[[int], Any], requests: int, rate: float, chance: random.Random) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(requests):
            group.create_task(ask(number))
            await asyncio.sleep(chance.expovariate(rate))


async def _model(config: LoadConfig, client: httpx.AsyncClient) -> str:
    if config.model is not None:
        return config.model
    try:
        listed = (await client.get(f"{config.base_url}/models")).raise_for_status().json()["data"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise EndpointError(f"{config.url} does not list its models ({error}); check the URL and the key") from error
    names = [str(model["id"]) for model in listed]
    if len(names) != 1:
        raise ConfigError(f"{config.url} serves {', '.join(names) or 'no model'}; say which with --model")
    return names[0]


def _body(config: LoadConfig, model: str, conversation: Conversation) -> dict[str, Any]:
    asked = {"prompt": conversation.raw} if config.raw else {"messages": list(conversation.messages)}
    return {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": config.temperature,
        "max_tokens": config.max_tokens,
        **({"seed": config.seed} if config.temperature else {}),
        **({"ignore_eos": True} if config.ignore_eos else {}),
        **({} if config.thinking is None else {"chat_template_kwargs": {"enable_thinking": config.thinking}}),
        **asked,
    }


async def _ask(config: LoadConfig, client: httpx.AsyncClient, body: dict[str, Any], began: float) -> Sample:
    path = "completions" if config.raw else "chat/completions"
    sent = time.perf_counter()
    arrivals: list[float] = []
    usage: dict[str, Any] = {}
    error = None
    try:
        async with client.stream("POST", f"{config.base_url}/{path}", json=body) as response:
            if response.is_error:
                error = f"HTTP {response.status_code} {(await response.aread())[:200].decode(errors='replace')}"
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if line.startswith("data:") and data != "[DONE]":
                    chunk = json.loads(data)
                    error = error or (json.dumps(chunk["error"]) if chunk.get("error") else None)
                    usage = chunk.get("usage") or usage
                    if any(_text(choice) for choice in chunk.get("choices", ())):
                        arrivals.append(time.perf_counter())
    except (httpx.HTTPError, ValueError) as problem:
        error = f"{type(problem).__name__} {problem}".rstrip()
    end = time.perf_counter()
    details = usage.get("completion_tokens_details") or {}
    return Sample(
        started=sent - began,
        first=(arrivals[0] if arrivals else end) - sent,
        total=end - sent,
        gaps=[later - earlier for earlier, later in itertools.pairwise(arrivals)],
        tokens=int(usage.get("completion_tokens", len(arrivals))),
        acceptance_length=details.get("tokens_per_pass", details.get("acceptance_length")),
        has_canvases=details.get("canvases", 0) > 0,
        error=error,
    )


def _text(choice: dict[str, Any]) -> Any:
    """Return a chunk's part of the answer: text, reasoning or a tool call."""
    delta = choice.get("delta") or {}
    return choice.get("text") or any(
        delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls")
    )


_MS = 1000
COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "requests": lambda s: str(s["requests"]),
    "errors": lambda s: str(s["errors"]),
    "requests/s": lambda s: f"{s['requests_per_second']:.2f}",
    "tokens/s": lambda s: f"{s['output_tokens_per_second']:.1f}",
    "TTFT ms p50 / p90 / p99": lambda s: _spread(s["time_to_first_token"]),
    "ms per token p50 / p90 / p99": lambda s: _spread(s["inter_token_latency"]),
    "gap ms p50 / p90 / p99": lambda s: _spread(s["gap_between_chunks"]),
    "latency ms p50 / p90 / p99": lambda s: _spread(s["latency"]),
    "τ": lambda s: "" if s["acceptance_length"] is None else f"{s['acceptance_length']:.2f}",
}


def _spread(values: dict[str, float]) -> str:
    return " / ".join(f"{_MS * values[name]:.3g}" for name in ("p50", "p90", "p99"))


def to_markdown(levels: Sequence[Level]) -> str:
    lines = ["| load | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (len(COLUMNS) + 1)]
    for level in levels:
        summary = level.summary()
        lines.append(f"| {level.label} | " + " | ".join(cell(summary) for cell in COLUMNS.values()) + " |")
    return "\n".join(lines) + "\n"
