"""What quantisation costs a model of both kinds: its own text, its drafts, and its canvases, beside bf16.

Needs compressed-tensors (`pip install 'volley-llm[quant]'`).

    python -m benchmarks.quantised_diffusion --prompts held-out.jsonl --calibration choose.jsonl

*Perplexity* is causal and in fp32, of the answers that the bf16 weights write greedily. *The same* counts greedy answers of the
autoregressive mode that are those of bf16. *τ* is that of drafts of one pass (mode ``self``). *Tokens per pass* and *nats* are of
denoised text, which the autoregressive mode of the bf16 weights scores. Static scales of inputs come from ``--calibration``.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from benchmarks.diffusion_curve import nats
from benchmarks.quantised import perplexity, quantise, shared
from volley import DiffusionParams, Engine, GenerationResult, SamplingParams
from volley.files import find_target
from volley.models.targets.loading import load_causal_lm
from volley.prompts import load_prompts

SCHEMES = ("FP8_DYNAMIC", "FP8", "NVFP4A16", "NVFP4")


class Measured:
    """Greedy answers of one checkpoint in each mode."""

    def __init__(self, folder: Path, prompts: list[list[int]], max_tokens: int, threshold: float) -> None:
        self.engine = Engine.from_pretrained(folder)
        self.prompts, self.max_tokens = prompts, max_tokens
        self.plain = self._answers(DiffusionParams(mode="autoregressive"))
        self.drafted = self._answers(DiffusionParams(mode="self", max_steps=1))
        self.denoised = self._answers(DiffusionParams(mode="diffusion", threshold=threshold))

    def _answers(self, diffusion: DiffusionParams) -> list[GenerationResult]:
        params = SamplingParams(max_tokens=self.max_tokens, ignore_eos=True, diffusion=diffusion)
        return list(self.engine.generate(self.prompts, params))

    def row(self, name: str, folder: Path, whole: "Measured") -> str:
        answers = [result.token_ids for result in whole.plain]
        pairs = zip(self.prompts, answers, strict=True)
        texts = [(torch.tensor([prompt + answer]), len(prompt)) for prompt, answer in pairs]
        lengths = [length for result in self.drafted for length in result.stats.accepted_lengths]
        passes = sum(result.stats.denoising_steps + result.stats.commit_passes for result in self.denoised)
        same, _ = shared(self.plain, whole.plain)
        columns = [
            name,
            f"{perplexity(load_causal_lm(folder, torch.float32, 'sdpa'), texts):.3f}",
            f"{same} of {len(answers)}",
            f"{sum(lengths) / len(lengths):.2f}",
            f"{sum(result.stats.output_tokens for result in self.denoised) / passes:.2f}",
            f"{nats(whole.engine, self.prompts, [result.token_ids for result in self.denoised]):.2f}",
        ]
        return f"| {' | '.join(columns)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference-diffusion")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, required=True, help="prompts that figures are not taken from")
    parser.add_argument("--limit", type=int, default=24, help="prompts of each file")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    source = Path(find_target(options.model))
    tokenizer = AutoTokenizer.from_pretrained(source)

    def ids(file: Path) -> list[list[int]]:
        chats = [list(one.messages) for one in load_prompts(file)[: options.limit]]
        return [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]

    prompts, calibration = ids(options.prompts), [torch.tensor([own]) for own in ids(options.calibration)]
    whole = Measured(source, prompts, options.max_tokens, options.threshold)
    print("| weights | perplexity | the same | τ | tokens per pass | nats |\n|---|---|---|---|---|---|")
    print(whole.row("bf16", source, whole), flush=True)
    for scheme in options.schemes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            quantise(AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16), scheme, calibration, folder)
            tokenizer.save_pretrained(folder)
            own = Measured(folder, prompts, options.max_tokens, options.threshold)
            print(own.row(scheme, folder, whole), flush=True)


if __name__ == "__main__":
    main()
