"""τ and speed by how a drafter's weights are kept: bf16, or int8 and int4 codes of it.

    python benchmarks/draft_weights.py --prompts report.jsonl --limit 120
    python benchmarks/draft_weights.py --pair runs/pair-0.6b --limit 0

Answers are the target's in every row, so only what is accepted and what a draft takes can differ. τ is of chains of the whole
block, without copies. Milliseconds are of a draft of the block's positions for one request, and of the target's pass over them,
each kind in turn within a round.
"""

import argparse
import statistics
from collections import defaultdict
from pathlib import Path

import torch

from volley import Engine, SamplingParams
from volley.files import REFERENCE
from volley.prompts import load_prompts
from volley.proposers.block import BlockProposer

ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, default=REFERENCE, help="folder of target and drafter")
    parser.add_argument("--prompts", help="JSONL; held-out prompts that chose nothing")
    parser.add_argument("--limit", type=int, default=120, help="prompts; 0 measures times alone")
    parser.add_argument("--kinds", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target, drafter = options.pair / "target", options.pair / "drafter"
    engines = {
        kind: Engine.from_pretrained(target, drafter=drafter, draft_weights=kind, policy="fixed")
        for kind in options.kinds
    }
    chats = [list(chat.messages) for chat in load_prompts(options.prompts)[: options.limit]] if options.limit else []
    print("| draft weights | τ at T = " + " | at ".join(f"{t:g}" for t in options.temperatures) + " |")
    print("|---|" + "---|" * len(options.temperatures))
    for kind, engine in engines.items() if chats else ():
        found = []
        for temperature in options.temperatures:
            params = SamplingParams(temperature=temperature, max_tokens=options.max_tokens)
            lengths = [n for result in engine.generate(chats, params) for n in result.stats.accepted_lengths]
            found.append(f"{sum(lengths) / len(lengths):.3f} ({len(lengths)} cycles)")
        print(f"| {kind} | " + " | ".join(found) + " |", flush=True)
    seconds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(ROUNDS):
        for kind, engine in engines.items():
            assert isinstance(engine.proposer, BlockProposer)
            size = engine.proposer.block_size
            seconds[kind].append((engine.proposer.seconds(size, 1), engine.runner.seconds(size, 1)))
    print("\n| draft weights | draft, ms | verification, ms | share |\n|---|---|---|---|")
    for kind, rounds in seconds.items():
        draft, verification = (1000 * statistics.median(part) for part in zip(*rounds, strict=True))
        share = statistics.median(own / other for own, other in rounds)
        print(f"| {kind} | {draft:.2f} | {verification:.2f} | {share:.3f} |")


if __name__ == "__main__":
    main()
