"""Quality over passes of a diffusion language model: a row for each setting, beside its own other modes.

    python benchmarks/diffusion_curve.py --target path/to/model --prompts prompts.jsonl --thresholds 0.5 0.7 0.9 0.99

``prompts.jsonl`` has ``{"prompt": "…"}`` in each line. *Nats* are per token of the texts written, under the model's own
autoregressive mode. *Distinct* is the share of different pairs of tokens; a low one means that the texts repeat themselves, which
makes their nats low too. DiffusionGemma has no threshold: give ``--steps``.
"""

import argparse
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from volley import DiffusionParams, Engine, GenerationResult, SamplingParams


def nats(engine: Engine, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """The mean over the answer of −log p(token | text before), each token by a pass over all before it."""
    text, total = [*prompt, *answer], 0.0
    for end in range(len(prompt), len(text)):
        total -= float(engine.next_logits(text[:end]).log_softmax(dim=-1)[text[end]])
    return total / len(answer)


def distinct(answers: Sequence[Sequence[int]]) -> float:
    pairs = [pair for answer in answers for pair in pairwise(answer)]
    return len(set(pairs)) / max(1, len(pairs))


def row(engine: Engine, name: str, prompts: Sequence[str], params: SamplingParams) -> str:
    started = time.perf_counter()
    results: list[GenerationResult] = list(engine.generate(prompts, params))
    seconds = time.perf_counter() - started
    tokens = sum(result.stats.output_tokens for result in results)
    answers = [result.token_ids for result in results]
    scores = [nats(engine, engine.encode(p), answer) for p, answer in zip(prompts, answers, strict=True)]
    passes = sum(result.stats.tokens_per_pass for result in results) / len(results)
    mean = sum(scores) / len(scores)
    return f"| {name} | {passes:.2f} | {tokens / seconds:.0f} | {mean:.2f} | {distinct(answers):.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=8, help="prompts, the first ones")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.5, 0.7, 0.8, 0.9, 0.99])
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[], help="largest numbers of passes, in place of thresholds"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[None], help="of canvases; by default the checkpoint's"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    lines = options.prompts.read_text(encoding="utf-8").splitlines()[: options.limit]
    prompts = [json.loads(line)["prompt"] for line in lines]
    engine = Engine.from_pretrained(options.target, dtype=getattr(torch, options.dtype), prefix_caching=False)

    def params(**own: object) -> SamplingParams:
        diffusion = DiffusionParams(**own)  # type: ignore[arg-type]
        return SamplingParams(
            temperature=options.temperature, seed=0, max_tokens=options.max_tokens, ignore_eos=True, diffusion=diffusion
        )

    print("| | tokens per pass | tokens/s | nats per token | distinct |\n|---|---|---|---|---|")
    for mode in ("autoregressive", "self"):
        print(row(engine, mode, prompts, params(mode=mode)), flush=True)
    for length in options.lengths:
        canvas = f", canvas {length}" if length else ""
        for steps in options.steps:
            print(
                row(engine, f"{steps} steps{canvas}", prompts, params(canvas_length=length, max_steps=steps)),
                flush=True,
            )
        for threshold in [] if options.steps else options.thresholds:
            own = params(canvas_length=length, threshold=threshold)
            print(row(engine, f"threshold {threshold:g}{canvas}", prompts, own), flush=True)


if __name__ == "__main__":
    main()
