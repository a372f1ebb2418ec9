"""Quality over passes of a diffusion language model: a row for each setting, beside its own other modes.

    python benchmarks/diffusion_curve.py --target path/to/model --prompts prompts.jsonl --thresholds 0.5 0.7 0.9 0.99

``prompts.jsonl`` has ``{"prompt": "…"}`` in each line. *Nats* are per token of the texts written, under the model's own
autoregressive mode. *Distinct* is the share of different pairs of tokens; a low one means that the texts repeat themselves, which
makes their nats low too. DiffusionGemma has no threshold: give ``--steps``.

With ``--server http://host:8000`` that server answers, all prompts at once, and the model in ``--target`` only scores its texts.
"""

import argparse
import json
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
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


Answers = list[tuple[list[int], float]]
"""Token ids of each, and its tokens per pass."""
Answer = Callable[[Sequence[str], SamplingParams], Answers]


def by(engine: Engine) -> Answer:
    def answer(prompts: Sequence[str], params: SamplingParams) -> Answers:
        results: list[GenerationResult] = list(engine.generate(prompts, params))
        return [(result.token_ids, result.stats.tokens_per_pass) for result in results]

    return answer


def by_server(url: str, engine: Engine) -> Answer:
    """``engine`` has the tokenizer, since a server says texts."""

    def ask(prompt: str, params: SamplingParams) -> tuple[list[int], float]:
        assert params.diffusion is not None
        said = {name: value for name, value in asdict(params.diffusion).items() if value is not None}
        body = {"prompt": prompt, "diffusion": said, "ignore_eos": params.ignore_eos}
        body |= {name: getattr(params, name) for name in ("max_tokens", "temperature", "seed")}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as response:
            found = json.load(response)
        details = found["usage"]["completion_tokens_details"]
        tokens = engine.tokenizer(found["choices"][0]["text"], add_special_tokens=False)["input_ids"]
        return list(tokens), details.get("tokens_per_pass", 1.0)

    def answer(prompts: Sequence[str], params: SamplingParams) -> Answers:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: ask(prompt, params), prompts))

    return answer


def row(engine: Engine, answer: Answer, name: str, prompts: Sequence[str], params: SamplingParams) -> str:
    started = time.perf_counter()
    found = answer(prompts, params)
    seconds = time.perf_counter() - started
    answers = [tokens for tokens, _ in found]
    scores = [nats(engine, engine.encode(p), own) for p, own in zip(prompts, answers, strict=True) if own]
    passes = sum(per_pass for _, per_pass in found) / len(found)
    speed, mean = sum(map(len, answers)) / seconds, sum(scores) / max(1, len(scores))
    return f"| {name} | {passes:.2f} | {speed:.0f} | {mean:.2f} | {distinct(answers):.2f} |"


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
    parser.add_argument("--server", help="URL of a server of the same model, which answers instead")
    options = parser.parse_args()
    lines = options.prompts.read_text(encoding="utf-8").splitlines()[: options.limit]
    prompts = [json.loads(line)["prompt"] for line in lines]
    engine = Engine.from_pretrained(options.target, dtype=getattr(torch, options.dtype), prefix_caching=False)
    answer = by(engine) if options.server is None else by_server(options.server, engine)

    def params(**own: object) -> SamplingParams:
        diffusion = DiffusionParams(**own)  # type: ignore[arg-type]
        return SamplingParams(
            temperature=options.temperature, seed=0, max_tokens=options.max_tokens, ignore_eos=True, diffusion=diffusion
        )

    print("| | tokens per pass | tokens/s | nats per token | distinct |\n|---|---|---|---|---|")
    for mode in ("autoregressive", "self"):
        print(row(engine, answer, mode, prompts, params(mode=mode)), flush=True)
    for length in options.lengths:
        canvas = f", canvas {length}" if length else ""
        for steps in options.steps:
            print(
                row(engine, answer, f"{steps} steps{canvas}", prompts, params(canvas_length=length, max_steps=steps)),
                flush=True,
            )
        for threshold in [] if options.steps else options.thresholds:
            own = params(canvas_length=length, threshold=threshold)
            print(row(engine, answer, f"threshold {threshold:g}{canvas}", prompts, own), flush=True)


if __name__ == "__main__":
    main()
