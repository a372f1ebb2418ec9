"""What the tables of drafters share: training one drafter for each row, all else equal, and decoding with it.

A row is a set of changes to the options that all rows have in common. Each is trained once, in a process of one thread, into a
folder named after its changes; a row that is there with as many steps is not trained again.
"""

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from volley import Engine, SamplingParams
from volley.engine.engine import REFERENCE
from volley.prompts import load_prompts
from volley.train.loop import train
from volley.train.options import TrainConfig
from volley.types import GenerationStats

Changes = dict[str, Any]


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that all tables of drafters have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--target", default=str(REFERENCE / "target"))
    made.add_argument("--data", required=True, help="responses of the target, from volley collect")
    made.add_argument("--prompts", required=True, help="held-out prompts to decode")
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--cache-dir", type=Path, help="cached features of the rows that tap the default layers")
    made.add_argument("--max-steps", type=int, default=1000)
    made.add_argument("--tokens-per-batch", type=int, default=1024)
    made.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="rows to train at a time")
    made.add_argument("--num-prompts", type=int, default=60)
    made.add_argument("--max-tokens", type=int, default=128)
    return made


def folder_of(out: Path, changes: Changes) -> Path:
    return out / (json.dumps(changes, sort_keys=True).strip("{}").replace('"', "").replace(": ", "=") or "base")


def _taps(changes: Changes) -> Changes:
    return {key: changes[key] for key in ("taps",) if key in changes}


def _compares_with_target(changes: Changes) -> bool:
    return changes.get("soft_targets", 0) + changes.get("total_variation", 0) > 0


def train_as_told(**options: Any) -> None:
    """Train one drafter by options of ``TrainConfig``."""
    train(TrainConfig(**options))


def train_row(run: Callable[..., None], options: argparse.Namespace, base: Changes, changes: Changes) -> None:
    """Train one drafter; rows that tap the same layers share their cached features."""
    folder = folder_of(options.out, changes)
    report = folder / "training_report.json"
    if report.exists() and json.loads(report.read_text(encoding="utf-8"))["options"]["max_steps"] == options.max_steps:
        return
    cache = options.out / f"features-{folder_of(options.out, _taps(changes)).name}"
    if options.cache_dir and not _taps(changes):
        cache = options.cache_dir
    run(
        target=options.target,
        data=(options.data,),
        out=str(folder),
        features="cache",
        cache_dir=str(cache),
        max_steps=options.max_steps,
        epochs=1000,
        tokens_per_batch=options.tokens_per_batch,
        eval_prompts=0,
        threads=1,
        **{"loss_decay": "decay", "anchors_per_sequence": 64, **base, **changes},
    )


def train_rows(
    options: argparse.Namespace, base: Changes, rows: Sequence[Changes], run: Callable[..., None] = train_as_told
) -> None:
    """Train ``--jobs`` rows at a time by ``run``; of those that share features the one that asks for most writes them, alone."""
    distinct = [json.loads(text) for text in dict.fromkeys(json.dumps(row) for row in rows)]
    writers: dict[str, Changes] = {}
    for row in sorted(distinct, key=_compares_with_target, reverse=True):
        writers.setdefault(json.dumps(_taps(row)), row)
    first = list(writers.values())
    for group in (first, [row for row in distinct if row not in first]):
        if group:
            with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
                list(pool.map(partial(train_row, run), [options] * len(group), [base] * len(group), group))


def load_chats(options: argparse.Namespace) -> list[Any]:
    return [list(chat.messages) for chat in load_prompts(options.prompts, limit=options.num_prompts)]


def decode(engine: Engine, chats: Sequence[Any], params: SamplingParams) -> list[GenerationStats]:
    """Statistics of every chat's answer, one chat at a time: the times are those of batch 1."""
    return [next(iter(engine.generate([chat], params))).stats for chat in chats]


def tau(stats: Sequence[GenerationStats]) -> float:
    """Mean tokens per cycle over all cycles of all answers."""
    lengths = [length for one in stats for length in one.accepted_lengths]
    return sum(lengths) / len(lengths)
