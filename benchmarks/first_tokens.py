"""Times to first tokens over HTTP, with speculation and with plain decoding, by turns: a closed loop, and Poisson arrivals.

    python benchmarks/first_tokens.py --data-dir DIR --skip-prompts 40 --out first-tokens

Two servers run on one machine and take turns, so that a machine that is faster at one minute than at the next is so for both.
Answers have 32 to 96 tokens, math, code and chats in turn. The first requests of a level, as many as are in flight at once, are
left out: they arrive together, which no later ones do. A round takes all levels once; none is begun that --minutes would not see
the end of, and percentiles are over the requests of all rounds. Levels are kept in --out/samples.json as they are done: the same
command goes on from there, so that more minutes give more rounds. Writes table.md too, with a table of each kind of load.

A 99th percentile of a hundred requests is one or two of them. So the mean of the slowest twentieth is given as well, and the
ratios have 90 % intervals: of a bootstrap over requests, which takes a prompt's times with and without drafts together.
"""

import argparse
import asyncio
import contextlib
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.kept import Kept
from volley.bench.load import Level, LoadConfig, Sample, percentiles, run_level
from volley.files import write_atomically
from volley.prompts import load_prompts

CASES = {"plain": ["--drafter", "none", "--policy", "plain"], "volley": []}
LENGTHS = (32, 48, 64, 80, 96)
SLOW = 0.05  # of the requests, whose mean is given
DRAWN = 2000  # samples of the bootstrap


@contextmanager
def serving(options: list[str], threads: int) -> Iterator[str]:
    """A server in a process of its own; yields its URL."""
    command = [sys.executable, "-m", "volley.cli", "serve", "--port", "0", "--threads", str(threads), *options]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as server:
        assert server.stderr is not None
        try:
            for line in server.stderr:
                if found := re.search(r'"url": ?"([^"]+)"', line):
                    break
            else:
                raise SystemExit(f"the server did not start: {' '.join(command)}")
            threading.Thread(target=server.stderr.read, daemon=True).start()  # or its log would fill the pipe
            yield found[1]
        finally:
            server.terminate()


