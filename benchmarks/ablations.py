"""The paper's ablations (DFlash Tables 5–9, Fig. 5), small: one drafter per row, all else and the number of steps equal.

    python benchmarks/ablations.py --data responses.jsonl --prompts held-out.jsonl --out runs/ablations --max-steps 1000

Every row is trained by ``volley.train`` in a process of one thread, ``--jobs`` of them at a time, and measured by decoding the
same held-out prompts with the engine; a finished row is not trained again. Prints a Markdown table: τ at T = 0, and the cost of
a draft pass against a target pass in the same decoding.
"""

import argparse
import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from volley import Engine, SamplingParams, Target
from volley.engine.engine import REFERENCE
from volley.prompts import load_prompts
from volley.train.loop import train
from volley.train.options import TrainConfig

BASE: dict[str, Any] = {
    "num_layers": 2,
    "block_size": 8,
    "anchors_per_sequence": 32,
    "features": "cache",
    "optimizer": "muon",
    "learning_rate": 2e-3,
}
# name, options of the run, block size to decode with, what the paper's table says of it
ROWS: list[tuple[str, dict[str, Any], int, str]] = [
    ("base: 2 layers, 5 taps, random anchors, decay, B = 8", {}, 8, ""),
    ("1 layer", {"num_layers": 1}, 8, "Table 5: fewer layers, lower τ"),
    ("4 layers", {"num_layers": 4}, 8, "Table 5: more layers, higher τ"),
    ("3 taps", {"taps": 3}, 8, "Table 6: fewer features, lower τ"),
    ("base decoded with B = 4", {}, 4, "Table 7: close to trained with 4"),
    ("trained and decoded with B = 4", {"block_size": 4}, 4, "Table 7"),
    ("no target features", {"no_features": True}, 8, "Table 8: much lower τ"),
    ("fixed anchors", {"anchors": "fixed"}, 8, "Table 9: lower τ"),
    ("uniform loss", {"loss_decay": "uniform"}, 8, "Fig. 5: lower τ"),
]


def folder_of(out: Path, changes: dict[str, Any]) -> Path:
    return out / (json.dumps(changes, sort_keys=True).strip("{}").replace('"', "").replace(": ", "=") or "base")


def train_row(options: argparse.Namespace, changes: dict[str, Any]) -> None:
    """Train one drafter; rows that tap the same layers share their cached features."""
    folder = folder_of(options.out, changes)
    taps = folder_of(options.out, {key: changes[key] for key in ("taps", "no_features") if key in changes}).name
    if (folder / "training_report.json").exists():
        return
    train(
        TrainConfig(
            target=options.target,
            data=(options.data,),
            out=str(folder),
            cache_dir=str(options.out / f"features-{taps}"),
            max_steps=options.max_steps,
            epochs=1000,
            tokens_per_batch=options.tokens_per_batch,
            eval_prompts=0,
            threads=1,
            **{**BASE, **changes},
        )
    )


def train_rows(options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """Train ``--jobs`` rows at a time; the first of those that share features writes them alone."""
    distinct = [json.loads(text) for text in dict.fromkeys(json.dumps(row) for row in rows)]
    first = {tuple(row.get(key) for key in ("taps", "no_features")): row for row in reversed(distinct)}.values()
    for group in (list(first), [row for row in distinct if row not in first]):
        with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(train_row, [options] * len(group), group))


def measure(target: Target, drafter: Path, prompts: list[Any], block_size: int, max_tokens: int) -> tuple[float, float]:
    """Mean τ over all cycles and seconds of draft passes ÷ seconds of target passes."""
    engine = Engine.from_pretrained(target, drafter=drafter, dtype=target.dtype, block_size=block_size)
    lengths: list[int] = []
    draft = verify = 0.0
    for prompt in prompts:  # one at a time: the times are those of batch 1
        for result in engine.generate([prompt], SamplingParams(max_tokens=max_tokens)):
            lengths += result.stats.accepted_lengths
            draft += result.stats.draft_seconds
            verify += result.stats.verify_seconds
    return sum(lengths) / len(lengths), draft / verify


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(REFERENCE / "target"))
    parser.add_argument("--data", required=True, help="responses of the target, from volley collect")
    parser.add_argument("--prompts", required=True, help="held-out prompts to decode")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-steps", type=int, default=1000)
    parser.add_argument("--tokens-per-batch", type=int, default=1024)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--num-prompts", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=128)
    options = parser.parse_args()

    train_rows(options, [changes for _, changes, _, _ in ROWS])
    target = Target.from_pretrained(options.target, dtype=torch.bfloat16)
    prompts = [list(conversation.messages) for conversation in load_prompts(options.prompts, limit=options.num_prompts)]
    print(f"{options.max_steps} steps of {options.tokens_per_batch} tokens each\n")
    print("| drafter | τ | against base | T_draft ÷ T_verify | in the paper |\n|---|---|---|---|---|", flush=True)
    base = None
    for name, changes, block_size, paper in ROWS:
        tau, cost = measure(
            target, folder_of(options.out, changes) / "drafter", prompts, block_size, options.max_tokens
        )
        base = base or tau
        print(f"| {name} | {tau:.3f} | {tau / base - 1:+.1%} | {cost:.2f} | {paper} |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
