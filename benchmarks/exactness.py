"""Exactness: greedy tokens of every schedule against plain decoding of the same weights, one prompt at a time.

    python -m benchmarks.exactness --data-dir DIR --tokens 10000 [--weights bf16,int8,int4]
    python -m benchmarks.exactness --data-dir DIR --target MODEL.gguf --drafter none --weights auto --json RECORD

Answers go on after the end token, 256 tokens each, so every row of the table compares the same number of tokens. A token counts
as different if it is not plain decoding's at its place; all after the first one do, in that answer. Exits with 1 if any differs.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.llama_cpp import circumstances
from volley import Engine, SamplingParams
from volley.engine.engine import REFERENCE
from volley.files import write_atomically
from volley.native import TargetWeights
from volley.prompts import load_prompts

DATASETS = ("gsm8k", "humaneval", "mt-bench")
LENGTH = 256
SETTINGS: dict[str, dict[str, Any]] = {
    "plain, 8 at once": {"block_size": 1, "max_running": 8},
    "plain, all at once": {"block_size": 1},
    "blocks of 4, one at a time": {"block_size": 4, "max_running": 1},
    "the drafter's block, all at once": {"policy": "fixed"},
    "trees of 24, 8 at once": {"policy": "fixed", "tree_nodes": 24, "max_running": 8},
    "prompt chunks of 16, 4 at once": {"policy": "fixed", "max_batch_tokens": 16, "max_running": 4},
    "pool too small: preemption": {"policy": "fixed", "num_pages": 120},
    "goodput (the default), 8 at once": {"max_running": 8},
    "goodput, every prompt a prefix hit": {"twice": True},
}


def answers(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], int, int, float]:
    """Tokens, preemptions, cached prompt tokens, τ."""
    results = list(engine.generate(prompts, SamplingParams(max_tokens=LENGTH, ignore_eos=True)))
    engine.check_integrity()
    stats = [result.stats for result in results]
    lengths = [length for one in stats for length in one.accepted_lengths]
    tau = sum(lengths) / max(1, len(lengths))
    return (
        [result.token_ids for result in results],
        sum(one.preemptions for one in stats),
        sum(one.cached_tokens for one in stats),
        tau,
    )


def differing(found: list[list[int]], expected: list[list[int]]) -> int:
    """Tokens that are not the expected ones at their place, all answers together."""
    count = 0
    for one, other in zip(found, expected, strict=True):
        assert len(one) == len(other), "every answer has the same length"
        count += sum(a != b for a, b in zip(one, other, strict=True))
    return count


def compare(pair: Engine, weights: str, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Print and return a row for each setting, without a drafter for each that needs none."""
    alone = Engine(pair.target, prefix_caching=False, max_running=1, block_size=1)
    expected = answers(alone, prompts)[0]
    total = sum(map(len, expected))
    rows = []
    for name, setting in SETTINGS.items():
        options = dict(setting)
        if pair.drafter is None and ("policy" in options or options.get("block_size", 1) > 1):
            continue
        twice = options.pop("twice", False)
        engine = Engine(pair.target, pair.drafter, exact=True, **options)
        if twice:
            answers(engine, prompts)
        found, preemptions, cached, tau = answers(engine, prompts)
        count = differing(found, expected)
        print(f"| {weights} | {name} | {count} of {total:,} | {preemptions} | {cached} | {tau:.2f} |", flush=True)
        rows.append({"weights": weights, "schedule": name, "differ": count, "tokens": total, "tau": round(tau, 2)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder with the datasets' files; without it the hub")
    parser.add_argument("--target", default=str(REFERENCE / "target"))
    parser.add_argument("--drafter", default=str(REFERENCE / "drafter"))
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--skip-prompts", type=int, default=40)
    parser.add_argument("--weights", default="bf16,int8,int4")
    parser.add_argument("--json", type=Path, help="record")
    options = parser.parse_args()
    about = circumstances(options)
    about["options"] = {
        "target": Path(options.target).name,
        "drafter": Path(options.drafter).name,
        "tokens": options.tokens,
    }
    share = -(-options.tokens // LENGTH // len(DATASETS)) + 1
    chats = [
        chat
        for name in DATASETS
        for chat in load_prompts(name, options.data_dir, limit=options.skip_prompts + share)[options.skip_prompts :]
    ]
    chats = chats[: -(-options.tokens // LENGTH)]
    print(
        "| weights | schedule | tokens that differ | preemptions | cached prompt tokens | τ |\n|---|---|---|---|---|---|"
    )
    rows: list[dict[str, Any]] = []
    kinds: list[TargetWeights] = options.weights.split(",")
    for kind in kinds:
        drafter = None if options.drafter == "none" else options.drafter
        pair = Engine.from_pretrained(options.target, drafter, weights=kind)
        prompts = [pair.encode(list(chat.messages)) for chat in chats]
        rows += compare(pair, kind, prompts)
    if options.json:
        write_atomically(options.json, json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    sys.exit(1 if any(row["differ"] for row in rows) else 0)


if __name__ == "__main__":
    main()