def make_bodies(options: argparse.Namespace, model: str, count: int) -> list[dict[str, Any]]:
    limit = options.skip_prompts + options.num_prompts
    sets = [load_prompts(name, options.data_dir, limit)[options.skip_prompts :] for name in options.datasets.split(",")]
    chance = random.Random(options.seed)
    return [
        {
            "model": model,
            "messages": list(chance.choice(sets[index % len(sets)]).messages),
            "max_tokens": chance.choice(LENGTHS),
            "temperature": index // len(sets) % 2,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for index in range(count)
    ]


async def one_level(url: str, kind: str, load: float, options: argparse.Namespace) -> tuple[float, list[Sample]]:
    """Seconds and samples of one level on one server."""
    first = int(load) if kind == "closed" else 0
    requests = first + max(options.requests, options.per_flight * first)
    config = LoadConfig(url=url, requests=requests, seed=options.seed)
    levels: list[Level] = []
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        model = (await client.get(f"{config.base_url}/models")).json()["data"][0]["id"]
        bodies = make_bodies(options, model, requests)
        await run_level(config, client, bodies, kind, load, lambda label, done: None, levels)
    samples = sorted(levels[0].samples, key=lambda sample: sample.started)[first:]
    if failed := [sample.error for sample in samples if sample.error]:
        raise SystemExit(f"a request failed: {failed[0]}")
    return levels[0].seconds, samples


Runs = dict[tuple[str, float, str], list[list[Sample]]]


def levels_of(options: argparse.Namespace) -> list[tuple[str, float]]:
    closed, rates = (
        [float(part) for part in given.split(",") if part] for given in (options.concurrency, options.rates)
    )
    return [("closed", load) for load in closed] + [("open", rate) for rate in rates]


def measure(urls: dict[str, str], options: argparse.Namespace, kept: Kept) -> None:
    """Both cases of a level come after one another, in an order that changes from round to round."""
    levels, done = levels_of(options), {(row["round"], row["kind"], row["load"], row["case"]) for row in kept.rows}
    end, longest = time.monotonic() + 60 * options.minutes, dict.fromkeys(levels, 0.0)
    for row in kept.rows:
        level = row["kind"], row["load"]
        longest[level] = max(longest.get(level, 0.0), row["seconds"])
    for url in urls.values():  # to warm up
        asyncio.run(one_level(url, "closed", 2.0, argparse.Namespace(**{**vars(options), "requests": 4})))
    for number in range(options.rounds):
        for kind, load in levels:
            left = [case for case in sorted(urls, reverse=number % 2 == 0) if (number, kind, load, case) not in done]
            if left and time.monotonic() + len(left) * longest[kind, load] > end:
                print(f"no time for round {number} of {load:g} {kind}; the same command goes on", file=sys.stderr)
                return
            for case in left:
                seconds, samples = asyncio.run(one_level(urls[case], kind, load, options))
                longest[kind, load] = max(longest[kind, load], seconds)
                told = [asdict(sample) | {"gaps": [round(gap, 5) for gap in sample.gaps]} for sample in samples]
                kept.add(round=number, kind=kind, load=load, case=case, seconds=seconds, samples=told)
                print(f"round {number}: {load:g} {kind}, {case}, {seconds:.0f} s", file=sys.stderr)


def runs_of(kept: Kept) -> Runs:
    """Samples of each level and case, round by round, of rounds in which both cases were measured."""
    rounds: dict[tuple[int, str, float], dict[str, list[Sample]]] = defaultdict(dict)
    for row in kept.rows:
        samples = [Sample(**sample) for sample in row["samples"]]
        rounds[row["round"], row["kind"], row["load"]][row["case"]] = samples
    runs: Runs = defaultdict(list)
    for (_, kind, load), cases in rounds.items():
        for case in CASES if len(cases) == len(CASES) else ():
            runs[kind, load, case].append(cases[case])
    return runs


def summary(found: list[list[Sample]]) -> dict[str, Any]:
    samples = [sample for own in found for sample in own]
    spans = [max(s.started + s.total for s in own) - min(s.started for s in own) for own in found]
    return {
        "first": percentiles([sample.first for sample in samples]),
        "gap": percentiles([gap for sample in samples for gap in sample.gaps]),
        "rate": sum(sample.tokens for sample in samples) / sum(spans),
        "requests": len(samples),
    }


def latest(seconds: Any) -> Any:
    """The 99th percentile and the mean of the slowest twentieth of ``seconds [..., requests]``: ``[2, ...]``."""
    slow = max(1, round(SLOW * seconds.shape[-1]))
    return np.stack([np.percentile(seconds, 99, axis=-1), np.sort(seconds, axis=-1)[..., -slow:].mean(axis=-1)])


def compared(found: list[list[Sample]], plain: list[list[Sample]], seed: int = 0) -> list[tuple[float, float, float]]:
    """Return :func:`latest` of ``found`` over that of ``plain``, each with the ends of its 90 % interval.

    The n-th request of a round has the same prompt in both.
    """
    both = np.array([[sample.first for own in case for sample in own] for case in (found, plain)])
    drawn = both[:, np.random.default_rng(seed).integers(both.shape[1], size=(DRAWN, both.shape[1]))]
    ratios, (own, other) = np.divide(*map(latest, drawn)), map(latest, both)
    low, high = np.percentile(ratios, (5, 95), axis=-1)
    return list(zip((own / other).tolist(), low.tolist(), high.tolist(), strict=True))


def table(runs: Runs, wanted: str) -> str:
    """A table of one kind of load."""
    columns = (
        "load",
        "case",
        "requests",
        "TTFT ms p50 / p90 / p99, slowest 5 %",
        "p99 to plain's",
        "slowest 5 % to plain's",
        "gap ms p50 / p99",
        "tokens/s",
        "to plain's",
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for (kind, load, case), found in sorted(runs.items(), key=lambda item: item[0][:2]):
        if kind != wanted:
            continue
        beside = runs[kind, load, "plain"]
        own, plain = summary(found), summary(beside)
        slow = latest(np.array([sample.first for part in found for sample in part]))[1]
        first = (
            " / ".join(f"{1000 * own['first'][name]:.0f}" for name in ("p50", "p90", "p99")) + f", {1000 * slow:.0f}"
        )
        gap = " / ".join(f"{1000 * own['gap'][name]:.0f}" for name in ("p50", "p99"))
        ratios = ["1", "1"]
        if case != "plain":
            ratios = [f"{ratio:.2f} ({low:.2f} to {high:.2f})" for ratio, low, high in compared(found, beside)]
        label = f"{load:g} at once" if kind == "closed" else f"{load:g} a second"
        cells = (
            label,
            case,
            str(own["requests"]),
            first,
            *ratios,
            gap,
            f"{own['rate']:.0f}",
            f"{own['rate'] / plain['rate']:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with gsm8k_test.jsonl and so on")
    parser.add_argument("--out", type=Path, default=Path("first-tokens"))
    parser.add_argument("--concurrency", default="1,8,32,64")
    parser.add_argument("--rates", default="2", help="requests a second, arriving at random")
    parser.add_argument(
        "--requests", type=int, default=40, help="of a level and round, at least --per-flight for each in flight"
    )
    parser.add_argument("--per-flight", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=7.0, help="for levels; servers take half a minute to start")
    parser.add_argument("--datasets", default="gsm8k,humaneval,mt-bench", help="taken by turns")
    parser.add_argument("--num-prompts", type=int, default=40, help="of each dataset")
    parser.add_argument("--skip-prompts", type=int, default=0, help="of each; 40 to report, 0 to choose a setting")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of each server")
    parser.add_argument("--options", default="", help="more options of the server that speculates")
    options = parser.parse_args()
    named = ("requests", "per_flight", "datasets", "num_prompts", "skip_prompts", "seed", "threads", "options")
    kept = Kept(options.out / "samples.json", {name: getattr(options, name) for name in named})
    with ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        urls = {}
        for case, own in CASES.items():
            more = options.options.split() if case == "volley" else []
            urls[case] = stack.enter_context(serving([*own, *more], options.threads))
        measure(urls, options, kept)
    runs = runs_of(kept)
    tables = {kind: table(runs, kind) for kind in ("closed", "open") if any(key[0] == kind for key in runs)}
    shown = "\nPoisson arrivals:\n\n".join(tables[kind] for kind in tables)
    print(shown)
    write_atomically(options.out / "table.md", shown)


if __name__ == "__main__":
    main()
