"""τ of a drafter in fp8 beside bf16 and int8, on a CPU: there the reference decodes its codes for PyTorch's products.

    python benchmarks/float8.py --data-dir DIR
    python benchmarks/float8.py --data-dir DIR --drafter reference-dflash --num-prompts 20

Greedy answers of the bundled target to prompts from the 41st of each set on. The target computes alike in every row, so all
answers must be equal; the script ends with status 1 if any is not. It says nothing about speed.
"""

import argparse
import sys
from pathlib import Path
from typing import get_args

import torch

from volley import Engine, SamplingParams
from volley.files import REFERENCE
from volley.models.drafters.draft_model import load_drafter
from volley.models.drafters.drafter import Drafter
from volley.models.targets.target import Target
from volley.native import DraftWeights
from volley.prompts import load_prompts

SETS = ("gsm8k", "humaneval", "mt-bench")
SKIPPED = 40


def load(path: str, target: Target, weights: DraftWeights) -> Drafter:
    """A drafter for ``target``; ``load_drafter`` refuses fp8 on a CPU."""
    if weights != "fp8":
        return load_drafter(path, target, weights)
    drafter = Drafter.from_pretrained(path, target.dtype)
    drafter.fuse(weights, target.head_weight)
    return drafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of gsm8k_test.jsonl and so on")
    parser.add_argument("--drafter", default=str(REFERENCE / "drafter"))
    parser.add_argument("--weights", nargs="+", default=["bf16", "fp8"], choices=get_args(DraftWeights))
    parser.add_argument("--num-prompts", type=int, default=10, help="of each set")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = Engine.from_pretrained(REFERENCE / "target", device="cpu").target
    params = SamplingParams(max_tokens=options.max_tokens)
    answers = []
    print(f"| draft weights | {' | '.join(SETS)} | cycles | τ |\n|---|{'---|' * len(SETS)}---|---|")
    for weights in options.weights:
        engine = Engine(target, load(options.drafter, target, weights), policy="fixed")
        lengths, cells = list[int](), []
        for name in SETS:
            prompts = load_prompts(name, options.data_dir, SKIPPED + options.num_prompts)[SKIPPED:]
            results = list(engine.generate([list(prompt.messages) for prompt in prompts], params))
            own = [length for result in results for length in result.stats.accepted_lengths]
            answers.append((name, [result.token_ids for result in results]))
            cells.append(f"{sum(own) / len(own):.2f}")
            lengths += own
        print(f"| {weights} | {' | '.join(cells)} | {len(lengths)} | {sum(lengths) / len(lengths):.3f} |", flush=True)
    same = all(tokens == dict(answers[: len(SETS)])[name] for name, tokens in answers)
    print("all answers are equal" if same else "ANSWERS DIFFER")
    sys.exit(not same)


if __name__ == "__main__":
    main()
