"""What a drafter regains by being trained further on its target's quantised checkpoint.

    python benchmarks/quantised_recovery.py --data DIR --out runs/recovery --schemes bf16 W4A16

For each scheme the bundled target is quantised (``benchmarks/quantised.py``), answers training questions, and the bundled drafter
is trained on these answers. ``bf16`` is the same without quantisation: what more training alone gives. Then τ is measured with
the drafter as it was and as it became, on questions of the test set behind those that inputs' scales come from. Every stage is
kept in ``--out``: a run that was stopped goes on. DIR has gsm8k_train.jsonl and gsm8k_test.jsonl.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.quantised import CALIBRATION, SCHEMES, quantise
from volley import Engine, SamplingParams
from volley.chat import encode_chat
from volley.files import REFERENCE, write_atomically
from volley.prompts import read_jsonl

RECIPE = (  # that of the bundled drafter's last training
    *("--optimizer", "muon", "--loss-decay", "pace", "--soft-targets", 0.3, "--total-variation", 0.5),
    *("--tokens-per-batch", 2048, "--anchors-per-sequence", 32, "--dtype", "float32"),
    *("--epochs", 1000, "--eval-prompts", 0, "--eval-share", 0),
)
HEADER = "| weights | τ of the drafter as it was | after training | answers to train on |\n|---|---|---|---|"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--schemes", nargs="+", choices=("bf16", *SCHEMES), default=["bf16", "W4A16"])
    parser.add_argument("--drafter", type=Path, default=REFERENCE / "drafter")
    parser.add_argument("--answers", type=int, default=300, help="training questions that are answered")
    parser.add_argument("--num-prompts", type=int, default=80)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    return parser.parse_args(arguments)


def volley(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "volley.cli", *map(str, words)], check=True)


def questions(file: Path, first: int, count: int) -> list[list[dict[str, str]]]:
    rows = [row for _, row in read_jsonl(file)][first : first + count]
    return [[{"role": "user", "content": row["question"]}] for row in rows]


def make_target(scheme: str, data: Path, folder: Path) -> None:
    """The bundled target in ``folder``, quantised."""
    if (folder / "config.json").exists():
        return
    making = folder.with_name("making")
    shutil.rmtree(making, ignore_errors=True)
    if scheme == "bf16":
        shutil.copytree(REFERENCE / "target", making)
    else:
        model = AutoModelForCausalLM.from_pretrained(REFERENCE / "target", dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(REFERENCE / "target")
        chats = questions(data / "gsm8k_test.jsonl", 0, CALIBRATION)
        quantise(model, scheme, [torch.tensor([encode_chat(tokenizer, chat)]) for chat in chats], making)
        tokenizer.save_pretrained(making)
    making.rename(folder)


def acceptance(target: Path, drafter: Path, options: argparse.Namespace) -> float:
    """τ of greedy answers."""
    engine = Engine.from_pretrained(target, drafter=drafter, policy="fixed")
    asked = questions(options.data / "gsm8k_test.jsonl", CALIBRATION, options.num_prompts)
    results = engine.generate([engine.encode(chat) for chat in asked], SamplingParams(max_tokens=options.max_tokens))
    lengths = [length for result in results for length in result.stats.accepted_lengths]
    return sum(lengths) / len(lengths)


def train(folder: Path, options: argparse.Namespace) -> int:
    """Answer and train in ``folder``, whose ``target`` is there; returns how many answers there are."""
    prompts, answers, done = folder / "prompts.jsonl", folder / "answers.jsonl", folder / "trained"
    if not done.exists():
        rows = questions(options.data / "gsm8k_train.jsonl", 0, options.answers)
        write_atomically(prompts, "".join(json.dumps({"messages": chat}) + "\n" for chat in rows))
        shared = ("--target", folder / "target")
        volley(
            *("collect", *shared, "--drafter", options.drafter, "--prompts", prompts, "--out", answers),
            *("--max-tokens", 192, "--temperatures", "0,1"),
        )
        volley(
            *("train", *shared, "--data", answers, "--out", folder / "run", "--init", options.drafter, "--keep-shape"),
            *RECIPE,
            *("--max-steps", options.steps, "--learning-rate", options.learning_rate),
        )
        write_atomically(done, "")
    return sum(1 for _ in answers.open(encoding="utf-8"))


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    print(HEADER)
    for scheme in options.schemes:
        folder = options.out / scheme
        folder.mkdir(parents=True, exist_ok=True)
        make_target(scheme, options.data, folder / "target")
        number = train(folder, options)
        before, after = (acceptance(folder / "target", one, options) for one in (options.drafter, folder / "run"))
        print(f"| {scheme} | {before:.2f} | {after:.2f} | {number} |", flush=True)


if __name__ == "__main__":
    main()
