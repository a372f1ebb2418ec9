"""Is the learning rate of ``volley tune``'s preset near the best one? Drafters of targets of three widths, at five rates each.

    python -m benchmarks.learning_rates --text gsm8k_train.jsonl --out runs/rates

For each width a target is trained on the text (``small_llama.py``), answers openings, and gets drafters of the preset's shape in
trainings that differ in the learning rate alone. Trainings are counted in steps, so what else the machine does changes no figure.
A row of the table has τ on held-out answers, teacher-forced, for each multiple of the preset's rate. What is done is not done
again. ``volley tune`` tries the neighbours itself, so the preset is right where the best one is among them.
"""

import argparse
import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.small_llama import make_tokenizer, read, train, write
from volley.files import make_folder, read_json, write_atomically
from volley.train.loop import Trainer
from volley.tune.options import TuneConfig
from volley.tune.run import Tuning

FACTORS = (1 / 6.25, 1 / 2.5, 1.0, 2.5, 6.25)
"""Two neighbours on each side, as far apart as those that tune tries."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="JSONL files")
    parser.add_argument("--out", type=Path, default=Path("runs/rates"))
    parser.add_argument("--widths", type=int, nargs="+", default=(64, 128, 256))
    parser.add_argument("--target-steps", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=400, help="of each drafter's training")
    parser.add_argument("--prompts", type=int, default=600)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(head(FACTORS))
    for width in options.widths:
        print(row(width, options), flush=True)


def head(factors: Sequence[float]) -> str:
    columns = ["width", "optimizer", "preset's rate", *(f"× {factor:g}" for factor in factors)]
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def row(width: int, options: argparse.Namespace) -> str:
    folder = options.out / str(width)
    make_folder(folder)
    tuning = prepare(width, folder, options)
    found = read_json(folder / "found.json") if (folder / "found.json").exists() else {}
    for factor in FACTORS:
        if f"{factor:g}" not in found:
            found[f"{factor:g}"] = tau(tuning, factor, options.steps)
            write_atomically(folder / "found.json", json.dumps(found))
    base = tuning.base
    cells = [f"{found[f'{factor:g}']:.3f}" for factor in FACTORS]
    return f"| {width} | {base.optimizer} | {base.learning_rate:.1e} | {' | '.join(cells)} |"


def prepare(width: int, folder: Path, options: argparse.Namespace) -> Tuning:
    """A target of this width and its responses, as ``volley tune`` collects them."""
    target = folder / "target"
    if not (target / "held-out.jsonl").exists():
        texts = [text for path in options.text for text in read(path)]
        random.Random(0).shuffle(texts)
        tokenizer = make_tokenizer(texts)
        write(
            target, train(tokenizer, texts[100:], width, steps=options.target_steps), tokenizer, texts, options.prompts
        )
    prompts = (str(target / "prompts.jsonl"),)
    config = TuneConfig(target=str(target), prompts=prompts, out=folder, temperatures=(0.0,), max_tokens=96)
    tuning = Tuning(config, print)
    if "collect" not in tuning.progress:
        tuning.progress["collect"] = tuning.collect()
    return tuning


def tau(tuning: Tuning, factor: float, steps: int) -> float:
    """On held-out responses after a training at ``factor`` times the preset's rate."""
    base, folder = tuning.base, tuning.out / f"rate-{factor:g}"
    shutil.rmtree(folder, ignore_errors=True)  # of a training that was stopped
    config = replace(
        base,
        out=str(folder),
        learning_rate=factor * base.learning_rate,
        max_steps=steps,
        epochs=10**6,
    )
    trainer = Trainer(config, tuning.ranks, tuning.frozen, speaks=False)
    trainer.run()
    found: float = trainer.values["tau"]
    shutil.rmtree(folder)
    print(f"{tuning.out.name} wide, {config.learning_rate:.1e}: τ {found:.3f} after {steps} steps", flush=True)
    return found


if __name__ == "__main__":
    main()
