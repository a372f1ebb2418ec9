"""A shift of workload: what a server that recalibrates regains of its τ, and what that costs. Run the steps in this order.

    python benchmarks/shift.py prepare --data DATA --out runs/shift      # a drafter that knows one workload only
    python benchmarks/shift.py serve --data DATA --out runs/shift --workload code --tokens 8000
    python benchmarks/shift.py serve --data DATA --out runs/shift --workload prose --tokens 20000
    python benchmarks/shift.py serve --data DATA --out runs/shift --workload code --phase back --tokens 20000
    python benchmarks/shift.py table --data DATA --out runs/shift
    python benchmarks/shift.py speed --data DATA --out runs/shift --workload math
    python benchmarks/shift.py latency --data DATA --out runs/shift --workload math
    python benchmarks/shift.py steady --data DATA --out runs/shift --workload code

``DATA`` holds ``python_functions.jsonl`` (sympy, networkx), ``gsm8k_train.jsonl``, ``tldr_pages.jsonl`` and ``rust_book.jsonl``.

- ``serve`` decodes greedily with the drafter that serves, keeps what was served, and lets the rounds of ``volley serve
  --recalibrate`` run whenever they are due, in this process. The static drafter decodes the same prompts beside it. It goes on
  from what the folder has learnt. A workload that comes back is a phase of its own.
- ``table`` prints what ``serve`` has found: τ by served tokens, and how much of what the phase had lost is back.
- ``speed`` compares both on prompts that were not served.
- ``latency`` asks a server that trains in the pauses between requests, and two that do not; while those are asked the training
  of the first is stopped. Ratios come with their error (bootstrap over rounds); the two plain ones are each other's control.
  A p99 needs a thousand rounds or so: ``--seconds 600`` is half an hour.
- ``steady`` compares tokens a second of the same servers on the workload that the static drafter knows, in batches. All are
  started anew some times.

Each prints its figures and adds them to ``OUT/figures.jsonl``.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch

from volley import Engine, SamplingParams
from volley.engine.reload import replace_drafter
from volley.files import REFERENCE, write_atomically
from volley.models.drafters.draft_model import load_drafter
from volley.models.drafters.drafter import Drafter
from volley.models.layers.fingerprint import drafter_fingerprint, target_fingerprint
from volley.recalibrate.options import RecalibrateConfig
from volley.recalibrate.reservoir import Reservoir
from volley.recalibrate.rounds import Recalibration
from volley.recalibrate.state import BASE, Learnt, Standing
from volley.train.features import FrozenTarget
from volley.train.loop import train
from volley.train.options import TrainConfig

TARGET = str(REFERENCE / "target")
AT_ONCE, MAX_TOKENS, WINDOW = 8, 96, 2000
LEAST_LOSS = 0.05
"""Of τ: what is less is no shift."""
LATE, PAUSE = 24, 0.12
"""Requests of which latency is measured, over and over, and the seconds of a pause before each."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=tuple(STEPS))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/shift"))
    parser.add_argument("--drafter", type=Path, help="static drafter; by default the one that prepare has trained")
    parser.add_argument("--workload", choices=("code", "math", "commands", "prose"), default="code")
    parser.add_argument("--phase", default="", help="serve: name of a phase; a run that was stopped goes on in it")
    parser.add_argument("--tokens", type=int, default=20_000, help="prepare: of responses; serve: to serve")
    parser.add_argument("--steps", type=int, help="prepare: of the training (700); serve: of each candidate")
    parser.add_argument("--round-tokens", type=int, default=RecalibrateConfig.recalibrate_tokens)
    parser.add_argument("--learning-rate", type=float, default=None)
    parser.add_argument("--requests", type=int, default=48, help="speed, latency")
    parser.add_argument("--seconds", type=float, default=300, help="latency, steady: of each server")
    parser.add_argument("--starts", type=int, default=6, help="steady: of the servers, which share the seconds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of what decodes")
    return parser.parse_args()


def prompts(data: Path, workload: str, seed: int) -> Iterator[list[dict[str, str]]]:
    """Prompts of a workload without end, in an order of their own; those of ``seed`` 0 train the static drafter."""

    def rows(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (data / f"{name}.jsonl").read_text().splitlines()]

    texts = {
        "code": lambda: [
            f"Write the Python function `{row['name']}`: {row['doc'][:240]}" for row in rows("python_functions")
        ],
        "math": lambda: [row["question"] for row in rows("gsm8k_train")],
        "commands": lambda: [f"How do I use `{row['command']}`?" for row in rows("tldr_pages")],
        "prose": lambda: [f"Continue this text.\n\n{row['text'][:400]}" for row in rows("rust_book")],
    }[workload]()
    texts.sort()
    random.Random(0).shuffle(texts)
    part = len(texts) // 6
    own = texts[seed * part : (seed + 1) * part]
    while True:
        for text in own:
            yield [{"role": "user", "content": text}]


