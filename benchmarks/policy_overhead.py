"""What a policy costs: the time in each step of deciding, trimming and observing, and of the confidences it asks for, as a share
of the step. Deciding includes the search of each text for what may be copied; observing includes the cost tables.

    python benchmarks/policy_overhead.py --prompts held-out.jsonl --concurrency 1,8,32

Policies take turns on the same prompts; the first turn warms up and is not counted. ``--cpu-time`` counts CPU seconds of this
process, for a machine with other work. The pilot is one of the default size that has learnt nothing. Passes of a size that was
never met before are timed once for the cost table, and never again: that is told apart. Prints a Markdown table, the rows of
one concurrency at a time.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="JSONL of prompts")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--policies", default="fixed,feedback,goodput,pilot")
    parser.add_argument("--cycles", type=int, default=100, help="decoding steps counted in each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true")
    return parser.parse_args()


ARGS = arguments()
if ARGS.cpu_time:
    time.perf_counter = time.process_time

import torch  # noqa: E402

from volley import Engine, SamplingParams  # noqa: E402
from volley.engine import runner  # noqa: E402
from volley.models.drafters.pilot import PilotConfig, net_for  # noqa: E402
from volley.policies.make import make_policy  # noqa: E402
from volley.policies.pilot import Pilot  # noqa: E402
from volley.procedures.request import Request  # noqa: E402
from volley.prompts import load_prompts  # noqa: E402
from volley.proposers import block  # noqa: E402
from volley.train.options import PilotOptions  # noqa: E402

PARTS = ("decide", "trim", "observe", "confidences")
REHEARSED = "rehearsed"  # timing passes, in the middle of some part


def watch(engine: Engine) -> dict[str, float]:
    """Seconds spent in each part of ``engine`` that works for its policy, growing as it steps, and in rehearsal."""
    seconds: dict[str, float] = defaultdict(float)
    looks = [time.perf_counter() for _ in range(1001)]
    clock = (looks[-1] - looks[0]) / 1000  # looking at it takes time too

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            started, rehearsed = time.perf_counter(), seconds[REHEARSED]
            found = call(*args)
            seconds[name] += time.perf_counter() - started - clock - (seconds[REHEARSED] - rehearsed)
            return found

        return wrapper

    for module in (runner, block):
        module.fastest = timed(REHEARSED, module.fastest)
    for name in ("decide", "trim", "observe"):
        setattr(engine.pacing, name, timed(name, getattr(engine.pacing, name)))
    block._note_confidence = timed("confidences", block._note_confidence)
    return seconds


def turn(
    engine: Engine, prompts: list[list[int]], seconds: dict[str, float], concurrency: int
) -> tuple[dict[str, float], float]:
    """Seconds of each part and of all steps, with ``concurrency`` requests under way at once, half of them sampled."""
    engine.reset_prefix_cache()
    queue = iter(prompts * 20)
    requests: list[Request] = []

    def add() -> None:
        params = SamplingParams(temperature=float(len(requests) % 2), max_tokens=64, ignore_eos=True)
        requests.append(engine.add_request(next(queue), params))

    for _ in range(concurrency):
        add()
    while not all(request.num_output for request in requests):
        engine.step()
    before, total = dict(seconds), 0.0
    for _ in range(ARGS.cycles):
        started, rehearsed = time.perf_counter(), seconds[REHEARSED]
        ended = engine.step()
        total += time.perf_counter() - started - (seconds[REHEARSED] - rehearsed)
        for _ in ended:
            add()
    spent = {name: seconds[name] - before.get(name, 0.0) for name in PARTS}
    for request in requests:
        engine.abort(request)
    return spent, total


def row(names: str, results: list[tuple[dict[str, float], float]]) -> str:
    steps, total = len(results) * ARGS.cycles, sum(total for _, total in results)
    spent = {part: sum(own[part] for own, _ in results) for part in PARTS}
    cells = " | ".join(f"{1e6 * spent[part] / steps:.0f}" for part in PARTS)
    return f"| {names} | {1e3 * total / steps:.1f} | {cells} | {sum(spent.values()) / total:.2%} |"


def untrained(engine: Engine) -> Pilot:
    assert engine.drafter is not None
    shape = PilotOptions(prompts=("-",))
    sizes = shape.block_sizes(engine.drafter.config.block_size)
    config = PilotConfig(drafter="", input="top", block_sizes=sizes, width=shape.width, layers=shape.layers)
    return Pilot(config, net_for(config, engine.drafter))


def main() -> None:
    torch.set_num_threads(ARGS.threads)
    engine = Engine.from_pretrained(policy="fixed")
    prompts = [engine.encode(list(chat.messages)) for chat in load_prompts(ARGS.prompts, limit=64)]
    seconds = watch(engine)
    names = ARGS.policies.split(",")
    policies = {name: untrained(engine) if name == "pilot" else make_policy(name, engine.drafter) for name in names}
    print("| at once | policy | step ms | decide µs | trim µs | observe µs | confidences µs | share |")
    print("|---|---|---|---|---|---|---|---|")
    for concurrency in map(int, ARGS.concurrency.split(",")):
        found: dict[str, list[tuple[dict[str, float], float]]] = {name: [] for name in names}
        for number in range(-1, ARGS.rounds):
            for name in names:
                engine.policy = policies[name]
                result = turn(engine, prompts, seconds, concurrency)
                if number >= 0:
                    found[name].append(result)
        for name, results in found.items():
            print(row(f"{concurrency} | {name}", results), flush=True)
    print(f"\n{seconds[REHEARSED]:.2f} s in all went into timing passes, once for each size.")


if __name__ == "__main__":
    main()
