"""What a drafter costs a step in which nothing is drafted: CPU time of such steps, beside those of an engine without a drafter.

    python benchmarks/draft_upkeep.py --data-dir DIR

Both engines share a target and take turns on the same prompts. CPU time of the stepping thread, so that other work on the machine
counts little; one thread.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from volley import Engine, SamplingParams
from volley.engine.states import DraftContext
from volley.prompts import load_prompts

_METHODS = ("keep", "prepare")


class Spent:
    """CPU seconds of some methods of one object."""

    def __init__(self, owner: Any, *names: str) -> None:
        self.seconds = 0.0
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.thread_time()
            found = inner(*args)
            self.seconds += time.thread_time() - started
            return found

        return timed


def step_seconds(engine: Engine, prompts: list[Any], tokens: int) -> tuple[float, float]:
    """CPU seconds of a step that decodes only, prompts read before, and of the drafter's K/V in it."""
    contexts = [state for state in engine.sequences.states if isinstance(state, DraftContext)]
    upkeep = [Spent(context, *_METHODS) for context in contexts]
    engine.reset_prefix_cache()
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
    whole = own = count = 0.0
    while engine.has_work:
        scheduler = engine.scheduler
        decodes = not scheduler.waiting and all(request.is_decoding for request in scheduler.running)
        before, started = sum(spent.seconds for spent in upkeep), time.thread_time()
        engine.step()
        if decodes:
            whole, own = whole + time.thread_time() - started, own + sum(spent.seconds for spent in upkeep) - before
            count += 1
    for context in contexts:
        for name in _METHODS:
            delattr(context, name)  # the wrapper; the method is the class's
    return whole / count, own / count


def row(at_rest: Engine, plain: Engine, prompts: list[Any], options: argparse.Namespace) -> str:
    """Medians over rounds."""
    ratios, shares, seconds = list[float](), list[float](), list[float]()
    for _ in range(options.rounds):
        whole, own = step_seconds(at_rest, prompts, options.tokens)
        without, _ = step_seconds(plain, prompts, options.tokens)
        ratios.append(whole / without)
        shares.append(own / whole)
        seconds.append(without)
    spread = f"{median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f})"
    return f"{len(prompts)} | {1000 * median(seconds):.2f} | {spread} | {median(shares):.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with gsm8k_test.jsonl")
    parser.add_argument("--target", type=Path, help="default: the bundled pair")
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--policy", default="fixed:1", help="fixed:1 drafts nothing; goodput tries drafts now and then")
    parser.add_argument("--at-once", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = {} if options.target is None else {"target": options.target, "drafter": options.drafter}
    at_rest = Engine.from_pretrained(**models, dtype=getattr(torch, options.dtype), policy=options.policy)
    plain = Engine(at_rest.target, block_size=1)
    prompts = [list(prompt.messages) for prompt in load_prompts("gsm8k", options.data_dir, 80)[40:]]
    print("| at once | ms of a step without a drafter | with one, ratio (range) | share of the drafter's K/V |")
    print("|---|---|---|---|")
    for count in map(int, options.at_once.split(",")):
        print(f"| {row(at_rest, plain, (prompts * count)[:count], options)} |", flush=True)


if __name__ == "__main__":
    main()