def note(out: Path, figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)
    with (out / "figures.jsonl").open("a") as file:
        file.write(json.dumps(figures) + "\n")


def tau(lengths: list[int]) -> float:
    return round(sum(lengths) / max(1, len(lengths)), 3)


def answer(engine: Engine, asked: list[list[int]], max_tokens: int = MAX_TOKENS) -> tuple[list[Any], float]:
    engine.reset_prefix_cache()
    started = time.perf_counter()
    results = list(engine.generate(asked, SamplingParams(max_tokens=max_tokens)))  # which decodes as it is read
    return results, time.perf_counter() - started


# -- a drafter that knows one workload ---------------------------------------------------------------------------------
def prepare(arguments: argparse.Namespace) -> None:
    """Train a drafter of the bundled one's shape on responses to one workload."""
    data = arguments.out / "static.jsonl"
    if not data.exists():
        engine = Engine.from_pretrained(dtype=dtype_of(arguments))
        source, rows, count = prompts(arguments.data, arguments.workload, 0), [], 0
        while count < arguments.tokens:
            asked = [engine.encode(next(source)) for _ in range(32)]
            for prompt, result in zip(asked, answer(engine, asked)[0], strict=True):
                rows.append({"prompt_token_ids": prompt, "response_token_ids": result.token_ids, "temperature": 0.0})
                count += len(result.token_ids)
        data.parent.mkdir(parents=True, exist_ok=True)
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = TrainConfig(
        target=TARGET,
        data=(str(data),),
        out=str(arguments.out / "static"),
        block_size=8,
        taps=(1, 5, 9, 13, 17),
        num_layers=2,
        eval_prompts=0,
        eval_share=0.0,
        soft_targets=0.5,
        optimizer="muon",
        learning_rate=arguments.learning_rate or 1e-2,
        loss_decay="decay",
        anchors_per_sequence=64,
        tokens_per_batch=512,
        max_steps=arguments.steps or 700,
        epochs=10**6,
        dtype="float32",
        draft_vocab_size=0,
        threads=arguments.threads,
        save_minutes=0.5,
    )
    print(train(config))


def dtype_of(arguments: argparse.Namespace) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    return dtype


def static_folder(arguments: argparse.Namespace) -> Path:
    return Path(arguments.drafter or arguments.out / "static" / "drafter")


