"""A server under mixed load for as long as one likes: nothing may leak, fail or be answered wrongly.

    python benchmarks/soak.py --minutes 30 --data-dir DIR --out soak

One server in this process has three models of the bundled target in fp32: a pair with two adapters and the default policy, a pair
with whole blocks, and plain decoding. Chats, completions, long prompts, seeded samples, penalties, JSON schemas and forced tool
calls go to all of them, streamed or whole; some clients leave at random moments, some requests are malformed, and pools are so
small that requests are preempted. Drafters are reloaded now and then. Every answer, sampled ones with their seeds too, is
compared with what plain decoding gave for the same body before the load began. Prints a Markdown table and writes it, with all
problems, into --out, also when it is interrupted. Exits with 1 if anything was wrong.

The server allows a request --request-seconds, and clients wait longer than that, so that a slow machine makes no errors. When the
minutes are over, requests that are under way have --grace-minutes to end. What was found is kept every few seconds, and the same
command goes on with the minutes that are left.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.grammars import make_schema
from benchmarks.kept import Kept
from benchmarks.thread_server import serving
from tests.models.drafters.test_adapter import make_adapter
from volley import Engine
from volley.files import REFERENCE, make_folder, read_json, write_atomically
from volley.models.drafters.drafter import Drafter
from volley.prompts import load_prompts
from volley.serve.config import ServeConfig
from volley.serve.service import Service

LEAVING = 0.12  # of the requests, whose clients go before the end
MALFORMED = 0.03
RELOAD_SECONDS = 20.0
KEEP_SECONDS = 10
REFERENCE_MODEL = "plain"
NAMES = ("pair", "pair:one", "pair:two", "blocks", REFERENCE_MODEL)
SIZES = {"num_pages": 128, "max_running": 24, "max_batch_tokens": 256}
WRONG: list[dict[str, Any]] = [
    {"max_tokens": 0},
    {"temperature": -1},
    {"nonsense": True},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wrong"}}}},
    {"model": "nobody"},
]


@dataclass(frozen=True)
class Ask:
    """A request, without the model; ``schema`` is what its text must follow."""

    kind: str
    path: str
    body: dict[str, Any]
    schema: Any = None


@dataclass
class Outcome:
    counts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    """Resident MiB of this process, once a second."""
    seconds: float = 0.0
    """Of load, in this process and in those that were stopped."""
    runs: int = 0

    @classmethod
    def begun(cls, file: Path) -> "Outcome":
        """What was found before, if anything was, for one more run."""
        held = read_json(file) if file.exists() else {}
        statuses = Counter({int(status): count for status, count in held.pop("statuses", {}).items()})
        outcome = cls(**{**held, "counts": Counter(held.get("counts", {})), "statuses": statuses})
        outcome.runs += 1
        return outcome

    def keep(self, file: Path) -> None:
        kept = {name: getattr(self, name) for name in ("counts", "statuses", "problems", "seconds", "runs")}
        write_atomically(file, json.dumps(kept, indent=1) + "\n")

    def problem(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        if len(self.problems) < 50:
            self.problems.append(f"{kind}: {text}")


def asks(data_dir: Path, count: int, chance: random.Random) -> list[Ask]:
    """Different requests of all kinds."""
    chats = [list(chat.messages) for name in ("gsm8k", "mt-bench") for chat in load_prompts(name, data_dir, 40)]
    made = []
    for number in range(count):
        kind = ("chat", "text", "long", "sampled", "penalised", "many", "schema", "tools")[number % 8]
        messages = chance.choice(chats)
        body: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": chance.randint(1, 64)}
        schema = None
        if kind in ("text", "long"):
            text = " ".join(
                message["content"] for chat in chance.sample(chats, 8 if kind == "long" else 1) for message in chat
            )
            del body["messages"]
            body["prompt"] = text[: 6000 if kind == "long" else 600]
        if kind in ("sampled", "schema") and number % 2:
            body |= {"temperature": chance.choice((0.7, 1.0)), "seed": number, "top_p": 0.9}
        if kind == "penalised":
            body |= {"frequency_penalty": 0.8, "repetition_penalty": 1.1, "stop": ["\n\n"]}
        if kind == "many":
            body |= {"n": 2, "temperature": 0.8, "seed": number}
        if kind == "schema":
            schema = make_schema(number)
            body |= {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}
            body["max_tokens"] = 96
        if kind == "tools":
            function = {"name": "weather", "parameters": make_schema(number)}
            body |= {"tools": [{"type": "function", "function": function}], "tool_choice": "required", "max_tokens": 96}
        made.append(Ask(kind, "completions" if "prompt" in body else "chat/completions", body, schema))
    return made


class Gone(Exception):
    """The client has left, as it had planned."""


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    ended = False
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            ended = True
        elif line:
            yield json.loads(line.removeprefix("data: "))
    assert ended, "the stream ended without [DONE]"


def add(choices: list[dict[str, Any]], event: dict[str, Any]) -> None:
    """Put a chunk's parts where a whole answer has them."""
    assert "error" not in event, event
    for part in event["choices"]:
        choice = choices[part["index"]]
        delta = part.get("delta", {"content": part.get("text")})
        choice["text"] += delta.get("content") or ""
        choice["finish_reason"] = part["finish_reason"] or choice["finish_reason"]
        for call in delta.get("tool_calls") or ():
            while len(choice["calls"]) <= call["index"]:
                choice["calls"].append(["", ""])
            own = choice["calls"][call["index"]]
            own[0] += call["function"].get("name") or ""
            own[1] += call["function"].get("arguments") or ""


