"""Turns of agents that share a long beginning: seconds of every turn with speculation and without, prefixes cached.

    python benchmarks/agent_trace.py DIR/peps.jsonl --agents 3 --turns 6

Each agent has the same instructions, then calls a tool turn after turn: a passage of text comes back, and the model answers. A
turn's prompt is everything before it, which the prefix cache holds. Both engines run on the same target, take turns and follow
the same text, that of plain decoding; greedy answers must be equal. The table has a row a turn: tokens of the prompt, those of
them found in the cache by each engine, and the median of plain seconds ÷ volley's over agents and repeats, with the extremes.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from volley import Engine, GenerationResult, SamplingParams, Target
from volley.files import REFERENCE, write_atomically

CALL = "<tool>search</tool>"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSONL with a `text` in each row")
    parser.add_argument("--out", type=Path, default=Path("bench/agent-trace.json"))
    parser.add_argument("--target", default=str(REFERENCE / "target"))
    parser.add_argument("--drafter", default=str(REFERENCE / "drafter"))
    parser.add_argument("--policy", default="goodput")
    parser.add_argument("--agents", type=int, default=3)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--instructions", type=int, default=400, help="tokens that all agents share")
    parser.add_argument("--tool-tokens", type=int, default=120, help="tokens that a tool returns")
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=None)
    return parser.parse_args()


def pieces(engine: Engine, file: Path, sizes: Sequence[int]) -> list[str]:
    """Passages of so many tokens each, one after the other in the file."""
    with file.open(encoding="utf-8") as lines:
        tokens = engine.encode(
            "\n\n".join(json.loads(line)["text"] for line, _ in zip(lines, range(400), strict=False))
        )
    found, at = [], 0
    for size in sizes:
        found.append(engine.tokenizer.decode(tokens[at : at + size]))
        at += size
    return found


def turn(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[float, GenerationResult]:
    started = time.perf_counter()
    (result,) = engine.generate([prompt], params)
    return time.perf_counter() - started, result


def main() -> None:
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    target = Target.from_pretrained(arguments.target, getattr(torch, arguments.dtype))
    engines = {
        "plain": Engine(target, block_size=1),
        "volley": Engine.from_pretrained(target, arguments.drafter, policy=arguments.policy),
    }
    sizes = [arguments.instructions] + [arguments.tool_tokens] * (arguments.agents * arguments.turns)
    shared, *passages = pieces(engines["plain"], arguments.file, sizes)
    params = SamplingParams(max_tokens=arguments.max_tokens, ignore_eos=True)
    turns: list[list[dict[str, Any]]] = [[] for _ in range(arguments.turns)]
    for engine in engines.values():
        turn(engine, [1, 2, 3], params)
    for _ in range(arguments.repeats):
        for engine in engines.values():
            engine.reset_prefix_cache()
        for agent in range(arguments.agents):
            chat = [{"role": "user", "content": shared}, {"role": "assistant", "content": CALL}]
            for number in range(arguments.turns):
                chat.append({"role": "user", "content": passages[agent * arguments.turns + number]})
                prompt = engines["plain"].encode(chat)
                order = list(engines)[:: 1 if (agent + number) % 2 else -1]
                found = {name: turn(engines[name], prompt, params) for name in order}
                (plain, answer), (seconds, other) = found["plain"], found["volley"]
                assert other.token_ids == answer.token_ids, "not lossless"
                turns[number].append(
                    {
                        "agent": agent,
                        "prompt": len(prompt),
                        "cached": {name: result.stats.cached_tokens for name, (_, result) in found.items()},
                        "seconds": {"plain": plain, "volley": seconds},
                        "tau": other.stats.acceptance_length,
                    }
                )
                chat.append({"role": "assistant", "content": answer.text})
    write_atomically(arguments.out, json.dumps(turns, indent=1) + "\n")
    print(
        "| turn | prompt | cached, plain | cached, volley | τ | plain s | plain ÷ volley |\n|---|---|---|---|---|---|---|"
    )
    for number, rows in enumerate(turns, 1):
        ratios = [row["seconds"]["plain"] / row["seconds"]["volley"] for row in rows]
        cached = [median(row["cached"][name] for row in rows) for name in ("plain", "volley")]
        figures = [median(row["prompt"] for row in rows), *cached, median(row["tau"] for row in rows)]
        seconds = median(row["seconds"]["plain"] for row in rows)
        print(
            f"| {number} | {figures[0]:.0f} | {figures[1]:.0f} | {figures[2]:.0f} | {figures[3]:.2f} | {seconds:.2f} | "
            f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}) |"
        )


if __name__ == "__main__":
    main()
