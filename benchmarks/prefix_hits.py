"""Whether a prompt found in the prefix cache is drafted for as well as one that was read: τ of the same prompts, cold and warm.

    python benchmarks/prefix_hits.py --data-dir DIR --num-prompts 24 --max-tokens 64

Every prompt is answered twice, one after the other, with nothing cached before the first time; with and without a draft window,
in fp32 and in bf16. Prints a Markdown table, a row as soon as it is complete.
"""

import argparse
from pathlib import Path

import torch

from volley import Engine, SamplingParams
from volley.prompts import load_prompts

DATASETS = ("gsm8k", "humaneval", "mt-bench")


def mean(lengths: list[list[int]]) -> float:
    return sum(map(sum, lengths)) / sum(map(len, lengths))


def row(engine: Engine, prompts: list[list[int]], params: SamplingParams, names: str) -> str:
    cold: list[list[int]] = []
    warm: list[list[int]] = []
    cached = same = 0
    for prompt in prompts:
        engine.reset_prefix_cache()
        (first,), (second,) = (list(engine.generate([prompt], params)) for _ in range(2))
        cold.append(first.stats.accepted_lengths)
        warm.append(second.stats.accepted_lengths)
        cached += second.stats.cached_tokens
        same += first.token_ids == second.token_ids
    share = cached / sum(map(len, prompts))
    change = mean(warm) / mean(cold) - 1
    return f"| {names} | {share:.0%} | {mean(cold):.3f} | {mean(warm):.3f} | {change:+.2%} | {same} of {len(prompts)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder with the datasets' files; without it the hub")
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--windows", default="0,64", help="draft windows; 0 is none")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    share = -(-options.num_prompts // len(DATASETS))
    chats = [chat for name in DATASETS for chat in load_prompts(name, options.data_dir, limit=share)]
    params = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, seed=0)
    print("| dtype | draft window | found in the cache | τ cold | τ warm | change | same answer |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for dtype in ("float32", "bfloat16"):
        for window in map(int, options.windows.split(",")):
            engine = Engine.from_pretrained(
                dtype=getattr(torch, dtype), policy="fixed", draft_window=window, num_pages=256
            )
            prompts = [engine.encode(list(chat.messages)) for chat in chats]
            print(row(engine, prompts, params, f"{dtype} | {window or 'none'}"), flush=True)


if __name__ == "__main__":
    main()
