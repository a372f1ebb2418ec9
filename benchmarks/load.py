"""Throughput and latency of every block-size policy and every fixed block against plain decoding, under load.

python benchmarks/load.py --data-dir DIR --out load.json
python benchmarks/load.py --data-dir DIR --out quick.json --concurrency 1,8 --rounds 2 --tokens 500 --sizes 2,8

A closed loop: so many requests are always under way, math, code and prose in turn, every other one at T = 1; one that ends
is replaced, and the first ones are at all stages of their answers, so that prompts are read as evenly as in a long run. All
cases write the same number of tokens for the same prompts, by turns, a few at a time, so that a machine that is faster at one
minute than at the next is so for all of them; what is compared is the ratio to plain decoding of the same round. Every round is
saved; Ctrl-C prints what there is. Prompts that chose a setting must not report it: choose on the first 40 of each dataset (the
default), report with ``--skip-prompts 40``.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from volley import Engine, SamplingParams
from volley.policies.make import make_policy
from volley.procedures.request import Request
from volley.prompts import load_prompts

PLAIN = "plain"
TURNS = 40  # that the cases take in a round
PAGES_PER_REQUEST, PAGES_OF_LONGEST = 24, 40  # of 16 tokens: prompts and answers of these sets are shorter


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with gsm8k_test.jsonl and so on")
    parser.add_argument("--out", type=Path, default=Path("load.json"), help="where every round is saved")
    parser.add_argument("--concurrency", default="1,2,4,8,16,32,64", help="requests under way at once")
    parser.add_argument("--sizes", default="2,3,4,5,6,7,8", help="fixed blocks")
    parser.add_argument("--policies", default="goodput,feedback", help="other policies")
    parser.add_argument("--rounds", type=int, default=3, help="times that every case runs at every concurrency")
    parser.add_argument("--tokens", type=int, default=1500, help="of a round; at least 100 a request that is under way")
    parser.add_argument("--temperatures", default="0,1", help="taken by turns")
    parser.add_argument("--datasets", default="gsm8k,humaneval,mt-bench", help="taken by turns")
    parser.add_argument("--num-prompts", type=int, default=40, help="of each dataset")
    parser.add_argument("--skip-prompts", type=int, default=0, help="of each; 40 to report, 0 to choose a setting")
    parser.add_argument("--target", help="folder or hub name; by default the bundled pair")
    parser.add_argument("--drafter", help="folder of the target's drafter")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


ARGS = arguments()
Asked = tuple[list[int], SamplingParams]


def workload(engine: Engine, count: int, seed: int) -> list[Asked]:
    """Prompts of all datasets in turn, temperatures in turn, answers of 32 to 96 tokens."""
    shuffle = random.Random(seed)
    limit = ARGS.skip_prompts + ARGS.num_prompts
    sets = [load_prompts(name, ARGS.data_dir, limit)[ARGS.skip_prompts :] for name in ARGS.datasets.split(",")]
    temperatures = [float(t) for t in ARGS.temperatures.split(",")]
    asked: list[Asked] = []
    for index in range(count):
        chat = shuffle.choice(sets[index % len(sets)])
        length = shuffle.choice((32, 48, 64, 80, 96))
        temperature = temperatures[index // len(sets) % len(temperatures)]
        params = SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True)
        asked.append((engine.encode(list(chat.messages)), params))
    return asked


class Case:
    """One way of deciding, with an engine and a closed loop of its own; its clock stands still while another case runs.

    The loop begins as if it had long been going on: the first requests are at all stages of their answers.
    """

    def __init__(self, name: str, pair: Engine, concurrency: int, asked: list[Asked]) -> None:
        self.name = name
        drafter = None if name == PLAIN else pair.drafter
        policy = None if name == PLAIN else make_policy(name, drafter)
        pages = PAGES_OF_LONGEST + concurrency * PAGES_PER_REQUEST
        self.engine = Engine(pair.target, drafter, policy=policy, num_pages=pages, prefix_caching=False)
        self.open: list[Request] = []
        self.queue = iter(asked)
        self.begun: dict[int, float] = {}  # by request, on this case's clock
        self.seconds, self.written = 0.0, 0
        shuffle = random.Random(0)
        for _ in range(concurrency):
            prompt, params = next(self.queue)
            self.add(prompt, replace(params, max_tokens=shuffle.randint(1, params.max_tokens)))
        self.count()

    def count(self) -> None:
        """Forget what was measured so far."""
        self.seconds_before, self.written_before = self.seconds, self.written
        self.first_tokens: list[float] = []
        self.per_token: list[float] = []
        self.lengths: list[int] = []
        self.blocks: list[int] = []

    def add(self, prompt: list[int], params: SamplingParams) -> None:
        request = self.engine.add_request(prompt, params)
        self.open.append(request)
        self.begun[request.request_id] = self.seconds

    def advance(self, written: int) -> None:
        """Steps until so many tokens have been written in all."""
        while self.written < written:
            before = sum(request.num_output for request in self.open)
            fresh = [request for request in self.open if request.num_output == 0]
            started = time.perf_counter()
            finished = self.engine.step()
            self.seconds += time.perf_counter() - started
            self.written += sum(request.num_output for request in self.open) - before
            self.first_tokens += [self.seconds - self.begun[r.request_id] for r in fresh if r.num_output]
            for request in finished:
                self.open.remove(request)
                self.per_token.append((self.seconds - self.begun[request.request_id]) / request.num_output)
                self.lengths += request.stats.accepted_lengths
                self.blocks += request.stats.block_sizes
                self.add(*next(self.queue))

    def found(self) -> dict[str, Any]:
        return {
            "tokens_per_second": (self.written - self.written_before) / (self.seconds - self.seconds_before),
            "tau": statistics.fmean(self.lengths) if self.lengths else None,
            "verified": statistics.fmean(self.blocks) if self.blocks else None,
            "latency_ms": 1e3 * statistics.median(self.per_token) if self.per_token else None,
            "ttft_ms": 1e3 * statistics.median(self.first_tokens) if self.first_tokens else None,
        }


def measure(pair: Engine, names: list[str]) -> Iterator[dict[str, Any]]:
    order = random.Random(0)
    for concurrency in map(int, ARGS.concurrency.split(",")):
        cases: list[Case] = []  # the last ones' memory first
        gc.collect()
        tokens = max(ARGS.tokens, 100 * concurrency)
        asked = workload(pair, 3 * concurrency + (ARGS.rounds + 1) * tokens // 32, seed=concurrency)
        cases += [Case(name, pair, concurrency, asked) for name in names]
        for turn in range(TURNS // 2 + ARGS.rounds * TURNS):  # half a round to warm up, and for policies to learn
            number, part = divmod(turn - TURNS // 2, TURNS)
            for case in order.sample(cases, len(cases)):
                case.advance((turn + 1) * tokens // TURNS)
            if part == TURNS - 1:
                for case in cases:
                    if number >= 0:
                        yield {"concurrency": concurrency, "round": number, "case": case.name, **case.found()}
                    case.count()


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
