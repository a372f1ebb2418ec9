"""Chains against draft trees on the bundled pair: τ, and what a cycle costs. Cases take turns on every prompt.

    python benchmarks/trees.py --data-dir DIR --out bench/trees --num-prompts 7 --max-tokens 128 --repeats 2

``--num-prompts`` is of each dataset. All runs are saved under ``--out``, also those before a Ctrl-C. Prints a Markdown table;
"gain" is tokens per second against the chain of the same block size.
"""

import argparse
from pathlib import Path

import torch

from volley import Engine
from volley.bench.report import Report, Summary
from volley.bench.run import run_bench, save
from volley.bench.tasks import PLAIN, BenchConfig
from volley.engine.engine import REFERENCE


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder with the datasets' files; without it the hub")
    parser.add_argument("--out", type=Path, default=Path("bench/trees"), help="folder for the full report")
    parser.add_argument("--target", default=str(REFERENCE / "target"))
    parser.add_argument("--drafter", default=str(REFERENCE / "drafter"))
    parser.add_argument("--block-sizes", default="8")
    parser.add_argument("--tree-nodes", default="0,8,12,16,24,32", help="0 is the chain")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--num-prompts", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--threads", type=int, default=None)
    return parser.parse_args()


def to_table(report: Report) -> str:
    """One row per temperature and case, all datasets together."""
    lines = [
        "| T | decoding | τ | tokens/s | gain | speedup | T_draft ms | T_verify ms | cycle ms |",
        "|---|" + "---|" * 8,
    ]
    pooled = [s for s in report.summaries if s.dataset == "all"]
    chains = {
        (s.temperature, s.case.decoding.block_size): s
        for s in pooled
        if s.case.decoding.tree_nodes is None and s.case != PLAIN
    }
    lines += [_row(s, chains.get((s.temperature, s.case.decoding.block_size))) for s in pooled]
    return "\n".join(lines)


def _row(s: Summary, chain: Summary | None) -> str:
    rate = s.tokens_per_second.median
    gain = f"{s.speedup / chain.speedup:.2f}" if chain is not None else ""
    return (
        f"| {s.temperature:g} | {s.case.label} | {s.acceptance_length:.3f} | {rate:.1f} | {gain} | {s.speedup:.2f} "
        f"| {s.draft_ms:.2f} | {s.verify_ms:.2f} | {s.cycle_ms:.2f} |"
    )


def main() -> None:
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    engine = Engine.from_pretrained(arguments.target, arguments.drafter, policy="fixed")
    config = BenchConfig(
        data_dir=arguments.data_dir,
        num_prompts=arguments.num_prompts,
        block_sizes=tuple(map(int, arguments.block_sizes.split(","))),
        tree_nodes=tuple(map(int, arguments.tree_nodes.split(","))),
        temperatures=tuple(map(float, arguments.temperatures.split(","))),
        max_tokens=arguments.max_tokens,
        repeats=arguments.repeats,
        concurrency=arguments.concurrency,
    )
    models = {"target": arguments.target, "drafter": arguments.drafter, "path": arguments.target}
    report = run_bench(engine, config, models)
    save(report, arguments.out)
    print(", ".join(f"{name} {value}" for name, value in report.machine.items()) + "\n")
    print(to_table(report) + ("\n\n**Interrupted.**" if report.measurements.partial else ""))


if __name__ == "__main__":
    main()
