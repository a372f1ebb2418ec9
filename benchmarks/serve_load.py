"""The server under load and abuse: mixed requests to a tiny model, a tenth of whose clients go away at random moments.

    python benchmarks/serve_load.py --requests 10000 --concurrency 64 --out serve-load

The pool of pages is so small that requests are preempted all the time. Checked: every greedy answer that was read to its end
is plain decoding's, every seeded sample comes out the same whenever it is asked again; and at the end no page, request, task or
thread is left and memory has not grown. Prints a Markdown table; writes report.json into --out, also when it is interrupted.
Exits with 1 if a check failed.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.conftest import TinyPair, write_tiny_pair
from tests.serve.running import Running, Tiny, running
from volley import SamplingParams
from volley.decode.detokenize import Detokenizer

LONGEST = 48
NUM_PROMPTS = 150
ENGINE = {"page_size": 4, "num_pages": 120, "max_batch_tokens": 128, "max_running": 48}
DISCONNECTS = 0.1


@dataclass
class DraftSpec:
    """One request and what its client will do."""

    kind: str
    prompt: str
    max_tokens: int
    stream: bool
    body: dict[str, Any]
    leave_after: float | None
    """Chunks (of a stream) or seconds after which the client goes."""


@dataclass
class Outcome:
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    sampled: dict[str, str] = field(default_factory=dict)
    """Texts by their request, to be met again."""
    memory: list[tuple[int, float]] = field(default_factory=list)
    """Requests done and resident MiB."""
    seconds: float = 0.0


class Expected:
    """Plain decoding's greedy texts, cut to any length."""

    def __init__(self, tiny: Tiny, chance: random.Random) -> None:
        self.tokenizer = tiny.plain.tokenizer
        letters = "abcdefgh ."
        heads = ["".join(chance.choices(letters, k=chance.randint(0, 60))) for _ in range(5)]
        texts = [
            chance.choice(heads) + "".join(chance.choices(letters, k=chance.randint(1, 40))) for _ in range(NUM_PROMPTS)
        ]
        self.prompts = sorted(set(texts))
        self.tokens: dict[str, list[int]] = {}
        self.stops = tiny.target.stop_token_ids
        params = SamplingParams(max_tokens=LONGEST)
        for prompt, result in zip(self.prompts, tiny.plain.generate(self.prompts, params), strict=True):
            self.tokens[prompt] = result.token_ids
            tiny.known[tuple(tiny.plain.encode(prompt))] = result.token_ids

    def text(self, prompt: str, max_tokens: int) -> str:
        detokenizer = Detokenizer(self.tokenizer)
        tokens = self.tokens[prompt][:max_tokens]
        return "".join(detokenizer.push(t, last=i == len(tokens) - 1) for i, t in enumerate(tokens))


def specs(expected: Expected, requests: int, chance: random.Random) -> Iterator[DraftSpec]:
    for _ in range(requests):
        kind = chance.choice(["greedy", "greedy", "sampled", "penalised", "many"])
        stream = chance.random() < 0.6
        leaves = chance.random() < DISCONNECTS
        body: dict[str, Any] = {"temperature": 0}
        if kind == "sampled":
            body = {"temperature": chance.choice([0.7, 1.2]), "seed": chance.randint(0, 3), "top_p": 0.9}
        if kind == "penalised":
            body = {"temperature": 0, "frequency_penalty": chance.choice([0.5, 1.5]), "logit_bias": {"70": 1.5}}
        if kind == "many":
            body = {"temperature": 0, "n": 2, "logprobs": 2}
        leave_after = (chance.randint(0, 5) if stream else chance.random() * 0.5) if leaves else None
        is_compared = kind in ("greedy", "many")  # others are compared with themselves, so they must be met again
        prompt = chance.choice(expected.prompts if is_compared else expected.prompts[:8])
        max_tokens = chance.randint(1, LONGEST) if is_compared else chance.choice([12, LONGEST])
        yield DraftSpec(kind, prompt, max_tokens, stream, body, leave_after)


class Gone(Exception):
    """The client has left, as it had planned."""


async def read(client: httpx.AsyncClient, spec: DraftSpec) -> list[str]:
    """The texts of all choices."""
    body = {"prompt": spec.prompt, "max_tokens": spec.max_tokens, "stream": spec.stream, **spec.body}
    texts = [""] * spec.body.get("n", 1)
    if not spec.stream:
        try:
            async with asyncio.timeout(spec.leave_after):
                response = (await client.post("/v1/completions", json=body)).raise_for_status()
        except TimeoutError:
            raise Gone from None
        return [choice["text"] for choice in response.json()["choices"]]
    chunks = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if spec.leave_after is not None and chunks >= spec.leave_after:
                raise Gone
            if line == "data: [DONE]":
                return texts
            if line:
                chunks += 1
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    texts[choice["index"]] += choice["text"]
    raise AssertionError("the stream ended without [DONE]")


