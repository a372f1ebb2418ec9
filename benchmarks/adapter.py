"""An adapter of a drafter for a new workload: trains one and prints τ before and after, on that workload and on others.

    volley collect --prompts workload.jsonl --out responses.jsonl --max-tokens 128 --temperatures 0,0.7
    python benchmarks/adapter.py --data responses.jsonl --workload held-out-workload.jsonl --old held-out.jsonl --out runs/adapter

``--data`` holds the target's responses to prompts like the workload's; the other two are prompt files (``prompt``,
``messages`` or ``turns``) that nothing was trained on. Run again after a Ctrl-C: the training goes on from its checkpoint, and
what was measured is in ``OUT/measured.json``. Requests with and without the adapter are decoded in one batch.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from volley import Engine, SamplingParams
from volley.engine.engine import REFERENCE
from volley.prompts import load_prompts
from volley.train.loop import train
from volley.train.options import TrainConfig

ADAPTERS = (None, "workload")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="responses of the workload, from `volley collect`")
    parser.add_argument("--workload", type=Path, required=True, help="held-out prompts of the workload")
    parser.add_argument("--old", type=Path, required=True, help="held-out prompts of what the drafter was trained for")
    parser.add_argument("--out", type=Path, default=Path("runs/adapter"))
    parser.add_argument("--target", default=str(REFERENCE / "target"))
    parser.add_argument("--drafter", default=str(REFERENCE / "drafter"))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--soft-targets", type=float, default=0.5)
    parser.add_argument("--tokens-per-batch", type=int, default=2048)
    parser.add_argument("--num-prompts", type=int, default=32, help="of each file")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--threads", type=int, default=None)
    return parser.parse_args()


def train_adapter(arguments: argparse.Namespace) -> Path:
    return train(
        TrainConfig(
            target=arguments.target,
            data=(str(arguments.data),),
            out=str(arguments.out),
            init=arguments.drafter,
            lora_rank=arguments.rank,
            learning_rate=arguments.learning_rate,
            soft_targets=arguments.soft_targets,
            tokens_per_batch=arguments.tokens_per_batch,
            max_steps=arguments.steps,
            epochs=1000,
            eval_prompts=0,
            threads=arguments.threads,
        )
    )


def measure(engine: Engine, path: Path, temperature: float, arguments: argparse.Namespace) -> dict[str | None, float]:
    """τ of every adapter on the same prompts, all in one batch."""
    conversations = load_prompts(path)[: arguments.num_prompts]
    prompts = [list(conversation.messages) for conversation in conversations for _ in ADAPTERS]
    params = [
        SamplingParams(temperature=temperature, max_tokens=arguments.max_tokens, seed=index, draft_adapter=adapter)
        for index in range(len(conversations))
        for adapter in ADAPTERS
    ]
    lengths: dict[str | None, list[int]] = {adapter: [] for adapter in ADAPTERS}
    for result, own in zip(engine.generate(prompts, params), params, strict=True):
        lengths[own.draft_adapter] += result.stats.accepted_lengths
    return {adapter: sum(found) / max(1, len(found)) for adapter, found in lengths.items()}


def main() -> None:
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    started = time.monotonic()
    folder = train_adapter(arguments)
    print(f"\nrank {arguments.rank}, {arguments.steps} steps, {time.monotonic() - started:.0f} s in this run\n")
    engine = Engine.from_pretrained(arguments.target, arguments.drafter)
    assert engine.drafter is not None
    engine.block_size = engine.drafter.config.block_size
    engine.load_adapter("workload", folder)
    measured = []
    print("| prompts | T | τ of the drafter | τ with the adapter | ratio |\n|---|---|---|---|---|")
    for name, path in (("workload", arguments.workload), ("old", arguments.old)):
        for temperature in map(float, arguments.temperatures.split(",")):
            before, after = measure(engine, path, temperature, arguments).values()
            print(f"| {name} | {temperature:g} | {before:.3f} | {after:.3f} | {after / before:.3f} |", flush=True)
            measured.append({"prompts": name, "temperature": temperature, "drafter": before, "adapter": after})
            (arguments.out / "measured.json").write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