# -- serving with rounds in between ------------------------------------------------------------------------------------
class Shift:
    """A server's part of recalibration without HTTP, and the static drafter beside it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.folder, static = arguments.out / "kept", static_folder(arguments)
        self.static, self.engine = (
            Engine.from_pretrained(None, dtype=dtype_of(arguments), drafter=static, policy="fixed") for _ in range(2)
        )
        self.reservoir = Reservoir(self.folder)
        self.reservoir.open(target_fingerprint(self.engine.target.model))
        if Learnt.load(self.folder) is None:
            base = Drafter.from_pretrained(static)
            base.save_pretrained(self.folder / BASE)
            Learnt(drafter_fingerprint(base)).save(self.folder)
        config = RecalibrateConfig(
            recalibrate=self.folder,
            recalibrate_tokens=arguments.round_tokens,
            recalibrate_steps=arguments.steps or RecalibrateConfig.recalibrate_steps,
            recalibrate_learning_rate=arguments.learning_rate,
        )
        frozen = FrozenTarget(TARGET, torch.float32, torch.device("cpu"))
        self.events: list[dict[str, Any]] = []
        self.rounds = Recalibration(self.folder, frozen, TARGET, config, self.events.append)
        if self.learnt.current.folder != BASE:
            self._draft_with(self.learnt.current.folder)

    @property
    def learnt(self) -> Learnt:
        found = Learnt.load(self.folder)
        assert found is not None
        return found

    def _draft_with(self, folder: str) -> None:
        replace_drafter(self.engine, load_drafter(self.folder / folder, self.engine.target, "bf16"))

    def recalibrate(self) -> list[dict[str, Any]]:
        """Do what is due; what came of it."""
        done = []
        while self.rounds.work() or self.events:
            for event in self.events:
                learnt = replace(self.learnt, seen_round=max(self.learnt.seen_round, event["round"]))
                if event.get("swap"):
                    made = (event["folder"], event["kind"], event["trained_until"], event["tau"])
                    learnt = learnt.swapped(Standing(*made), event["round"])
                    self._draft_with(event["folder"])
                learnt.save(self.folder)
                done.append(
                    {key: event.get(key) for key in ("round", "kind", "swap", "gain", "error", "tau", "reason")}
                )
            self.events.clear()
        return done


def serve(arguments: argparse.Namespace) -> None:
    """τ of the drafter that serves and of the static one on the same traffic, by served tokens."""
    path = arguments.out / f"phase-{arguments.phase or arguments.workload}.json"
    done = json.loads(path.read_text()) if path.exists() else {"served": 0, "training": 0.0, "own": [], "static": []}
    shift, source = Shift(arguments), prompts(arguments.data, arguments.workload, 1)
    for _ in range(len(shift.reservoir)):  # what phases before have served
        next(source)
    while done["served"] < arguments.tokens:
        started = time.perf_counter()
        rounds = shift.recalibrate()
        done["training"] += time.perf_counter() - started
        for line in rounds:
            note(arguments.out, {"step": "round", "phase": path.stem, "served": done["served"], **line})
        asked = [shift.engine.encode(next(source)) for _ in range(AT_ONCE)]
        results, beside = answer(shift.engine, asked)[0], answer(shift.static, asked)[0]
        for prompt, result, other in zip(asked, results, beside, strict=True):
            shift.reservoir.add("client", prompt, result.token_ids, 0.0)
            done["own"] += result.stats.accepted_lengths
            done["static"] += other.stats.accepted_lengths
            done["served"] += len(result.token_ids)
        if sum(done["own"]) >= WINDOW or done["served"] >= arguments.tokens:
            figures = {"tau": tau(done["own"]), "static": tau(done["static"]), "training": round(done["training"])}
            note(arguments.out, {"step": "serve", "phase": path.stem, "served": done["served"], **figures})
            done["own"], done["static"] = [], []
        write_atomically(path, json.dumps(done))


# -- speed and latency -------------------------------------------------------------------------------------------------
def table(arguments: argparse.Namespace) -> None:
    print(to_table([json.loads(line) for line in (arguments.out / "figures.jsonl").read_text().splitlines()]))


def to_table(figures: Sequence[dict[str, Any]]) -> str:
    """The rows that ``serve`` has noted, phase by phase.

    What a phase has lost is the difference between the static drafter's τ on the first phase's workload and the τ that the phase
    begins with.
    """
    lines = [
        "| phase | served tokens | τ | static | of what was lost | seconds of training |",
        "|---|---|---|---|---|---|",
    ]
    rows = [row for row in figures if row["step"] == "serve"]
    known = statistics.mean(row["static"] for row in rows if row["phase"] == rows[0]["phase"])
    first: dict[str, float] = {}
    for row in rows:
        begun = first.setdefault(row["phase"], row["tau"])
        is_lost = row["phase"] != rows[0]["phase"] and known - begun > LEAST_LOSS
        back = f"{(row['tau'] - begun) / (known - begun):.0%}" if is_lost else "–"
        cells = [row["phase"], row["served"], row["tau"], row["static"], back, row["training"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def speed(arguments: argparse.Namespace) -> None:
    """Tokens a second of the default policy, static and learnt drafter in turn on the same prompts."""
    learnt = Learnt.load(arguments.out / "kept")
    assert learnt is not None
    folders = {"static": static_folder(arguments), "learnt": arguments.out / "kept" / learnt.current.folder}
    dtype = dtype_of(arguments)
    engines = {name: Engine.from_pretrained(None, dtype=dtype, drafter=folder) for name, folder in folders.items()}
    source = prompts(arguments.data, arguments.workload, 2)
    for at_once in (1, AT_ONCE):
        ratios, lengths = [], {name: list[int]() for name in engines}
        for index in range(1 + arguments.requests // AT_ONCE):
            batch = [engines["static"].encode(next(source)) for _ in range(AT_ONCE)]
            rates = {}
            for name in sorted(engines, reverse=bool(index % 2)):
                parts = [answer(engines[name], batch[i : i + at_once]) for i in range(0, AT_ONCE, at_once)]
                results = [result for found, _ in parts for result in found]
                rates[name] = sum(len(result.token_ids) for result in results) / sum(seconds for _, seconds in parts)
                for result in results:
                    lengths[name] += result.stats.accepted_lengths
            if index:  # the first pays for what happens once
                ratios.append(rates["learnt"] / rates["static"])
        low, middle, high = statistics.quantiles(ratios, n=4)
        figures = {"ratio": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)], "batches": len(ratios)}
        figures |= {f"tau_{name}": tau(found) for name, found in lengths.items()}
        note(arguments.out, {"step": "speed", "workload": arguments.workload, "at_once": at_once, **figures})


# -- servers, asked in turn --------------------------------------------------------------------------------------------
PACED = """
from dataclasses import replace
from volley.cli import main
from volley.recalibrate import companion
attach = companion.attach
companion.attach = lambda service, engine, config, target: attach(service, engine, replace(config, **{pace}), target)
main()
"""
"""The command line of a server that recalibrates at a pace of its own."""


class Servers:
    """Servers of the static drafter: ``training`` recalibrates, ``plain`` and ``control`` do not.

    Training goes on in the turns of the first alone, and in the pauses before them.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path, names: tuple[str, ...], **changes: float) -> None:
        """``changes`` are settings of the server that recalibrates."""
        pace = {"recalibrate_tokens": 1000, "recalibrate_steps": 1000, "recalibrate_idle": 0.05, **changes}
        if folder.exists():
            raise SystemExit(f"{folder} is of a run before; remove it, or give another --out")
        command = [sys.executable, "-c", PACED.format(pace=pace), "serve", "--drafter", str(static_folder(arguments))]
        command += ["--threads", "1", "--dtype", arguments.dtype]
        kept = ["--recalibrate", str(folder), "--recalibrate-requests", "all"]
        self.urls = {name: f"http://127.0.0.1:{8711 + place}" for place, name in enumerate(names)}
        self.folder, self.child, self.client = folder, 0, httpx.Client(timeout=120)
        self.processes = {
            name: subprocess.Popen(
                [*command, "--port", url.rpartition(":")[2], *(kept if name == "training" else [])],
                stderr=subprocess.DEVNULL,
            )
            for name, url in self.urls.items()
        }

    def __enter__(self) -> "Servers":
        for url in self.urls.values():
            _wait(f"{url}/ready")
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        for server in self.processes.values():
            server.kill()
            server.wait()

    def begin(self, bodies: Sequence[dict[str, Any]], more: Iterator[dict[str, Any]]) -> None:
        """Warm all of them up, and serve the first one more until it has enough for a round, and to judge it, and has begun."""
        for body in bodies:
            for name in self.urls:
                self.ask(name, [body])
        pid = self.processes["training"].pid
        self.child = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
        while not list(self.folder.glob("rounds/*/plan.json")):
            self.ask("training", [next(more)])
            time.sleep(0.2)

    def turn(self, name: str) -> None:
        """Let training go on, or not, and pause. The server lets it go on by itself once it is idle, so it is stopped again."""
        own = signal.SIGCONT if name == "training" else signal.SIGSTOP
        os.kill(self.child, own)
        time.sleep(PAUSE)
        os.kill(self.child, own)

    def ask(self, name: str, bodies: Sequence[dict[str, Any]]) -> tuple[int, float]:
        """All at once; tokens, and seconds until the last has come."""
        url, started = f"{self.urls[name]}/v1/chat/completions", time.perf_counter()
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(lambda body: self.client.post(url, json=body).raise_for_status().json(), bodies))
        seconds = time.perf_counter() - started
        return sum(answer["usage"]["completion_tokens"] for answer in answers), seconds


