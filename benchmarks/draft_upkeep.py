"""What a drafter costs a step in which nothing is drafted: CPU time that goes to its K/V, as a share of the step.

    python benchmarks/draft_upkeep.py --data-dir DIR

CPU time of the stepping thread, so that other work on the machine counts little; one thread.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from volley import Engine, SamplingParams
from volley.engine.states import DraftContext
from volley.prompts import load_prompts


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


def shares(engine: Engine, prompts: list[Any], tokens: int) -> str:
    """Milliseconds of a step that decodes only, of the drafter's K/V in it, and its share there and where prompts are read."""
    (context,) = (state for state in engine.sequences.states if isinstance(state, DraftContext))
    names = ("keep", "prepare")
    spent, sums = Spent(context, *names), {True: [0.0, 0.0, 0], False: [0.0, 0.0, 0]}
    engine.reset_prefix_cache()
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
    while engine.has_work:
        scheduler = engine.scheduler
        decodes = not scheduler.waiting and all(request.is_decoding for request in scheduler.running)
        before, started = spent.seconds, time.thread_time()
        engine.step()
        own = sums[decodes]
        own[0], own[1], own[2] = own[0] + time.thread_time() - started, own[1] + spent.seconds - before, own[2] + 1
    for name in names:
        delattr(context, name)
    step, upkeep, count = sums[True]
    read, reading = sums[False][:2]
    return f"{1000 * step / count:.2f} | {1000 * upkeep / count:.3f} | {upkeep / step:.2%} | {reading / read:.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with gsm8k_test.jsonl")
    parser.add_argument("--target", type=Path, help="default: the bundled pair")
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--at-once", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = {} if options.target is None else {"target": options.target, "drafter": options.drafter}
    engine = Engine.from_pretrained(**models, dtype=getattr(torch, options.dtype), block_size=1)
    prompts = [list(prompt.messages) for prompt in load_prompts("gsm8k", options.data_dir, 80)[40:]]
    print(
        "| at once | ms of a step | ms of the drafter's K/V | share | share of steps that read |\n|---|---|---|---|---|"
    )
    for count in map(int, options.at_once.split(",")):
        for _ in range(options.rounds):
            print(f"| {count} | {shares(engine, (prompts * count)[:count], options.tokens)} |", flush=True)


if __name__ == "__main__":
    main()
