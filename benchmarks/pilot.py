"""BlockPilot's ablations for a pair: labels, input, radius, layers and width of the predictor, its time and its memory.

    python -m benchmarks.pilot --prompts builtin --labels labels.safetensors --json FILE
    python -m benchmarks.pilot --target MODEL.gguf --drafter smollm2-135m --block-size 4 --prompts prompts.jsonl --json FILE

Every prompt is answered once with each size of the largest radius; a smaller radius takes its columns. ``paper`` is the
predictor as the paper has it: the raw logits, two linear maps of width 2,048, radius 2, and the size with the longest
acceptance as a hard label. Others change one thing. ``volley`` is what ``volley pilot`` trains. Speeds are of prompts that were
held out, by cycles rehearsed in seconds of the CPU, against the best fixed block of the same sizes.
"""

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.llama_cpp import circumstances
from volley import Engine
from volley.models.drafters.pilot import PilotConfig, PilotInput
from volley.models.layers.fingerprint import drafter_fingerprint
from volley.models.targets import rehearsal
from volley.train.options import PilotOptions
from volley.train.pilot import Labelled, PilotOutcome, cycle_seconds, draft_up_to, fit, inputs_of, label_all, split


@dataclass(frozen=True)
class Way:
    """A predictor and its labels."""

    input: PilotInput = "logits"
    layers: int = 2
    width: int = 2048
    radius: int = 2
    is_hard: bool = True
    """Label a request by the size with the longest acceptance, instead of by how near each size comes to the fastest."""


WAYS = {
    "paper": Way(),
    "softmax": Way(input="softmax"),
    "normalised": Way(input="normalised"),
    "1 layer": Way(layers=1),
    "3 layers": Way(layers=3),
    "width 1,024": Way(width=1024),
    "width 4,096": Way(width=4096),
    "radius 1": Way(radius=1),
    "radius 3": Way(radius=3),
    "soft labels": Way(is_hard=False),
    "volley": Way(input="top", is_hard=False),
}


def columns(examples: Labelled, kept: Tensor) -> Labelled:
    """Return what was measured with some of the block sizes."""
    return replace(examples, tokens=examples.tokens[:, kept], cycles=examples.cycles[:, kept])


def labels_of(examples: Labelled, seconds: Tensor, *, is_hard: bool) -> Tensor:
    """Return rates ``[N, S]`` to learn from; for hard labels those of all sizes but the one with the longest acceptance are 0."""
    if not is_hard:
        return examples.rates(seconds)
    longest = (examples.tokens / examples.cycles).argmax(dim=1)
    return torch.nn.functional.one_hot(longest, len(seconds)).double()


def compare(engine: Engine, options: PilotOptions, ways: dict[str, Way]) -> dict[str, dict[str, Any]]:
    """Return for each way its speed by that of the best fixed block, what is possible, and what the predictor costs.

    ``fastest`` is the share of held-out requests that each block size is the fastest for.
    """
    assert engine.drafter is not None
    sizes = options.block_sizes(engine.drafter.config.block_size)
    middle = options.block_size or engine.drafter.config.block_size
    draft_up_to(engine, sizes[-1])
    examples = label_all(
        engine, options, sizes, lambda done, total: print(f"{done}/{total} prompts labelled", flush=True)
    )
    with mock.patch.object(rehearsal.time, "perf_counter", time.process_time):
        seconds = cycle_seconds(engine, sizes, options.concurrency)
    found = dict[str, dict[str, Any]]()
    for name, way in ways.items():
        kept = torch.tensor([place for place, size in enumerate(sizes) if abs(size - middle) <= way.radius])
        own = tuple(sizes[place] for place in kept.tolist())
        held, learnt = split(columns(examples, kept), options)
        config = PilotConfig(
            drafter=drafter_fingerprint(engine.drafter),
            input=way.input,
            block_sizes=own,
            width=way.width,
            layers=way.layers,
        )
        net = fit(config, engine.drafter, learnt, labels_of(learnt, seconds[kept], is_hard=way.is_hard), options)
        inputs = inputs_of(config, held)
        outcome = PilotOutcome.of(net(inputs).argmax(dim=1), held, seconds[kept], own)
        size, best = max(outcome.fixed.items(), key=lambda pair: pair[1])
        fastest = held.rates(seconds[kept]).argmax(dim=1).bincount(minlength=len(own)) / len(held)
        weights = sum(weight.numel() * weight.element_size() for weight in net.parameters())
        found[name] = {
            "speed": outcome.pilot / best,
            "possible": outcome.oracle / best,
            "agreement": outcome.agreement,
            "milliseconds": 1000 * rehearsal.fastest(lambda net=net, one=inputs[:1]: net(one), torch.device("cpu")),
            "mebibytes": weights / 2**20,
            "best_fixed": size,
            "fastest": {str(one): round(share, 3) for one, share in zip(own, fastest.tolist(), strict=True)},
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="by default the bundled pair")
    parser.add_argument("--drafter")
    parser.add_argument("--prompts", nargs="+", default=["builtin"])
    parser.add_argument("--limit", type=int)
    parser.add_argument("--block-size", type=int, help="middle of the sizes; by default the drafter's own")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--labels", type=Path, help="file that keeps what was measured")
    parser.add_argument("--json", type=Path, help="file for the record")
    given = parser.parse_args()
    pair = {} if given.target is None else {"target": given.target, "drafter": given.drafter}
    torch.set_num_threads(given.threads)
    own = {"limit": given.limit, "max_tokens": given.max_tokens, "labels": given.labels, "block_size": given.block_size}
    options = PilotOptions(prompts=tuple(given.prompts), radius=max(way.radius for way in WAYS.values()), **own)
    found = compare(Engine.from_pretrained(**pair), options, WAYS)
    print("| predictor | by the best fixed block | possible | finds the best | ms | MiB |\n|---|---|---|---|---|---|")
    for name, row in found.items():
        cells = f"{row['speed']:.3f} | {row['possible']:.3f} | {row['agreement']:.0%} | {row['milliseconds']:.2f}"
        print(f"| {name} | {cells} | {row['mebibytes']:.1f} |")
    if given.json is not None:
        about = circumstances(given)
        about["options"] = {name: getattr(given, name) for name in ("block_size", "max_tokens", "threads")}
        given.json.write_text(json.dumps({"about": about, "rows": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