def greedy_requests(arguments: argparse.Namespace, *, seed: int, max_tokens: int) -> Iterator[dict[str, Any]]:
    """Bodies of greedy requests without end."""
    for messages in prompts(arguments.data, arguments.workload, seed):
        yield {"messages": messages, "max_tokens": max_tokens, "temperature": 0}


def latency(arguments: argparse.Namespace) -> None:
    """Latency of one request after another while training goes on in the pauses, and without training: twice, so that the second
    shows what equal servers differ by.

    The learning rate is next to nothing, so that no better drafter hides what training costs.
    Ratios are of latencies by what the same request usually takes without training: a long request is no late one.
    """
    names, found = ("training", "plain", "control"), list[list[float]]()
    source = greedy_requests(arguments, seed=3, max_tokens=48)
    bodies = [next(source) for _ in range(LATE)]
    with Servers(arguments, arguments.out / "latency", names, recalibrate_learning_rate=1e-9) as servers:
        servers.begin(bodies, source)
        before, end = _cpu_seconds(servers.child), time.monotonic() + len(names) * arguments.seconds
        while time.monotonic() < end:
            turns, seconds = len(found) % len(names), {}
            for name in (*names[turns:], *names[:turns]):
                servers.turn(name)
                seconds[name] = servers.ask(name, [bodies[len(found) % len(bodies)]])[1]
            found.append([seconds[name] for name in names])
        trained = round(_cpu_seconds(servers.child) - before, 1)
    write_atomically(arguments.out / "seconds.json", json.dumps(found))
    figures: dict[str, Any] = {"requests": len(found), "cpu_seconds_trained": trained}
    usual = [
        statistics.median(value for row in found[body::LATE] for value in row[1:])
        for body in range(min(LATE, len(found)))
    ]
    late = [[value / usual[index % LATE] for value in row] for index, row in enumerate(found)]
    for share in (50, 95, 99):
        at = {name: _percentile([row[place] for row in found], share) for place, name in enumerate(names)}
        figures[f"p{share}_ms"] = {name: round(1000 * value, 2) for name, value in at.items()}
        figures[f"p{share}_training_to_others"] = bootstrap(
            late, partial(_ratio_at, place=0, others=(1, 2), share=share)
        )
        figures[f"p{share}_control_to_plain"] = bootstrap(late, partial(_ratio_at, place=2, others=(1,), share=share))
    note(arguments.out, {"step": "latency", "workload": arguments.workload, **figures})


