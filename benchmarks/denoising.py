"""What the drafter's own denoising gains: τ and tokens per second of one draft pass, of two and four, by counts and confidence.

    python benchmarks/denoising.py --prompts held-out.jsonl --drafter one=FOLDER --drafter revealed=FOLDER

Every prompt is answered greedily at batch 1 by every drafter in every way, in turn; speeds are compared prompt by prompt with the
first drafter's single pass. Prints a Markdown table: τ over all cycles, draft passes a cycle, and the median ratio of speeds.
"""

import argparse
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from volley import Engine, GenerationStats, SamplingParams
from volley.files import REFERENCE
from volley.models.targets.diffusion import load_target
from volley.prompts import load_prompts

WAYS: dict[str, dict[str, Any]] = {
    "1 pass": {},
    "2 passes": {"denoising_steps": 2},
    "2 passes, above 0.9": {"denoising_steps": 2, "denoising_threshold": 0.9},
    "2 passes, above 0.5": {"denoising_steps": 2, "denoising_threshold": 0.5},
    "4 passes": {"denoising_steps": 4},
    "4 passes, above 0.5": {"denoising_steps": 4, "denoising_threshold": 0.5},
}


@dataclass
class Row:
    engine: Engine
    stats: list[GenerationStats] = field(default_factory=list)
    looks: int = 0
    """Draft passes."""

    @property
    def tau(self) -> float:
        lengths = [length for stats in self.stats for length in stats.accepted_lengths]
        return sum(lengths) / len(lengths)

    @property
    def looks_per_cycle(self) -> float:
        return self.looks / sum(len(stats.accepted_lengths) for stats in self.stats)


def make_rows(options: argparse.Namespace) -> dict[str, Row]:
    target = load_target(options.target, getattr(torch, options.dtype), "cpu")
    rows = {}
    for name, folder in (pair.split("=", 1) for pair in options.drafter):
        for way, settings in WAYS.items():
            engine = Engine.from_pretrained(
                target, folder, policy="fixed", num_pages=100, prefix_caching=False, **settings
            )
            rows[f"{name}, {way}"] = row = Row(engine)
            count_looks(row)
    return rows


def count_looks(row: Row) -> None:
    """Count the drafter's passes over blocks."""
    model: Any = row.engine.draft_model
    states = model.states

    def counted(*args: Any) -> Any:
        row.looks += 1
        return states(*args)

    model.states = counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(REFERENCE / "target"))
    parser.add_argument("--drafter", action="append", help="NAME=FOLDER; may be repeated")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    options.drafter = options.drafter or [f"bundled={REFERENCE / 'drafter-dflash'}"]
    torch.set_num_threads(options.threads)
    rows = make_rows(options)
    params = SamplingParams(max_tokens=options.max_tokens)
    conversations = load_prompts(options.prompts)[: options.limit]
    for place, conversation in enumerate([conversations[0], *conversations]):
        chat = list(conversation.messages)
        for row in rows.values():
            (result,) = row.engine.generate([chat], params)
            if place:
                row.stats.append(result.stats)
            else:  # it was for warming up
                row.looks = 0
    first, *_ = rows.values()
    print("| drafter, way | τ | draft passes a cycle | tokens/s, ratio to the first (quartiles) |\n|---|---|---|---|")
    for name, row in rows.items():
        pairs = zip(row.stats, first.stats, strict=True)
        ratios = [own.decode_tokens_per_second / one.decode_tokens_per_second for own, one in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"| {name} | {row.tau:.2f} | {row.looks_per_cycle:.2f} | {middle:.2f} ({low:.2f}–{high:.2f}) |")


if __name__ == "__main__":
    main()