def empty(number: int) -> list[dict[str, Any]]:
    return [{"text": "", "calls": [], "finish_reason": None} for _ in range(number)]


async def read(
    client: httpx.AsyncClient, ask: Ask, model: str, *, stream: bool, leave_after: float | None, outcome: Outcome
) -> list[dict[str, Any]]:
    """Text, calls and finish reason of each choice; a client that leaves does so after chunks, or after milliseconds."""
    body = {"model": model, **ask.body, "stream": stream}
    choices = empty(ask.body.get("n", 1))
    if not stream:
        try:
            async with asyncio.timeout(None if leave_after is None else leave_after / 10):
                response = await client.post(f"/v1/{ask.path}", json=body)
        except TimeoutError:
            raise Gone from None
        outcome.statuses[response.status_code] += 1
        response.raise_for_status()
        whole = response.json()["choices"]
        for part in whole:
            message = part.get("message", {"content": part.get("text")})
            calls = [{"index": place, **call} for place, call in enumerate(message.get("tool_calls") or ())]
            part["delta"] = {"content": message.get("content"), "tool_calls": calls}
        add(choices, {"choices": whole})
        return choices
    chunks = 0
    async with client.stream("POST", f"/v1/{ask.path}", json=body) as response:
        outcome.statuses[response.status_code] += 1
        response.raise_for_status()
        async for event in events(response):
            if leave_after is not None and chunks >= leave_after:
                raise Gone
            chunks += 1
            add(choices, event)
    return choices


async def one(
    client: httpx.AsyncClient, ask: Ask, expected: list[dict[str, Any]], chance: random.Random, outcome: Outcome
) -> None:
    model, stream = chance.choice(NAMES), chance.random() < 0.6
    leave_after = chance.randint(0, 6) if chance.random() < LEAVING else None
    try:
        found = await read(client, ask, model, stream=stream, leave_after=leave_after, outcome=outcome)
    except Gone:
        outcome.counts["left"] += 1
        return
    except (httpx.HTTPError, AssertionError, KeyError) as error:
        outcome.problem("failed", f"{model} {ask}: {error!r}")
        return
    outcome.counts[ask.kind] += 1
    outcome.counts[f"of {model}"] += 1
    if found != expected:
        outcome.problem("wrong", f"{model} {ask}: {found} instead of {expected}")
    if ask.schema is not None and found[0]["finish_reason"] == "stop":
        try:
            jsonschema.validate(json.loads(found[0]["text"]), ask.schema)
        except (ValueError, jsonschema.ValidationError) as error:
            outcome.problem("invalid", f"{model} {ask}: {found}: {error}")