async def one(client: httpx.AsyncClient, spec: DraftSpec, expected: Expected, outcome: Outcome) -> None:
    try:
        texts = await read(client, spec)
    except Gone:
        outcome.counts["left"] += 1
        return
    except (httpx.HTTPError, AssertionError, KeyError) as error:
        outcome.counts["failed"] += 1
        outcome.problems.append(f"{spec}: {error!r}")
        return
    outcome.counts[spec.kind] += 1
    if spec.kind in ("greedy", "many"):
        wanted = expected.text(spec.prompt, spec.max_tokens)
    else:
        key = repr((spec.prompt, spec.max_tokens, spec.body))
        outcome.counts["met again"] += key in outcome.sampled
        wanted = outcome.sampled.setdefault(key, texts[0])
    if any(text != wanted for text in texts):
        outcome.counts["different"] += 1
        outcome.problems.append(f"{spec}: {texts} instead of {wanted!r}")


def resident_mib() -> float:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096 / 2**20


async def attack(
    server: Running, expected: Expected, requests: int, concurrency: int, seed: int, outcome: Outcome
) -> None:
    queue = specs(expected, requests, random.Random(seed))
    began, done = time.monotonic(), 0
    limits = httpx.Limits(max_connections=concurrency)

    async def worker(client: httpx.AsyncClient) -> None:
        nonlocal done
        for spec in queue:  # one iterator for all
            await one(client, spec, expected, outcome)
            done += 1
            if done % max(1, requests // 20) == 0:
                outcome.memory.append((done, resident_mib()))
                print(f"{done}/{requests} {dict(outcome.counts)}", file=sys.stderr)

    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            await asyncio.gather(*(worker(client) for _ in range(concurrency)))
    finally:
        outcome.seconds = time.monotonic() - began


async def _tasks() -> int:
    await asyncio.sleep(0.2)
    return len(asyncio.all_tasks())


def left_behind(server: Running) -> list[str]:
    """Measure the memory of an idle server."""
    server.settle()
    worker = server.service.worker
    tasks = asyncio.run_coroutine_threadsafe(_tasks(), worker.loop).result(10)
    held = {"requests of the worker": len(worker._owner), "asyncio tasks beyond the server's own": max(0, tasks - 6)}
    return [f"{count} {what} are left" for what, count in held.items() if count]


def run(
    tiny: Tiny, requests: int, concurrency: int, seed: int = 0, policy: str | None = None
) -> tuple[Outcome, dict[str, float]]:
    """The whole load and its checks; what was wrong is in the outcome's ``problems``."""
    outcome = Outcome()
    expected = Expected(tiny, random.Random(seed))
    threads = threading.active_count()
    with running(tiny.engine(**ENGINE, policy=policy), max_waiting=4 * concurrency) as server:
        try:
            asyncio.run(attack(server, expected, requests, concurrency, seed, outcome))
        except KeyboardInterrupt:
            outcome.problems.append("interrupted")
        outcome.problems += left_behind(server)
        metrics = dict(server.metrics())
    if threading.active_count() > threads + 1:
        outcome.problems.append(f"{threading.active_count() - threads} threads are left")
    settled = [mib for done, mib in outcome.memory if done >= requests / 4]
    if requests >= 1000 and settled and settled[-1] - settled[0] > 40:
        outcome.problems.append(f"memory grew from {settled[0]:.0f} to {settled[-1]:.0f} MiB")
    return outcome, metrics


def table(outcome: Outcome, metrics: dict[str, float]) -> str:
    tau = metrics["volley:decoding_cycle_tokens_total"] / metrics["volley:decoding_cycles_total"]
    rows = {
        "answers read to the end": sum(outcome.counts[k] for k in ("greedy", "sampled", "penalised", "many")),
        "of them greedy, compared with plain decoding": outcome.counts["greedy"] + outcome.counts["many"],
        "sampled or penalised, met again and compared": outcome.counts["met again"],
        "different": outcome.counts["different"],
        "failed": outcome.counts["failed"],
        "clients that left": outcome.counts["left"],
        "preemptions": int(metrics["volley:num_preemptions_total"]),
        "τ": f"{tau:.2f}",
        "seconds": f"{outcome.seconds:.0f}",
        "tokens/s": f"{metrics['volley:generation_tokens_total'] / outcome.seconds:.0f}",
        "pages held at the end": int(metrics["volley:kv_pages_used"]),
        "resident MiB, first and last": f"{outcome.memory[0][1]:.0f}, {outcome.memory[-1][1]:.0f}"
        if outcome.memory
        else "",
    }
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", help="of the engine; by default the one that ships")
    parser.add_argument("--out", type=Path, default=Path("serve-load"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tiny = Tiny(write_tiny_pair(TinyPair(Path(folder, "target"), Path(folder, "drafter"))))
        outcome, metrics = run(tiny, options.requests, options.concurrency, options.seed, options.policy)
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"counts": outcome.counts, "problems": outcome.problems, "memory": outcome.memory, "metrics": metrics}
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(table(outcome, metrics))
    for problem in outcome.problems[:20]:
        print(problem, file=sys.stderr)
    sys.exit(bool(outcome.problems))


if __name__ == "__main__":
    main()
