"""The paper's ablations (DFlash Tables 5–9, Fig. 5), small: one drafter per row, all else and the number of steps equal.

    python benchmarks/ablations.py --data responses.jsonl --prompts held-out.jsonl --out runs/ablations --max-steps 1000

Every row is trained once by ``volley.train``, in a process of one thread, and measured by decoding the same held-out prompts with
the engine; a row that is there with as many steps is not trained again. Prints a Markdown table: τ at T = 0, and the cost of a
draft pass against a target pass in the same decoding.
"""

import argparse
import json
import multiprocessing
import os
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from volley import Engine, SamplingParams, Target
from volley.engine.engine import REFERENCE
from volley.prompts import load_prompts
from volley.results import GenerationStats
from volley.train import step
from volley.train.loop import train
from volley.train.options import TrainConfig

Changes = dict[str, Any]

BASE: Changes = {
    "num_layers": 2,
    "block_size": 8,
    "anchors_per_sequence": 32,
    "optimizer": "muon",
    "learning_rate": 2e-3,
    "loss_decay": "decay",
}
# name, options of the run, block size to decode with, what the paper's table says of it
ROWS: list[tuple[str, Changes, int, str]] = [
    ("base: 2 layers, 5 taps, random anchors, decay, B = 8", {}, 8, ""),
    ("1 layer", {"num_layers": 1}, 8, "Table 5: fewer layers, lower τ"),
    ("4 layers", {"num_layers": 4}, 8, "Table 5: more layers, higher τ"),
    ("3 taps", {"taps": 3}, 8, "Table 6: fewer features, lower τ"),
    ("base decoded with B = 4", {}, 4, "Table 7: close to trained with 4"),
    ("trained and decoded with B = 4", {"block_size": 4}, 4, "Table 7"),
    ("no target features", {"taps": (-1,)}, 8, "Table 8: much lower τ"),
    ("fixed anchors", {"anchors": "fixed"}, 8, "Table 9: lower τ"),
    ("uniform loss", {"gamma": 1e9}, 8, "Fig. 5: lower τ"),
]


def folder_of(out: Path, changes: Changes) -> Path:
    return out / (json.dumps(changes, sort_keys=True).strip("{}").replace('"', "").replace(": ", "=") or "base")


def train_row(options: argparse.Namespace, changes: Changes) -> None:
    """Train one drafter, with ``anchors`` "fixed" on the grid of uniformly divided blocks."""
    folder, changes = folder_of(options.out, changes), dict(changes)
    report = folder / "training_report.json"
    if report.exists() and json.loads(report.read_text(encoding="utf-8"))["options"]["max_steps"] == options.max_steps:
        return
    is_fixed = changes.pop("anchors", "random") == "fixed"
    config = TrainConfig(
        target=options.target,
        data=(options.data,),
        out=str(folder),
        max_steps=options.max_steps,
        epochs=1000,
        tokens_per_batch=options.tokens_per_batch,
        eval_prompts=0,
        threads=1,
        **{**BASE, **changes},
    )
    draw = partial(grid, config.block_size) if is_fixed else step.draw_anchors
    with mock.patch.object(step, "draw_anchors", draw):
        train(config)


def grid(block_size: int, start: int, length: int, count: int, seed: str) -> list[int]:
    """Divide a response at ``[start, length)`` into blocks; returns the anchors of at most ``count`` of them."""
    candidates = range(start, length - 1, block_size)
    return sorted(random.Random(seed).sample(candidates, min(count, len(candidates))))


def tau(stats: Sequence[GenerationStats]) -> float:
    """Mean tokens per cycle over all cycles of all answers."""
    lengths = [length for one in stats for length in one.accepted_lengths]
    return sum(lengths) / len(lengths)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(REFERENCE / "target"))
    parser.add_argument("--data", required=True, help="responses of the target, from volley collect")
    parser.add_argument("--prompts", required=True, help="held-out prompts to decode")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-steps", type=int, default=1000)
    parser.add_argument("--tokens-per-batch", type=int, default=1024)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="rows to train at a time")
    parser.add_argument("--num-prompts", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=128)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    distinct = [json.loads(text) for text in dict.fromkeys(json.dumps(changes) for _, changes, _, _ in ROWS)]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(partial(train_row, options), distinct))
    target = Target.from_pretrained(options.target, dtype=torch.bfloat16)
    chats = [list(chat.messages) for chat in load_prompts(options.prompts, limit=options.num_prompts)]
    print(f"{options.max_steps} steps of {options.tokens_per_batch} tokens each\n")
    print("| drafter | τ | against base | T_draft ÷ T_verify | in the paper |\n|---|---|---|---|---|", flush=True)
    base = None
    for name, changes, block_size, paper in ROWS:
        drafter = folder_of(options.out, changes) / "drafter"
        engine = Engine.from_pretrained(target, drafter=drafter, dtype=target.dtype, block_size=block_size)
        params = SamplingParams(max_tokens=options.max_tokens)
        stats = [next(iter(engine.generate([chat], params))).stats for chat in chats]
        cost = sum(s.draft_seconds for s in stats) / sum(s.verify_seconds for s in stats)
        base = base or tau(stats)
        print(f"| {name} | {tau(stats):.3f} | {tau(stats) / base - 1:+.1%} | {cost:.2f} | {paper} |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
