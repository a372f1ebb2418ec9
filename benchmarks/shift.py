"""A shift of workload: what a server that recalibrates regains of its τ, and what that costs. Run the steps in this order.

    python benchmarks/shift.py prepare --data DATA --out runs/shift      # a drafter that knows one workload only
    python benchmarks/shift.py serve --data DATA --out runs/shift --workload code --tokens 8000
    python benchmarks/shift.py serve --data DATA --out runs/shift --workload prose --tokens 20000
    python benchmarks/shift.py serve --data DATA --out runs/shift --workload code --phase back --tokens 20000
    python benchmarks/shift.py speed --data DATA --out runs/shift --workload math

``DATA`` holds ``python_functions.jsonl`` (sympy, networkx), ``gsm8k_train.jsonl``, ``tldr_pages.jsonl`` and ``rust_book.jsonl``.

- ``serve`` decodes greedily with the drafter that serves, keeps what was served, and lets the rounds of ``volley serve
  --recalibrate`` run whenever they are due, in this process. The static drafter decodes the same prompts beside it. It goes on
  from what the folder has learnt. A workload that comes back is a phase of its own.
- ``speed`` compares both on prompts that were not served.

Each prints its figures and adds them to ``OUT/figures.jsonl``.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    parser.add_argument("--requests", type=int, default=48, help="speed")
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


STEPS = {"prepare": prepare, "serve": serve, "speed": speed}


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    STEPS[arguments.step](arguments)


if __name__ == "__main__":
    main()
