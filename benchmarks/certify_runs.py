"""How often certifying raises a false alarm, and whether it finds a small bias: its sampled checks, again and again.

A pair without a fault is certified ``--runs`` times, each with noise of its own; printed are the alarms, and how many p-values
fall below 0.05, 0.01 and 0.001, which is as many parts of all where tests are true. Then the same with a fault: with the chance
``--planted`` / (1 − p) of each token, p the likeliest's probability on average, the likeliest token comes instead of it.

    python benchmarks/certify_runs.py --runs 100 --bias 0.1              # a random pair
    python benchmarks/certify_runs.py --bundled --runs 1 --bias 0.03     # the bundled pair
"""

import argparse
import copy
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from volley import DecodingConfig, Engine
from volley.certify.checks import Check
from volley.certify.options import CertifyConfig
from volley.certify.sampled import check_way, ways
from volley.decode.work import Work
from volley.models.drafter import Drafter
from volley.models.target import Target
from volley.procedures.request import Request
from volley.procedures.speculative import Speculative
from volley.train.features import FrozenTarget
from volley.train.options import TrainConfig
from volley.train.shape import drafter_config

LEVELS = (0.05, 0.01, 0.001)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--bias", type=float, default=0.1, help="what the sample size is for")
    parser.add_argument(
        "--planted", type=float, default=0.0, help="points by which the likeliest token comes too often"
    )
    parser.add_argument("--bundled", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further run after so many")
    options = parser.parse_args()
    engine = bundled() if options.bundled else tiny()
    if options.planted:
        engine.procedure = engine.procedures.speculative = Biased(engine.config, options.planted)
    prompts = [[random.Random(row).randrange(5, 45) for _ in range(8)] for row in range(8)]
    if options.bundled:
        prompts = [engine.encode(text) for text in ("Once upon a time", "def sort(", "To list files", "3 + 5 =")]
    started, found, alarms, done = time.monotonic(), list[Check](), 0, 0
    for seed in range(options.runs):
        if time.monotonic() - started > options.seconds:
            break
        checks = run(engine, prompts, CertifyConfig(bias=options.bias, seed=seed, max_tokens=32))
        alarms += any(not check.passed for check in checks)
        found += checks
        done += 1
    report(found, alarms, done, time.monotonic() - started)


def run(engine: Engine, prompts: Sequence[list[int]], config: CertifyConfig) -> list[Check]:
    todo = ways(engine, config.max_tokens)
    return [check for way in todo for check in check_way(engine, prompts, way, config, 4 * len(todo))]


def report(checks: Sequence[Check], alarms: int, runs: int, seconds: float) -> None:
    values = [check.p_value for check in checks if check.p_value is not None]
    tokens = sum(check.sample for check in checks if not check.name.endswith("bonus"))
    print(f"{runs} runs, {len(values)} checks, {tokens} tokens, {seconds:.0f} s: {alarms} runs with an alarm")
    for level in LEVELS:
        below = sum(value < level for value in values)
        print(
            f"p < {level:g}: {below} of {len(values)} checks; of two tests each at most {2 * level * len(values):.1f}"
        )


class Biased(Speculative):
    """The likeliest token comes too often."""

    def __init__(self, config: DecodingConfig, points: float) -> None:
        super().__init__(config)
        self.points, self.random = points, random.Random(0)

    def absorb(self, works: Sequence[Work[Request]], logits: Tensor) -> None:
        super().absorb(works, logits)
        for work in works:
            verdict, rows = work.verdict, logits[work.rows]
            if not verdict.token_ids or work.request.params.temperature == 0 or work.proposal.parents is not None:
                continue
            row = rows[verdict.accepted].float() / work.request.params.temperature
            best = float(row.softmax(-1).max())
            cycle = len(verdict.token_ids)  # only the last token of a cycle may change
            if best < 1 and self.random.random() < cycle * self.points / (1 - best):
                verdict.token_ids[-1] = int(row.argmax())


def bundled() -> Engine:
    return Engine.from_pretrained(dtype=torch.float32)


def tiny() -> Engine:
    """A random target of 50 tokens and a random drafter that is less sure of itself."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config = Qwen3Config(
        **shape, vocab_size=50, num_hidden_layers=4, max_position_embeddings=256, initializer_range=0.3, eos_token_id=2
    )
    with tempfile.TemporaryDirectory() as name:
        Qwen3ForCausalLM(config).save_pretrained(name)
        names = {f"t{token}": token for token in range(50)}
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(names, unk_token="t0")), eos_token="t2"
        ).save_pretrained(name)
        target = Target.from_pretrained(name, dtype=torch.float32)
        frozen = FrozenTarget(name, torch.float32, torch.device("cpu"))
        options = TrainConfig(target=name, data=("none",), out=str(Path(name) / "out"), block_size=4, num_layers=1)
        drafter = Drafter(drafter_config(options, frozen.model, 3))
    return Engine(target, copy.deepcopy(drafter).eval(), page_size=4)


if __name__ == "__main__":
    main()