def steady(arguments: argparse.Namespace) -> None:
    """Tokens a second of a server that recalibrates and of one that does not, on the workload that the drafter knows.

    Equal servers differ by some percent for as long as they live, by where their memory lies and by what goodput makes of its
    first timings. So they are started anew, and what is drawn for the error is whole starts.
    """
    names, starts, swaps = ("training", "plain", "control"), list[list[list[float]]](), 0.0
    source = greedy_requests(arguments, seed=4, max_tokens=MAX_TOKENS)
    for start in range(arguments.starts):
        found = list[list[float]]()
        with Servers(arguments, arguments.out / f"steady-{start}", names) as servers:
            servers.begin([next(source) for _ in range(24)], source)
            end = time.monotonic() + len(names) * arguments.seconds / arguments.starts
            while time.monotonic() < end or not found:
                bodies = [next(source) for _ in range(AT_ONCE)]
                turns, rates = len(found) % len(names), {}
                for name in (*names[turns:], *names[:turns]):
                    servers.turn(name)
                    tokens, seconds = servers.ask(name, bodies)
                    rates[name] = tokens / seconds
                found.append([rates[name] for name in names])
            swaps += _counted(httpx.get(f"{servers.urls['training']}/metrics").text, "swaps")
        starts.append(found)
        write_atomically(arguments.out / "rates.json", json.dumps(starts))
    figures: dict[str, Any] = {"starts": len(starts), "batches": sum(map(len, starts)), "swaps": swaps}
    for place, others, name in ((0, (1, 2), "training_to_others"), (2, (1,), "control_to_plain")):
        ratios = [
            statistics.median(row[place] / statistics.mean(row[other] for other in others) for row in found)
            for found in starts
        ]
        figures[name] = bootstrap(ratios, statistics.mean)
        figures[f"{name}_by_start"] = [round(ratio, 3) for ratio in ratios]
    note(arguments.out, {"step": "steady", "workload": arguments.workload, **figures})


def bootstrap(rows: Sequence[Any], figure: Callable[[Sequence[Any]], float]) -> dict[str, Any]:
    """A figure of rounds, or of starts, and the middle 95 % of it over a thousand draws of as many."""
    generator = random.Random(0)
    drawn = sorted(figure(generator.choices(rows, k=len(rows))) for _ in range(1000))
    return {"ratio": round(figure(rows), 3), "95%": [round(drawn[25], 3), round(drawn[974], 3)]}


def _ratio_at(rows: Sequence[list[float]], *, place: int, others: Sequence[int], share: int) -> float:
    found = [row[other] for row in rows for other in others]
    return _percentile([row[place] for row in rows], share) / _percentile(found, share)


def _percentile(values: Sequence[float], share: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * share // 100)]


def _counted(metrics: str, name: str) -> float:
    """The sum of a counter over its labels."""
    lines = [line for line in metrics.splitlines() if name in line.partition("{")[0] and not line.startswith("#")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _cpu_seconds(process: int) -> float:
    times = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def _wait(url: str) -> None:
    for _ in range(600):
        try:
            if httpx.get(url, timeout=1).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"no answer from {url}")


STEPS = {"prepare": prepare, "serve": serve, "table": table, "speed": speed, "latency": latency, "steady": steady}


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    STEPS[arguments.step](arguments)


if __name__ == "__main__":
    main()
