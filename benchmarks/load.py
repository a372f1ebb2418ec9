"""Throughput and latency of every block-size policy and every fixed block against plain decoding, under load.

python benchmarks/load.py --data-dir DIR --out load.json
python benchmarks/load.py --data-dir DIR --out quick.json --concurrency 1,8 --rounds 2 --tokens 16 --sizes 2,8

A closed loop: so many requests are always under way, math, code and prose in turn, every other one at T = 1; one that ends
is replaced. All cases run in turn in every round on the same prompts, and what is compared is the ratio to plain decoding of the
same round. Every round is saved; Ctrl-C prints what there is. On a machine that has other work, ``--cpu-time`` counts
CPU seconds of this process instead of wall time (one thread only).
"""

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PLAIN = "plain"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with gsm8k_test.jsonl and so on")
    parser.add_argument("--out", type=Path, default=Path("load.json"), help="where every round is saved")
    parser.add_argument("--concurrency", default="1,2,4,8,16,32,64", help="requests under way at once")
    parser.add_argument("--sizes", default="2,3,4,5,6,7,8", help="fixed blocks")
    parser.add_argument("--policies", default="goodput,feedback", help="other policies")
    parser.add_argument("--rounds", type=int, default=5, help="times that every case runs at every concurrency")
    parser.add_argument("--tokens", type=int, default=48, help="tokens measured a case, times the concurrency")
    parser.add_argument("--min-tokens", type=int, default=384, help="tokens measured a case, at least")
    parser.add_argument("--temperatures", default="0,1", help="taken by turns")
    parser.add_argument("--datasets", default="gsm8k,humaneval,mt-bench", help="taken by turns")
    parser.add_argument("--target", help="folder or hub name; by default the bundled pair")
    parser.add_argument("--drafter", help="folder of the target's drafter")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds; for a machine with other work")
    return parser.parse_args()


ARGS = arguments()
if ARGS.cpu_time:
    time.perf_counter = time.process_time

import torch  # noqa: E402

from volley import Engine, SamplingParams  # noqa: E402
from volley.bench.run import without_drafter  # noqa: E402
from volley.engine.pacing import make_policy  # noqa: E402
from volley.prompts import load_prompts  # noqa: E402

Asked = tuple[list[int], SamplingParams]


def workload(engine: Engine, count: int, seed: int) -> list[Asked]:
    """Prompts of all datasets in turn, temperatures in turn, answers of 32 to 96 tokens."""
    shuffle = random.Random(seed)
    sets = [load_prompts(name, ARGS.data_dir, 80) for name in ARGS.datasets.split(",")]
    temperatures = [float(t) for t in ARGS.temperatures.split(",")]
    asked: list[Asked] = []
    for index in range(count):
        chat = shuffle.choice(sets[index % len(sets)])
        length = shuffle.choice((32, 48, 64, 80, 96))
        temperature = temperatures[index // len(sets) % len(temperatures)]
        params = SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True)
        asked.append((engine.encode(list(chat.messages)), params))
    return asked


def run(engine: Engine, asked: list[Asked], concurrency: int, tokens: int) -> dict[str, Any]:
    """Keep ``concurrency`` requests under way until ``tokens`` are out, counted from when the first ones decode."""
    engine.reset_prefix_cache()
    queue = iter(asked)
    open_requests = [engine.add_request(*next(queue)) for _ in range(concurrency)]
    while any(request.num_output == 0 for request in open_requests):
        engine.step()
    every, ended, written = list(open_requests), [], 0
    before = sum(request.num_output for request in open_requests)
    started = time.perf_counter()
    while written < tokens:
        for request in engine.step():
            open_requests.remove(request)
            ended.append(request)
            open_requests.append(engine.add_request(*next(queue)))
            every.append(open_requests[-1])
        written = sum(request.num_output for request in every) - before
    seconds = time.perf_counter() - started
    for request in open_requests:
        engine.abort(request)
    lengths = [n for request in every for n in request.stats.accepted_lengths]
    blocks = [n for request in every for n in request.stats.block_sizes]
    per_token = [1e3 * request.stats.total_seconds / request.num_output for request in ended]
    return {
        "tokens_per_second": written / seconds,
        "tau": statistics.fmean(lengths),
        "verified": statistics.fmean(blocks),
        "latency_ms": statistics.median(per_token) if per_token else None,
        "ttft_ms": 1e3
        * statistics.median(request.stats.time_to_first_token for request in every[concurrency:] or every),
    }


def measure(engine: Engine, cases: list[str]) -> Iterator[dict[str, Any]]:
    plain = without_drafter(engine)
    policies = {case: make_policy(case, engine.drafter) for case in cases if case != PLAIN}
    for concurrency in map(int, ARGS.concurrency.split(",")):
        tokens = max(ARGS.tokens * concurrency, ARGS.min_tokens)
        for number in range(-1, ARGS.rounds):  # the first one warms up, and policies learn
            asked = workload(engine, 4 * concurrency + tokens // 8, seed=number)
            shift = number % len(cases)
            for case in cases[shift:] + cases[:shift]:
                if case != PLAIN:
                    engine.policy = policies[case]
                found = run(
                    plain if case == PLAIN else engine, asked, concurrency, tokens if number >= 0 else tokens // 2
                )
                if number >= 0:
                    yield {"concurrency": concurrency, "round": number, "case": case, **found}


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| at once | case | tokens/s | ratio to plain (quartiles) | ms/token | TTFT ms | τ | verified |"
    yield "|---|---|---|---|---|---|---|---|"
    groups: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["concurrency"], row["case"]].append(row)
    plain = {(row["concurrency"], row["round"]): row for row in rows if row["case"] == PLAIN}
    for (concurrency, case), found in groups.items():
        ratios = [
            row["tokens_per_second"] / plain[concurrency, row["round"]]["tokens_per_second"]
            for row in found
            if (concurrency, row["round"]) in plain
        ]
        spread = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        middle = {
            name: statistics.median([row[name] for row in found if row[name] is not None] or [0])
            for name in ("tokens_per_second", "latency_ms", "ttft_ms", "tau", "verified")
        }
        ratio = f"{spread[1]:.2f} ({spread[0]:.2f}–{spread[2]:.2f})" if spread else ""
        yield (
            f"| {concurrency} | {case} | {middle['tokens_per_second']:.1f} | {ratio} | {middle['latency_ms']:.1f} | "
            f"{middle['ttft_ms']:.0f} | {middle['tau']:.2f} | {middle['verified']:.2f} |"
        )


def main() -> None:
    torch.set_num_threads(ARGS.threads)
    engine = Engine.from_pretrained(ARGS.target, **({"drafter": ARGS.drafter} if ARGS.drafter else {}))
    cases = [PLAIN, *ARGS.policies.split(","), *(f"fixed:{size}" for size in ARGS.sizes.split(","))]
    rows: list[dict[str, Any]] = []
    try:
        for row in measure(engine, [case for case in cases if case not in ("", "fixed:")]):
            rows.append(row)
            ARGS.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
            print(f"{row['concurrency']} {row['case']} {row['tokens_per_second']:.1f} tokens/s", flush=True)
    except KeyboardInterrupt:
        print("interrupted; this is what was measured")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
