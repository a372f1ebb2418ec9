"""Which drafter drafts best: one row per head, objective and way of decoding; data, seed and number of steps equal.

    python benchmarks/drafters.py --data responses.jsonl --prompts held-out.jsonl --out runs/drafters --max-steps 800

Every row is trained by ``volley.train`` and measured by decoding held-out prompts with the engine: τ at T = 0 and T = 1 over all
prompts, many at a time, and with ``--timed-prompts`` the times at batch 1, beside plain decoding of the same prompt. At T = 1
chains are verified by speculative sampling, trees by sample-and-match. A row that has been trained and measured is not done
again. Prints a Markdown table; ``--rows`` picks rows by their keys.
"""

import argparse
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from training_rows import Changes, folder_of, load_chats, parser, tau, train_rows

from volley import Drafter, Engine, SamplingParams, Target
from volley.files import write_atomically
from volley.models.layers.accelerate import accelerate
from volley.types import GenerationStats

BASE: Changes = {
    "num_layers": 2,
    "block_size": 8,
    "optimizer": "muon",
    "learning_rate": 2e-3,
    "anchors_per_sequence": 32,
}
HEAD: Changes = {"head": "residual", "head_rank": 128}
SOFT: Changes = {"soft_targets": 0.5}
DISTANCE: Changes = {"total_variation": 0.9}
BEST: Changes = {**HEAD, **SOFT, "loss_decay": "pace"}


@dataclass(frozen=True)
class Row:
    name: str
    changes: Changes
    candidates: int | None = None
    """Tokens of a slot that the walk chooses from, where not the drafter's own."""
    engine: dict[str, Any] = field(default_factory=dict)


ROWS: dict[str, Row] = {
    "dflash": Row("DFlash", {}),
    "dflash-tree": Row("DFlash, trees of 16 nodes", {}, engine={"tree_nodes": 16}),
    "dflash-16": Row("DFlash, B = 16", {"block_size": 16}),
    "soft": Row("DFlash, soft targets", SOFT),
    "residual": Row("residual head, soft targets", {**HEAD, **SOFT}),
    "residual-tv": Row("residual head, 0.9 total variation", {**HEAD, **DISTANCE}),
    "best": Row("residual head, soft targets, D-PACE", BEST),
    "candidates-16": Row("… walking 16 candidates", BEST, candidates=16),
    "candidates-64": Row("… walking 64 candidates", BEST, candidates=64),
    "best-tree": Row("… trees of 16 nodes", BEST, engine={"tree_nodes": 16}),
    "best-16": Row("… B = 16", {**BEST, "block_size": 16}),
}


def measure(target: Target, plain: Engine, row: Row, options: argparse.Namespace) -> dict[str, float]:
    drafter = Drafter.from_pretrained(folder_of(options.out, row.changes) / "drafter", dtype=target.dtype)
    if row.candidates is not None and drafter.config.head is not None:
        drafter.config = replace(drafter.config, head=replace(drafter.config.head, candidates=row.candidates))
    accelerate(drafter)
    engine = Engine(target, drafter, policy="fixed", **(row.engine or {"verification": "speculative"}))
    chats = load_chats(options)
    found = {}
    for temperature in (0.0, 1.0):
        params = [sampling(options, temperature, seed) for seed in range(len(chats))]
        found[f"tau {temperature:g}"] = tau([result.stats for result in engine.generate(chats, params)])
    if options.timed_prompts:
        found |= times(plain, engine, chats[: options.timed_prompts], options)
    return found


def sampling(options: argparse.Namespace, temperature: float, seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=options.max_tokens, temperature=temperature, seed=seed)


def times(plain: Engine, engine: Engine, chats: list[Any], options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a cycle's phases at T = 0 and the speedup over plain decoding of the same prompts, each in turn."""
    found: dict[str, float] = {}
    for temperature in (0.0, 1.0):
        stats: dict[Engine, list[GenerationStats]] = {plain: [], engine: []}
        for number, chat in enumerate(chats):
            params = sampling(options, temperature, number)
            for one in (plain, engine) if number % 2 else (engine, plain):
                stats[one].append(next(iter(one.generate([chat], params))).stats)
        rates = {
            one: sum(s.output_tokens - 1 for s in many) / sum(s.total_seconds - s.time_to_first_token for s in many)
            for one, many in stats.items()
        }
        found[f"speedup {temperature:g}"] = rates[engine] / rates[plain]
        if temperature == 0:
            drafted = stats[engine]
            per_cycle = 1000 / sum(len(s.accepted_lengths) for s in drafted)
            found["draft"] = per_cycle * sum(s.draft_seconds for s in drafted)
            found["walk"] = per_cycle * sum(s.walk_seconds for s in drafted)
            found["verify"] = per_cycle * sum(s.verify_seconds for s in drafted)
            found["efficiency"] = found["speedup 0"] / tau(drafted)
    return found


COLUMNS = {
    "tau 0": "τ, T = 0",
    "tau 1": "τ, T = 1",
    "draft": "T_draft ms",
    "walk": "of it the walk",
    "verify": "T_verify ms",
    "speedup 0": "speedup, T = 0",
    "efficiency": "efficiency",
    "speedup 1": "speedup, T = 1",
}


def main() -> None:
    own = parser(__doc__)
    own.add_argument("--rows", default=",".join(ROWS), help=f"comma-separated, of {', '.join(ROWS)}")
    own.add_argument("--timed-prompts", type=int, default=12, help="prompts to time at batch 1; 0 times none")
    own.add_argument("--threads", type=int, default=None, help="CPU threads of the decoding")
    options = own.parse_args()
    chosen = {key: ROWS[key] for key in options.rows.split(",")}
    train_rows(options, BASE, [row.changes for row in chosen.values()])
    torch.set_num_threads(options.threads or torch.get_num_threads())
    target = Target.from_pretrained(options.target, dtype=torch.bfloat16)
    plain = Engine(target, block_size=1)
    facts = {name: getattr(options, name) for name in ("max_steps", "num_prompts", "max_tokens", "timed_prompts")}
    print(f"{options.max_steps} steps of {options.tokens_per_batch} tokens each\n")
    print("| drafter | " + " | ".join(COLUMNS.values()) + " |\n|" + "---|" * (1 + len(COLUMNS)), flush=True)
    for key, row in chosen.items():
        path: Path = options.out / f"measured-{key}.json"
        measured = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if measured.get("facts") != facts:
            measured = {"facts": facts, **measure(target, plain, row, options)}
            write_atomically(path, json.dumps(measured) + "\n")
        cells = [f"{measured[column]:.2f}" if column in measured else "" for column in COLUMNS]
        print(f"| {row.name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
