"""How often certifying raises a false alarm, and whether it finds a small bias: its sampled checks, again and again.

A pair without a fault is certified ``--runs`` times, each with noise of its own; printed are the alarms, and how many p-values
fall below 0.05, 0.01 and 0.001, which is as many parts of all where tests are true. Then the same with a fault: with the chance
``--planted`` / (1 − p) of each token, p the likeliest's probability on average, the likeliest token comes instead of it.

    python benchmarks/certify_runs.py --runs 100 --bias 0.1                                                  # a random pair
    python benchmarks/certify_runs.py --runs 4 --bias 0.01 --pieces 25 --planted 0.01 --ways sampled         # a bias of 1 %
    python benchmarks/certify_runs.py --runs 4 --bias 0.01 --pieces 25 --ways sampled                        # and none
    python benchmarks/certify_runs.py --bundled --runs 5 --bias 0.03                                         # the bundled pair
    python benchmarks/certify_runs.py --whole --bundled --runs 100 --bias 0.1     # all checks of `volley certify`, run by run

``--whole`` repeats all that certifying a pair does, greedy checks, parameters and seeds too, and prints the alarms by check.

Each piece of a run is a line of ``--out``; the same command goes on where it was stopped, by ``--seconds`` or otherwise. The
pieces of a run are tested together, as one sample of the size that ``--bias`` states.
"""

import argparse
import copy
import json
import math
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from volley import DecodingConfig, Engine
from volley.bench.report import machine
from volley.certify.certificate import certify_pair
from volley.certify.checks import Check
from volley.certify.options import CertifyConfig
from volley.certify.sampled import Sampled, Way, draw_way, verdicts, ways
from volley.certify.statistics import Deviations
from volley.decode.work import Work
from volley.files import write_atomically
from volley.models.drafters.drafter import Drafter
from volley.models.targets.target import Target
from volley.procedures.request import Request
from volley.procedures.speculative import Speculative
from volley.prompts import read_jsonl
from volley.train.features import FrozenTarget
from volley.train.options import TrainConfig
from volley.train.shape import drafter_config
from volley.types import SamplingParams

