"""An hour of ``volley tune`` on the bundled target: the τ of what it makes, beside the bundled drafter's.

    python -m benchmarks.tune_hour --data DATA --work runs/tune-hour

``DATA`` is the folder that ``scripts/reference/run`` trains from. The prompts are those of the bundled drafter's training; τ is
measured on prompts that neither model was trained on and that chose nothing (``make_prompts.py --held-out report``), greedy,
with chains of each drafter's own block. A run that was stopped goes on. The hour is that of trials and training;
collecting, measuring and certifying come on top. The last line is a row of a table.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.held_out import PROMPTS_PER_DOMAIN, decode
from volley.files import REFERENCE, read_json

MAKE_PROMPTS = Path(__file__).parents[1] / "scripts" / "reference" / "make_prompts.py"
TEMPERATURES, MAX_TOKENS = "0,0.7", "160"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/tune-hour"))
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--limit", type=int, default=10_000, help="prompts that are answered, of 21,000")
    parser.add_argument("--num-prompts", type=int, default=PROMPTS_PER_DOMAIN, help="held-out prompts of each domain")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    prompts, report = options.work / "prompts.jsonl", options.work / "report.jsonl"
    make_prompts(options.data, prompts)
    make_prompts(options.data, report, "--held-out", "report")
    tuned = options.work / f"tuned-{options.minutes:g}"
    tune(prompts, tuned, options)
    print(row(tuned, report, options.num_prompts))


def make_prompts(data: Path, out: Path, *more: str) -> None:
    if not out.exists():
        command = [sys.executable, str(MAKE_PROMPTS), "--data", str(data), "--out", str(out), *more]
        subprocess.run(command, check=True)


def tune(prompts: Path, out: Path, options: argparse.Namespace) -> None:
    """``volley tune`` with the paths, the minutes, and the lengths and temperatures that are served."""
    command = [sys.executable, "-m", "volley.cli", "tune", "--target", str(REFERENCE / "target")]
    command += [
        "--prompts",
        str(prompts),
        "--limit",
        str(options.limit),
        "--out",
        str(out),
        "--max-minutes",
        str(options.minutes),
    ]
    command += ["--temperatures", TEMPERATURES, "--max-tokens", MAX_TOKENS, "--threads", str(options.threads)]
    subprocess.run(command, check=True)


def row(tuned: Path, report: Path, per_domain: int) -> str:
    """τ of both drafters and what tune chose, as a table's row; figures by domain go to standard error."""
    found = {
        name: decode(report, drafter, per_domain) for name, drafter in (("tuned", tuned), ("bundled", "reference"))
    }
    for name, domains in found.items():
        print(json.dumps({name: {domain: round(tau(each), 3) for domain, each in domains.items()}}), file=sys.stderr)
    taus = {name: tau([length for each in domains.values() for length in each]) for name, domains in found.items()}
    done: dict[str, Any] = read_json(tuned / "tune.json")["done"]
    chosen = ", ".join(f"{name} {value}" for name, value in done["choose"]["options"].items())
    head = "| drafter | τ, tuned | τ, bundled | ratio | trials | steps | chosen |\n|---|---|---|---|---|---|---|\n"
    figures = f"{taus['tuned']:.3f} | {taus['bundled']:.3f} | {taus['tuned'] / taus['bundled']:.3f}"
    return f"{head}| {tuned.name} | {figures} | {done['choose']['trials']} | {done['train']['steps']} | {chosen} |"


def tau(lengths: list[int]) -> float:
    return sum(lengths) / max(1, len(lengths))


if __name__ == "__main__":
    main()
