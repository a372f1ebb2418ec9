"""Ways to decode a model of both kinds, and the bundled pair, in one table: tokens per pass, speed, and whether tokens stay.

    python benchmarks/self_speculation.py --prompts held-out.jsonl --limit 32

Every prompt is answered greedily at batch 1 in every way, in turn. Speeds are output tokens per second of the whole request, each
over that of the same weights writing one token at a time for the same prompt. *Tokens per pass* counts the target's passes behind
the prompt; a drafter's own are in its speed only. *The same* counts answers whose tokens are those of plain decoding, and of the
others those that part where the target's own logits tie; text that is denoised (``threshold``, which DiffusionGemma has not) is
another text. Weights are fp32 unless ``--dtype`` says otherwise.
"""

import argparse
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import torch

from volley import DiffusionParams, Engine, GenerationResult, SamplingParams
from volley.bench.ties import is_tie
from volley.prompts import load_prompts

PLAIN = "one token at a time"


@dataclass
class Way:
    name: str
    engine: Engine
    diffusion: DiffusionParams | None = None
    results: list[GenerationResult] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)

    def answer(self, prompt: list[int], params: SamplingParams) -> GenerationResult:
        self.engine.reset_prefix_cache()
        own = SamplingParams(max_tokens=params.max_tokens, ignore_eos=params.ignore_eos, diffusion=self.diffusion)
        (result,) = self.engine.generate([prompt], own)
        return result

    @property
    def tokens_per_pass(self) -> float:
        tokens = sum(result.stats.output_tokens for result in self.results)
        return tokens / sum(result.stats.output_tokens / result.stats.tokens_per_pass for result in self.results)


def speed(result: GenerationResult) -> float:
    return result.stats.output_tokens / result.stats.total_seconds


def ways_of(options: argparse.Namespace) -> dict[str, list[Way]]:
    """By model, plain decoding first."""
    dtype = getattr(torch, options.dtype)
    both = Engine.from_pretrained(options.diffusion, dtype=dtype)
    pair = Engine.from_pretrained(options.target, drafter=options.drafter, dtype=dtype)
    chosen = [DiffusionParams(mode="self", max_steps=steps) for steps in (None, *options.steps)]
    names = ["self", *(f"self, {steps} pass{'es' * (steps > 1)} a draft" for steps in options.steps)]
    own = [Way(PLAIN, both, DiffusionParams(mode="autoregressive"))]
    own += [Way(name, both, settings) for name, settings in zip(names, chosen, strict=True)]
    if both.target.diffusion and both.target.diffusion.mask_token_id is not None:  # others read no threshold
        denoised = {value: DiffusionParams(mode="diffusion", threshold=value) for value in options.thresholds}
        own += [Way(f"threshold {value:g}", both, params) for value, params in denoised.items()]
    others = [Way(PLAIN, Engine(pair.target, block_size=1)), Way("DFlash drafter", pair)]
    return {"diffusion model": own, "target": others}


def agreement(way: Way, plain: Way) -> str:
    pairs = zip(way.prompts, way.results, plain.results, strict=True)
    differ = [(prompt, own.token_ids, one.token_ids) for prompt, own, one in pairs if own.token_ids != one.token_ids]
    said = f"{len(way.results) - len(differ)} of {len(way.results)}"
    is_denoised = way.diffusion is not None and way.diffusion.mode == "diffusion"
    if differ and not is_denoised:
        dtype = plain.engine.target.dtype
        said += f", {sum(is_tie(plain.engine, *answers, dtype) for answers in differ)} ties"
    return said


def row(model: str, way: Way, plain: Way) -> str:
    ratios = [speed(own) / speed(one) for own, one in zip(way.results, plain.results, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    columns = [
        model,
        way.name,
        f"{way.tokens_per_pass:.2f}",
        f"{statistics.median(map(speed, way.results)):.1f}",
        f"{middle:.2f} ({low:.2f}–{high:.2f})",
        agreement(way, plain),
    ]
    return f"| {' | '.join(columns)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--diffusion", default="reference-diffusion", help="model of both kinds")
    parser.add_argument("--target", help="of the pair beside it; by default the bundled one")
    parser.add_argument("--drafter", default="reference-dflash")
    parser.add_argument("--prompts", type=Path, required=True, help="none that chose a setting")
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--steps", type=int, nargs="*", default=[1, 2, 4], help="fixed passes a draft, beside the choice"
    )
    parser.add_argument("--thresholds", type=float, nargs="*", default=[0.5, 0.7, 0.9])
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ways = ways_of(options)
    params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
    conversations = load_prompts(options.prompts)[: options.limit]
    for place, conversation in enumerate([conversations[0], *conversations]):
        for own in ways.values():
            prompt = own[0].engine.encode(list(conversation.messages))
            for way in own:
                result = way.answer(prompt, params)
                if place:  # the first is for warming up
                    way.results.append(result)
                    way.prompts.append(prompt)
    print("| model | way | tokens per pass | tokens/s | ratio (quartiles) | the same |\n|---|---|---|---|---|---|")
    for model, own in ways.items():
        for way in own:
            print(row(model, way, own[0]))


if __name__ == "__main__":
    main()
