"""Loading and decoding beside processes that compute all the while: as many threads as they leave cores for, or always as many.

    python -m benchmarks.beside_busy --busy 0,1,2 --threads 2
    python -m benchmarks.beside_busy --target runs/pair-0.6b/target --drafter runs/pair-0.6b/drafter --weights int8 --tokens 48

Each row is a process of its own; rows of the same number of busy processes follow one another. The first answer is for warming
up. ``--nice`` is that of volley's process beside the busy ones: 5 gives them three quarters of a shared core.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from volley.files import REFERENCE

CHAT = [{"role": "user", "content": "How do I use `tar` to make an archive?"}]


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Seconds of loading, tokens a second of each answer, and the threads that steps had."""
    os.nice(options.nice)
    from volley.imports import import_transformers

    import_transformers()
    import torch

    from volley import Engine, SamplingParams, cores

    if options.row == "always":
        cores.CORES = cores.Cores(10**6)  # so many that others never matter
    torch.set_num_threads(options.threads)
    started = time.perf_counter()
    drafter = None if options.drafter == "none" else options.drafter
    engine = Engine.from_pretrained(options.target, drafter, weights=options.weights)
    loading, rates, used = time.perf_counter() - started, list[float](), set[int]()
    engine.on_verified.append(lambda *_: used.add(torch.get_num_threads()))
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    for answer in range(1 + options.repeats):
        started = time.perf_counter()
        next(engine.generate([CHAT], params))
        if answer:
            rates.append(options.tokens / (time.perf_counter() - started))
    return {"load": loading, "rates": rates, "used": sorted(used)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(REFERENCE / "target"))
    parser.add_argument("--drafter", default=str(REFERENCE / "drafter"), help="or none")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--busy", default="0,1", help="numbers of busy processes")
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--row", choices=("always", "most"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure(options)))
        return
    print("| busy processes | threads | load, s | tokens/s (range) | threads used |\n|---|---|---|---|---|")
    rows = [("1", 1, "always"), (f"always {options.threads}", options.threads, "always")]
    rows.append((f"at most {options.threads}", options.threads, "most"))
    for busy in map(int, options.busy.split(",")):
        for name, threads, row in rows:
            own = ["--row", row, "--threads", str(threads)]  # the last ones count
            with busy_processes(busy):
                command = [sys.executable, "-m", "benchmarks.beside_busy", *sys.argv[1:], *own]
                found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rates, used = found["rates"], "–".join(map(str, found["used"]))
            spread = f"{statistics.median(rates):.1f} ({min(rates):.1f}–{max(rates):.1f})"
            print(f"| {busy} | {name} | {found['load']:.2f} | {spread} | {used} |", flush=True)


if __name__ == "__main__":
    main()
