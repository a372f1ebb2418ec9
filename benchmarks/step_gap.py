"""What the host leaves a GPU without work between two plain steps, found without a GPU.

    python -m benchmarks.step_gap                          a table
    python -m benchmarks.step_gap --requests 1 8 --ms 4    other numbers of requests, and milliseconds of a pass
    python -m benchmarks.step_gap --json OUT               the figures as JSON too

The host does all that it does on a GPU: it schedules, describes passes, commits and makes texts. A pass takes the path of CUDA
graphs and computes nothing: it keeps a clock busy for so many milliseconds, behind the passes that were launched before. Reading
its tokens waits until it is over. What a step takes beyond its pass is the gap, with the next pass launched behind the read of
the last one or ahead of it (``engine/ahead.py``). The default length is the floor of a plain pass of Qwen3-8B (``gpu_ready.py``).
Launches of a driver, copies from pinned memory and what a device does between two passes are not in it.
"""

import argparse
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

from benchmarks.gpu_ready import models, target_seconds
from volley import Engine, SamplingParams
from volley.decode import late
from volley.engine import capacity
from volley.files import write_atomically
from volley.memory.device import Device
from volley.memory.kernels import launching
from volley.models.targets.target import Target


class Clock:
    """A device that only takes time: each pass begins when it is launched and the one before is over."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.free = seconds, 0.0

    def capture(self, run: Callable[[], object], device: torch.device) -> Callable[[], None]:
        """In place of ``launching.capture``."""
        return self.launch

    def launch(self) -> None:
        self.free = max(self.free, time.perf_counter()) + self.seconds

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


def step_times(requests: int, seconds: float, steps: int, params: SamplingParams, *, is_ahead: bool) -> list[float]:
    """Seconds of each of some steps in which all requests decode."""
    clock = Clock(0.0)
    with (
        mock.patch.object(capacity, "find_device", return_value=Device("cuda")),
        mock.patch.object(launching, "capture", clock.capture),
        mock.patch.object(late, "Download", clock.download),
    ):
        engine = Engine(Target(models(2, 1)[0]), num_pages=8192, max_batch_tokens=4096)
        engine.ahead.is_used = is_ahead
        for number in range(requests):
            engine.add_request([(number + i) % 64 for i in range(200)], params)
        while not all(own.num_output > 3 for own in engine.scheduler.running) or engine.scheduler.waiting:
            engine.step()
        clock.seconds, found = seconds, []
        for _ in range(steps + 3):
            started = time.perf_counter()
            engine.step()
            found.append(time.perf_counter() - started)
        return found[3:]


def gaps(requests: Sequence[int], seconds: float, steps: int) -> Iterator[dict[str, Any]]:
    """Medians in microseconds beyond the pass."""
    for temperature in (0.0, 1.0):
        for count in requests:
            row: dict[str, Any] = {"requests": count, "temperature": temperature}
            for name, is_ahead in (("behind", False), ("ahead", True)):
                params = SamplingParams(max_tokens=steps + 40, ignore_eos=True, temperature=temperature)
                found = step_times(count, seconds, steps, params, is_ahead=is_ahead)
                row[name] = 1e6 * (median(found) - seconds)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--ms", type=float, default=1e3 * target_seconds(1, 1024), help="milliseconds of a pass")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path, help="where the figures go as JSON")
    options = parser.parse_args()
    table = []
    print(f"A pass takes {options.ms:.2f} ms. Microseconds of a step beyond it:\n")
    print("| requests | temperature | launched behind the read | ahead of it |\n|---|---|---|---|")
    for row in gaps(options.requests, options.ms / 1e3, options.steps):
        print("| {requests} | {temperature:g} | {behind:.0f} | {ahead:.0f} |".format(**row), flush=True)
        table.append(row)
    if options.json is not None:
        write_atomically(options.json, json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
