"""What the host leaves a GPU without work between two steps, found without a GPU.

    python -m benchmarks.step_gap                          a table
    python -m benchmarks.step_gap --requests 1 8 --ms 4    other numbers of requests, and milliseconds of a plain pass
    python -m benchmarks.step_gap --json OUT               the figures as JSON too

The host does all that it does on a GPU: it schedules, describes passes, commits and makes texts. A pass takes the path of CUDA
graphs and computes nothing: it keeps a clock busy for so many milliseconds, behind the passes that were launched before. Reading
its tokens waits until it is over. What a step takes beyond its passes is the gap, with the next ones launched behind the read of
the last or ahead of it (``engine/ahead.py``). Steps of plain decoding and of chains are timed; all of a draft is accepted.
The defaults are the floors of Qwen3-8B and of a published drafter (``gpu_ready.py``). Launches of a driver, copies from pinned
memory and what a device does between two passes are not in it.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_ready import DRAFTERS, draft_seconds, models, target_seconds
from volley import Engine, SamplingParams
from volley.decode import late
from volley.engine import capacity
from volley.files import write_atomically
from volley.memory.device import Device
from volley.memory.kernels import launching
from volley.models.targets.target import Target

CHAIN = 5
"""Tokens of a draft, so that those of 32 requests fit into a pass through graphs."""


class Clock:
    """A device that only takes time: each pass begins when it is launched and the one before is over.

    Passes take ``seconds`` in turn: those of a step, in their order.
    """

    def __init__(self) -> None:
        self.seconds, self.free = itertools.repeat(0.0), 0.0

    def capture(self, run: Callable[[], object], device: torch.device) -> Callable[[], None]:
        """In place of ``launching.capture``."""
        return self.launch

    def launch(self) -> None:
        self.free = max(self.free, time.perf_counter()) + next(self.seconds)

    def download(self, values: Tensor) -> Any:
        """In place of ``Download``: the values are there when what was launched so far is over."""
        return _Coming(values, self.free)


class _Coming:
    def __init__(self, values: Tensor, ready: float) -> None:
        self._values, self._ready = values, ready

    def tolist(self) -> list[Any]:
        while time.perf_counter() < self._ready:
            pass
        values: list[Any] = self._values.tolist()
        return values


def step_times(
    requests: int, seconds: Sequence[float], steps: int, params: SamplingParams, *, block: int, is_ahead: bool
) -> list[float]:
    """Seconds of each of some steps in which all requests decode, with passes of ``seconds``."""
    clock = Clock()
    with (
        mock.patch.object(capacity, "find_device", return_value=Device("cuda")),
        mock.patch.object(launching, "capture", clock.capture),
        mock.patch.object(late, "Download", clock.download),
    ):
        model, drafter = models(2, 1)
        pages = {"num_pages": 8192, "max_batch_tokens": 4096}
        engine = Engine(Target(model), drafter if block > 1 else None, policy=f"fixed:{block}", **pages)
        engine.ahead.is_used = is_ahead
        if engine.proposer is not None:
            engine.proposer.drafts_late = True  # as on a GPU
        for number in range(requests):
            engine.add_request([(number + i) % 64 for i in range(200)], params)
        while not all(own.num_output > 3 for own in engine.scheduler.running) or engine.scheduler.waiting:
            engine.step()
        clock.seconds, found = itertools.cycle(seconds), []
        for _ in range(steps + 3):
            started = time.perf_counter()
            engine.step()
            found.append(time.perf_counter() - started)
        return found[3:]


def gaps(requests: Sequence[int], plain: float, draft: float, steps: int) -> Iterator[dict[str, Any]]:
    """Medians in microseconds beyond the passes."""
    kinds = [
        (f"{kind}, T = {temperature:g}", temperature, block)
        for kind, block in (("plain", 1), (f"chains of {CHAIN}", 1 + CHAIN))
        for temperature in (0.0, 1.0)
    ]
    for (kind, temperature, block), count in itertools.product(kinds, requests):
        row: dict[str, Any] = {"kind": kind, "requests": count}
        seconds = [plain] if block == 1 else [draft, plain]
        for name, is_ahead in (("behind", False), ("ahead", True)):
            params = SamplingParams(max_tokens=(steps + 40) * block, ignore_eos=True, temperature=temperature)
            found = step_times(count, seconds, steps, params, block=block, is_ahead=is_ahead)
            row[name] = 1e6 * (median(found) - sum(seconds))
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--ms", type=float, default=1e3 * target_seconds(1, 1024), help="milliseconds of the target's pass"
    )
    layers, head_rows = next(iter(DRAFTERS.values()))  # the published one
    published = 1e3 * draft_seconds(layers, 1024, head_rows)
    parser.add_argument("--draft-ms", type=float, default=published, help="of a draft and its drafter's K/V")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path, help="where the figures go as JSON")
    options = parser.parse_args()
    table = []
    print(
        f"The target's pass takes {options.ms:.2f} ms, a draft {options.draft_ms:.2f}. Microseconds of a step beyond them:\n"
    )
    print("| step | requests | launched behind the read | ahead of it |\n|---|---|---|---|")
    for row in gaps(options.requests, options.ms / 1e3, options.draft_ms / 1e3, options.steps):
        print("| {kind} | {requests} | {behind:.0f} | {ahead:.0f} |".format(**row), flush=True)
        table.append(row)
    if options.json is not None:
        write_atomically(options.json, json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