async def malformed(client: httpx.AsyncClient, ask: Ask, chance: random.Random, outcome: Outcome) -> None:
    response = await client.post(f"/v1/{ask.path}", json={"model": "pair", **ask.body, **chance.choice(WRONG)})
    outcome.statuses[response.status_code] += 1
    outcome.counts["malformed"] += 1
    if response.status_code not in (400, 404):
        outcome.problem("accepted", f"{response.status_code} {response.text[:200]}")


async def references(client: httpx.AsyncClient, offered: list[Ask], options: argparse.Namespace) -> list[Any]:
    """What plain decoding answers, some at once."""
    kept = Kept(options.out / "expected.json", {name: getattr(options, name) for name in ("seed", "different")})
    while left := offered[len(kept.rows) :][: options.concurrency]:
        asked = [read(client, ask, REFERENCE_MODEL, stream=False, leave_after=None, outcome=Outcome()) for ask in left]
        for found in await asyncio.gather(*asked):
            kept.add(choices=found)
    print(f"{len(kept.rows)} reference answers", file=sys.stderr)
    return [row["choices"] for row in kept.rows]


async def attack(services: list[Service], url: str, options: argparse.Namespace, outcome: Outcome) -> None:
    offered = asks(options.data_dir, options.different, random.Random(options.seed))
    chance = random.Random(f"{options.seed} {outcome.runs}")
    limits, patience = httpx.Limits(max_connections=None), options.request_seconds + 300
    async with httpx.AsyncClient(base_url=url, timeout=patience, limits=limits) as client:
        expected = await references(client, offered, options)
        begun, before, preempted = time.monotonic(), outcome.seconds, outcome.counts["preemptions"]
        end = begun + 60 * options.minutes - before

        async def worker() -> None:
            while time.monotonic() < end:
                number = chance.randrange(len(offered))
                if chance.random() < MALFORMED:
                    await malformed(client, offered[number], chance, outcome)
                else:
                    await one(client, offered[number], expected[number], chance, outcome)

        def note() -> None:
            outcome.seconds = before + time.monotonic() - begun
            outcome.counts["preemptions"] = preempted + preemptions(services)
            outcome.keep(options.out / "outcome.json")

        async def watch() -> None:
            while True:
                outcome.memory.append(resident_mib())
                if len(outcome.memory) % KEEP_SECONDS == 0:
                    note()
                await asyncio.sleep(1)

        async def reload() -> None:
            while True:
                await asyncio.sleep(RELOAD_SECONDS)
                for service in services[:2]:
                    accepted = service.reload_drafter()
                    if await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(accepted, service.worker.loop)):
                        outcome.counts["reloaded"] += 1
                    else:
                        outcome.problem("refused", f"{service.model}: a drafter that was there before")

        watching = [asyncio.create_task(watch()), asyncio.create_task(reload())]
        workers = [asyncio.create_task(worker()) for _ in range(options.concurrency)]
        try:
            done, late = await asyncio.wait(workers, timeout=max(end - begun, 0) + 60 * options.grace_minutes)
            outcome.counts["unfinished"] += len(late)
            for task in done:
                task.result()
        finally:
            for task in [*watching, *workers]:
                task.cancel()
            await asyncio.gather(*watching, *workers, return_exceptions=True)
            note()


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def make_services(folder: Path, config: ServeConfig) -> list[Service]:
    drafter = Drafter.from_pretrained(REFERENCE / "drafter", dtype=torch.float32)
    adapters = []
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        make_adapter(folder / name, drafter)
        adapters.append(f"{name}={folder / name}")
    with_adapters = replace(config, adapters=tuple(adapters))
    pair = Engine.from_pretrained(dtype=torch.float32, **SIZES)
    blocks = Engine.from_pretrained(dtype=torch.float32, policy="fixed", **SIZES)
    plain = Engine.from_pretrained(drafter=None, dtype=torch.float32, **SIZES, block_size=1)
    return [Service(pair, with_adapters, "pair"), Service(blocks, config, "blocks"), Service(plain, config, "plain")]


