"""Measure the bundled pair beside transformers, as docs/benchmarks/bundled-pair.md does, and print tables in Markdown.

    python benchmarks/reference_pair.py --data-dir DIR --out bench

Block sizes and temperatures on gsm8k, humaneval and mt-bench, batch 1, beside transformers; then many prompts at once.
Every table is saved with all its runs under ``--out``. Ctrl-C ends the current table early.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from volley import Engine
from volley.bench.report import Report, Summary, to_markdown
from volley.bench.run import run_bench, save
from volley.bench.tasks import PLAIN, BenchConfig
from volley.engine.engine import REFERENCE


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder with the datasets' files; without it the hub")
    parser.add_argument("--out", type=Path, default=Path("bench"), help="folder for the full reports")
    parser.add_argument("--target", default=str(REFERENCE / "target"))
    parser.add_argument("--drafter", default=str(REFERENCE / "drafter"))
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--skip-prompts", type=int, default=40, help="of each dataset: they chose settings")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--block-sizes", help="by default 4, 8, 12 and 16 as far as the drafter goes")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--threads", type=int, default=None)
    return parser.parse_args()


def describe(report: Report) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    size = report.measurements.peak_memory_bytes / 2**20
    lines = [f"Machine: {facts}; peak memory of the process {size:.0f} MiB."]
    lines += [f"Note: {note}" for note in report.measurements.notes]
    return "\n".join(lines + ["**Interrupted.**"] * report.measurements.partial) + "\n"


def acceptance_table(summaries: list[Summary]) -> str:
    """Share of full blocks that accepted at least k draft tokens, all prompts together."""
    drafted = [s for s in summaries if s.case.name == "volley" and s.dataset == "all"]
    width = max((len(s.acceptance_by_position) for s in drafted), default=0)
    lines = ["| T | decoding | " + " | ".join(f"k={k}" for k in range(1, width + 1)) + " |", "|" + "---|" * (width + 2)]
    for s in drafted:
        shares = [f"{share:.2f}" for share in s.acceptance_by_position] + [""] * (width - len(s.acceptance_by_position))
        lines.append(f"| {s.temperature:g} | {s.case.label} | " + " | ".join(shares) + " |")
    return "\n".join(lines) + "\n"


def throughput_table(single: Report, many: Report) -> str:
    """Plain decoding of one prompt at a time and of many, end to end."""
    lines = ["| dataset | one at a time, tokens/s | at once, tokens/s | ratio |", "|---|---|---|---|"]
    rates = {s.dataset: s for s in many.summaries if s.case == PLAIN}
    for one in single.summaries:
        if one.case == PLAIN and one.temperature == 0 and one.dataset in rates:
            both = one.end_to_end_tokens_per_second, rates[one.dataset].end_to_end_tokens_per_second
            lines.append(f"| {one.dataset} | {both[0]:.1f} | {both[1]:.1f} | {both[1] / both[0]:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    engine = Engine.from_pretrained(arguments.target, arguments.drafter)
    largest = engine.block_size
    sizes = [int(size) for size in (arguments.block_sizes or "4,8,12,16").split(",")]
    models = {"target": "reference pair", "drafter": "reference pair", "path": arguments.target}
    config = BenchConfig(
        data_dir=arguments.data_dir,
        num_prompts=arguments.num_prompts,
        skip_prompts=arguments.skip_prompts,
        block_sizes=tuple(size for size in sizes if arguments.block_sizes or size <= largest),
        temperatures=(0.0, 1.0),
        max_tokens=arguments.max_tokens,
        repeats=arguments.repeats,
        against=("transformers",),
    )
    single = run_bench(engine, config, models)
    save(single, arguments.out / "single")
    print(f"## One prompt at a time\n\n{describe(single)}\n{to_markdown(single.summaries)}")
    print(f"### Acceptance by position\n\n{acceptance_table(single.summaries)}")
    batched = replace(config, temperatures=(0.0,), concurrency=arguments.at_once, against=())
    many = run_bench(engine, batched, models)
    save(many, arguments.out / "at-once")
    print(f"## {arguments.at_once} prompts at once\n\n{to_markdown(many.summaries)}")
    print(f"### Plain decoding, one and {arguments.at_once} at once\n\n{throughput_table(single, many)}")


if __name__ == "__main__":
    main()
