"""Quality over passes of a diffusion language model: a row for each setting, beside its own other modes.

    python benchmarks/diffusion_curve.py --target path/to/model --prompts prompts.jsonl --thresholds 0.5 0.7 0.9 0.99

``prompts.jsonl`` has ``{"prompt": "…"}`` or ``{"messages": […]}`` in each line. They go through the chat template, if there is
one; ``--raw`` leaves it out. *Tokens per pass* are all tokens over all passes. *Nats* are per token of the texts written, under
the model's own autoregressive mode, or under another model of the same tokenizer, ``--scorer``; SDAR scores no text, and has no
nats without a scorer. The last row is what a scorer writes that is an autoregressive model. *Distinct* is the share of
different pairs of tokens; a low one means that the texts repeat themselves, which makes their nats low too. DiffusionGemma has
no threshold: give ``--steps``.

All prompts are answered at once, by each setting in turn after a short first round, ``--repeats`` times; tokens per second are
medians and ranges. With ``--server http://host:8000`` that server answers, and the model in ``--target`` only scores its texts.
"""

import argparse
import json
import math
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch

from volley import DiffusionParams, Engine, GenerationResult, SamplingParams
from volley.prompts import load_prompts

AUTOREGRESSIVE = DiffusionParams(mode="autoregressive")


def nats(engine: Engine, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> float:
    """The mean over answers of −log p(token | text before) per token; NaN where ``engine`` does not write causally."""
    if engine.target.diffusion is not None and not engine.target.diffusion.writes_causally:
        return math.nan
    causal = AUTOREGRESSIVE if engine.target.diffusion is not None else None
    read = SamplingParams(max_tokens=0, prompt_logprobs=0, diffusion=causal)
    pairs = [(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True) if answer]
    scores = []
    for (_, answer), result in zip(pairs, engine.generate([p + a for p, a in pairs], read), strict=True):
        assert result.prompt_logprobs is not None
        scores.append(-statistics.fmean(result.prompt_logprobs[-len(answer) :]))
    return statistics.fmean(scores) if scores else math.nan


def distinct(answers: Sequence[Sequence[int]]) -> float:
    pairs = [pair for answer in answers for pair in pairwise(answer)]
    return len(set(pairs)) / max(1, len(pairs))


Answers = list[tuple[list[int], float]]
"""Token ids of each, and its tokens per pass."""
Answer = Callable[[Sequence[list[int]], SamplingParams], Answers]


def by(engine: Engine) -> Answer:
    def answer(prompts: Sequence[list[int]], params: SamplingParams) -> Answers:
        results: list[GenerationResult] = list(engine.generate(prompts, params))
        return [(result.token_ids, result.stats.tokens_per_pass) for result in results]

    return answer


def by_server(url: str) -> Answer:
    """Token ids are asked for: a text need not have the tokens that it was written with."""
    url = url.rstrip("/").removesuffix("/v1")

    def ask(prompt: list[int], params: SamplingParams) -> tuple[list[int], float]:
        assert params.diffusion is not None
        said = {name: value for name, value in asdict(params.diffusion).items() if value is not None}
        body = {"prompt": prompt, "diffusion": said, "ignore_eos": params.ignore_eos, "return_token_ids": True}
        body |= {name: getattr(params, name) for name in ("max_tokens", "temperature", "seed")}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request) as response:
                found = json.load(response)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{request.full_url}: {error.code} {error.read().decode()[:300]}") from None
        except urllib.error.URLError as error:
            raise SystemExit(f"{request.full_url}: {error.reason}; start volley serve, or give its address") from None
        details = found["usage"]["completion_tokens_details"]
        return found["choices"][0]["token_ids"], details.get("tokens_per_pass", 1.0)

    def answer(prompts: Sequence[list[int]], params: SamplingParams) -> Answers:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: ask(prompt, params), prompts))

    return answer