def check_left_behind(services: list[Service], outcome: Outcome) -> None:
    """What a server that has nothing to do still holds."""
    end = time.monotonic() + 30
    while any(service.worker.held for service in services) and time.monotonic() < end:
        time.sleep(0.05)
    for service in services:
        engine = service.worker.engine
        now = engine.snapshot()
        outcome.counts["leaked"] += now.pages_used
        if service.worker.held or now.running or now.waiting or now.pages_used:
            outcome.problem("left behind", f"{service.model}: {service.worker.held} held, {now}")
        engine.check_integrity()
        if not service.worker.is_alive:
            outcome.problem("dead", service.model)
    settled = outcome.memory[len(outcome.memory) // 3 :]
    if len(settled) > 300 and settled[-1] - settled[0] > 100:
        outcome.problem("memory", f"grew from {settled[0]:.0f} to {settled[-1]:.0f} MiB")


def preemptions(services: list[Service]) -> int:
    return int(sum(service.metrics.preemptions._value.get() for service in services))


def table(outcome: Outcome) -> str:
    kinds = ("chat", "text", "long", "sampled", "penalised", "many", "schema", "tools")
    counts = outcome.counts
    rows = {
        "minutes, and processes they were in": f"{outcome.seconds / 60:.1f}, {outcome.runs}",
        "answers read to the end and compared": sum(counts[kind] for kind in kinds),
        "of them " + ", ".join(kinds): ", ".join(str(counts[kind]) for kind in kinds),
        "by model " + ", ".join(NAMES): ", ".join(str(counts[f"of {name}"]) for name in NAMES),
        "wrong answers": counts["wrong"],
        "answers that break their schema": counts["invalid"],
        "clients that left": counts["left"],
        "malformed requests, refused": counts["malformed"] - counts["accepted"],
        "failed": counts["failed"],
        "5xx": sum(number for status, number in outcome.statuses.items() if status >= 500),
        "requests under way when time was over": counts["unfinished"],
        "preemptions": counts["preemptions"],
        "drafters reloaded": counts["reloaded"],
        "pages leaked": counts["leaked"],
    }
    if memory := outcome.memory:
        rows["resident MiB after a third, and at the end"] = f"{memory[len(memory) // 3]:.0f}, {memory[-1]:.0f}"
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with gsm8k_test.jsonl and so on")
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--different", type=int, default=160, help="requests that are told apart")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("soak"))
    parser.add_argument("--request-seconds", type=float, default=3600, help="that the server allows a request")
    parser.add_argument("--grace-minutes", type=float, default=3, help="for what is under way when time is over")
    options = parser.parse_args()
    torch.set_num_threads(1)
    make_folder(options.out)
    outcome = Outcome.begun(options.out / "outcome.json")
    config = ServeConfig(port=0, request_timeout=options.request_seconds)
    with tempfile.TemporaryDirectory() as folder:
        services = make_services(Path(folder), config)
        with serving(services, config) as url:
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(attack(services, url, options, outcome))
            check_left_behind(services, outcome)
            outcome.keep(options.out / "outcome.json")
        shown = table(outcome)
    write_atomically(options.out / "table.md", shown)
    write_atomically(options.out / "problems.json", json.dumps(outcome.problems, indent=1) + "\n")
    print(shown)
    for problem in outcome.problems[:10]:
        print(problem[:2000], file=sys.stderr)
    sys.exit(bool(outcome.problems))


if __name__ == "__main__":
    main()