LEVELS = (0.05, 0.01, 0.001)
PARTS = ("every", "bonus")


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    path = options.out / f"{name_of(options)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = [row for _, row in read_jsonl(path)] if path.exists() else []
    if options.whole and (options.planted or options.ways or options.pieces > 1):
        raise SystemExit("--whole certifies as volley certify does; leave --planted, --ways and --pieces out")
    if len(done) < options.runs * options.pieces:
        engine = bundled() if options.bundled else tiny()
        if options.planted:
            engine.procedure = engine.procedures.speculative = Biased(engine.config, options.planted, len(done))
        prompts = [[random.Random(row).randrange(5, 45) for _ in range(8)] for row in range(8)]
        if options.bundled:
            prompts = [engine.encode(text) for text in ("Once upon a time", "def sort(", "To list files", "3 + 5 =")]
        started = time.monotonic()
        while len(done) < options.runs * options.pieces and time.monotonic() - started < options.seconds:
            make = whole_run if options.whole else draw_piece
            done.append(make(engine, prompts, options, len(done)))
            write_atomically(path, "".join(json.dumps(piece) + "\n" for piece in done))
    (report_whole if options.whole else report)(done, options)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--bias", type=float, default=0.1, help="what the sample size of a run is for")
    parser.add_argument("--pieces", type=int, default=1, help="of a run")
    parser.add_argument("--ways", default="", help="names of ways, with commas; by default all that the pair has")
    parser.add_argument(
        "--planted", type=float, default=0.0, help="points by which the likeliest token comes too often, over 100"
    )
    parser.add_argument("--bundled", action="store_true")
    parser.add_argument(
        "--whole", action="store_true", help="all that certify does, in place of its sampled checks alone"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further piece after so many")
    parser.add_argument("--out", type=Path, default=Path("runs/certify"))
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def name_of(options: argparse.Namespace) -> str:
    """Of the file that holds what was drawn with these options."""
    parts = ["whole"] if options.whole else []
    parts += ["bundled" if options.bundled else "tiny", f"bias-{options.bias:g}", f"pieces-{options.pieces}"]
    parts += [f"planted-{options.planted:g}"] if options.planted else []
    return "-".join([*parts, *options.ways.replace(" ", "").split(",")]).rstrip("-")


def draw_piece(
    engine: Engine, prompts: Sequence[list[int]], options: argparse.Namespace, number: int
) -> dict[str, Any]:
    """Sums of deviations over the tokens of each way."""
    started, chosen = time.monotonic(), options.ways.split(",") if options.ways else ()
    todo = ways(engine, 32)
    wanted = math.ceil(CertifyConfig(bias=options.bias).sample_size(4 * len(todo)) / options.pieces)
    sums = {}
    for way in todo:
        if not chosen or way.name in chosen:
            found = draw_way(engine, prompts, way, wanted, number)
            sums[way.name] = {part: vars(getattr(found, part)) | {"random": None} for part in PARTS}
    return {"tests": 4 * len(todo), "ways": sums, "seconds": round(time.monotonic() - started, 1)}


def whole_run(engine: Engine, prompts: Sequence[list[int]], options: argparse.Namespace, number: int) -> dict[str, Any]:
    """The outcome of every check of one certificate."""
    engine.reset_prefix_cache()
    config = CertifyConfig(bias=options.bias, max_tokens=32, seed=number)
    certificate = certify_pair(engine, prompts, config, lambda _: None)
    checks = {check.name: [check.outcome, check.p_value, check.detail] for check in certificate.checks}
    return {"verdict": certificate.verdict, "checks": checks, "seconds": round(certificate.seconds, 1)}


def report_whole(done: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    seconds, names = sum(run["seconds"] for run in done), {name: None for run in done for name in run["checks"]}
    alarms = sum(run["verdict"] != "lossless" for run in done)
    print(f"{machine(options.threads)['cpu']}, commit {commit()}; {name_of(options)}")
    print(f"{len(done)} certificates, {len(names)} checks each, {seconds:.0f} s: {alarms} with an alarm")
    for name in names:
        outcomes = Counter(run["checks"][name][0] for run in done if name in run["checks"])
        print(f"{name}: {', '.join(f'{times} {outcome}' for outcome, times in outcomes.most_common())}")
    for number, run in enumerate(done):
        for name, (outcome, _, detail) in run["checks"].items():
            if outcome == "FAILED":
                print(f"run {number}, {name}: {detail}")


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def pooled(pieces: Sequence[dict[str, Any]], config: CertifyConfig) -> list[Check]:
    """The checks of a run, from its pieces."""
    checks = []
    for name in pieces[0]["ways"]:
        found = Sampled(*(_sum([piece["ways"][name][part] for piece in pieces]) for part in PARTS))
        checks += verdicts(Way(name, SamplingParams()), found, config, pieces[0]["tests"])
    return checks


def _sum(parts: Sequence[dict[str, Any]]) -> Deviations:
    whole = Deviations(random.Random(0))
    for part in parts:
        for field in ("count", "hits", "variance", "impossible"):
            setattr(whole, field, getattr(whole, field) + part[field])
        whole.bins = [sum(pair) for pair in zip(whole.bins, part["bins"], strict=True)]
    return whole


def report(done: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    config, size = CertifyConfig(bias=options.bias), options.pieces
    runs = [pooled(done[at : at + size], config) for at in range(0, len(done) - size + 1, size)]
    checks = [check for run in runs for check in run if check.judged]
    alarms = sum(any(not check.passed for check in run) for run in runs)
    tokens = sum(check.sample for check in checks if not check.name.endswith("bonus"))
    seconds = sum(piece["seconds"] for piece in done[: len(runs) * size])
    print(f"{machine(options.threads)['cpu']}, commit {commit()}; {name_of(options)}: {len(done)} pieces")
    print(f"{len(runs)} runs, {len(checks)} checks, {tokens} tokens, {seconds:.0f} s: {alarms} runs with an alarm")
    for name in {check.name: None for check in checks}:
        shifts = [f"{100 * check.facts['shift']:+.2f}" for check in checks if check.name == name]
        failed = sum(not check.passed for check in checks if check.name == name)
        print(f"{name}: {failed} alarms; the likeliest token came {', '.join(shifts[:8])} points from expected")
    values = [check.p_value for check in checks if check.p_value is not None]
    for level in LEVELS:
        below = sum(value < level for value in values)
        print(
            f"p < {level:g}: {below} of {len(values)} checks; of two tests each at most {2 * level * len(values):.1f}"
        )


class Biased(Speculative):
    """The likeliest token comes too often."""

    def __init__(self, config: DecodingConfig, points: float, seed: int) -> None:
        super().__init__(config)
        self.points, self.random = points, random.Random(seed)

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