@dataclass
class Setting:
    name: str
    params: SamplingParams
    answers: Answers = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)

    def run(self, answer: Answer, prompts: Sequence[list[int]]) -> None:
        started = time.perf_counter()
        self.answers = answer(prompts, self.params)
        self.speeds.append(sum(len(tokens) for tokens, _ in self.answers) / (time.perf_counter() - started))

    def row(self, first: "Setting", scorer: Engine, prompts: Sequence[list[int]]) -> str:
        texts = [tokens for tokens, _ in self.answers]
        passes = sum(len(tokens) / per_pass for tokens, per_pass in self.answers)
        ratios = [own / plain for own, plain in zip(self.speeds, first.speeds, strict=True)]
        columns = [
            self.name,
            f"{sum(map(len, texts)) / passes:.2f}",
            f"{statistics.median(self.speeds):.0f} ({min(self.speeds):.0f}–{max(self.speeds):.0f})",
            f"{statistics.median(ratios):.2f}",
            f"{nats(scorer, prompts, texts):.2f}",
            f"{distinct(texts):.2f}",
        ]
        return f"| {' | '.join(columns)} |"


def make_settings(options: argparse.Namespace) -> list[Setting]:
    def setting(name: str, **own: object) -> Setting:
        diffusion = DiffusionParams(**own)  # type: ignore[arg-type]
        return Setting(
            name,
            SamplingParams(
                temperature=options.temperature,
                seed=0,
                max_tokens=options.max_tokens,
                ignore_eos=not options.stop,
                diffusion=diffusion,
            ),
        )

    found = [setting(mode, mode=mode) for mode in ("autoregressive", "self")]
    for length in options.lengths:
        canvas = f", canvas {length}" if length else ""
        for steps in options.steps:
            found.append(setting(f"{steps} steps{canvas}", mode="diffusion", canvas_length=length, max_steps=steps))
        for threshold in [] if options.steps else options.thresholds:
            name = f"threshold {threshold:g}{canvas}"
            found.append(setting(name, mode="diffusion", canvas_length=length, threshold=threshold))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=8, help="prompts, the first ones behind --skip")
    parser.add_argument("--skip", type=int, default=0, help="prompts, the first ones: those that chose a setting")
    parser.add_argument("--raw", action="store_true", help="prompts as they are, without the chat template")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--stop", action="store_true", help="answers may end before they are so long")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.5, 0.7, 0.8, 0.9, 0.99])
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[], help="largest numbers of passes, in place of thresholds"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[None], help="of canvases; by default the checkpoint's"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, help="by default torch's choice")
    parser.add_argument("--scorer", help="model that scores the texts; by default the target itself")
    parser.add_argument("--server", help="URL of a server of the same model, which answers instead")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    engine = Engine.from_pretrained(options.target, dtype=dtype, prefix_caching=False)
    family = engine.target.diffusion
    if family is None:
        parser.error(f"{options.target} is no diffusion language model; docs/diffusion.md has a list")
    if family.mask_token_id is None and not options.steps:
        parser.error("this model reads no threshold; give --steps 12 24 48")
    scorer = (
        Engine.from_pretrained(options.scorer, drafter=None, dtype=dtype, prefix_caching=False)
        if options.scorer
        else engine
    )
    is_raw = options.raw or not engine.tokenizer.chat_template
    chosen = load_prompts(options.prompts)[options.skip :][: options.limit]
    prompts = [engine.encode(one.raw if is_raw else list(one.messages)) for one in chosen]
    answer = by(engine) if options.server is None else by_server(options.server)
    settings = make_settings(options)
    turns = [(setting, answer) for setting in settings]
    if options.scorer and scorer.target.diffusion is None:
        plain = replace(settings[0].params, diffusion=None)
        turns.append((Setting("the scorer", plain), by(scorer)))
    for setting, answers in turns:  # kernels are warm, and passes timed, before anything counts
        answers(prompts, replace(setting.params, max_tokens=16))
    for _ in range(options.repeats):
        for setting, answers in turns:
            setting.run(answers, prompts)
    print("| | tokens per pass | tokens/s | ratio | nats per token | distinct |\n|---|---|---|---|---|---|")
    for setting, _ in turns:
        print(setting.row(settings[0], scorer, prompts), flush=True)


if __name__ == "__main__":
    main()
