"""Number of threads by the cores that other processes leave free.

A parallel loop ends with its slowest thread. If one thread shares a core with another process, the others wait at the end of each
loop until that process is descheduled: beside a busy process two threads are slower than one. Linux's ``/proc/stat`` reports how
much other processes compute; on other systems all threads are used.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

_SAMPLED = 0.1  # seconds between two measurements of other processes
_PERIOD = 0.5  # seconds of computing over which they are averaged
_PAUSE = 0.02  # seconds without computing after which a measurement is dropped: others may have used the pause
_WATCHED = 0.05
_TICK = 100  # ticks per second of the system's counters
_ON_LINUX = sys.platform == "linux"


class CpuTime(NamedTuple):
    """CPU time so far in seconds."""

    everyone: float
    """CPU time of all processes on the cores that this one may run on, except those with lower priority (``nice``)."""
    own: float
    """CPU time of this process."""


def read_cpu_time(stat: Path = Path("/proc/stat")) -> CpuTime | None:
    """Return the CPU time, to 10 ms, from the system's counters; ``None`` if there are none."""
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    is_nice, ticks = os.getpriority(os.PRIO_PROCESS, 0) > 0, 0
    for name, *counted in map(str.split, lines):
        if name in names:
            user, nice, system = map(int, counted[:3])
            ticks += user + system + nice * is_nice
    return CpuTime(ticks / _TICK, time.process_time())


class Cores:
    """Estimate of the cores that other processes leave to this one, from their recent CPU time."""

    def __init__(
        self,
        count: int | None = None,
        read: Callable[[], CpuTime | None] = read_cpu_time,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create the estimate. ``count`` is the number of cores that this process may run on."""
        self._count = count or (len(os.sched_getaffinity(0)) if _ON_LINUX else os.cpu_count() or 1)
        self._read, self._clock = read, clock
        self._ended = self._looked = -math.inf
        self._before: CpuTime | None = None
        self._seconds = self._others = self._taken = 0.0

    def begin(self, most: int) -> int:
        """Return the number of threads, at most ``most``, for work that begins now; :meth:`end` is called after it."""
        now = self._clock()
        is_pause = now - self._ended > _PAUSE
        if is_pause or now - self._looked >= _SAMPLED:
            self._measure(now, counts=not is_pause)
        if self._seconds >= _PERIOD:
            self._conclude()
        return max(min(most, int(self._count - self._taken + 0.5)), 1)

    def end(self) -> None:
        """Record that work has ended."""
        self._ended = self._clock()

    def watch(self, wait: Callable[[float], None] = time.sleep) -> None:
        """Measure other processes briefly before this process begins to compute."""
        self._measure(self._clock(), counts=False)
        wait(_WATCHED)
        self._seconds = self._others = 0.0
        self._measure(self._clock(), counts=True)
        self._conclude()

    def _measure(self, now: float, *, counts: bool) -> None:
        usage, before = self._read(), self._before
        if counts and usage is not None and before is not None:
            self._seconds += now - self._looked
            self._others += usage.everyone - before.everyone - (usage.own - before.own)
        self._looked, self._before = now, usage

    def _conclude(self) -> None:
        if self._seconds > 0:
            self._taken = max(self._others, 0.0) / self._seconds
        self._seconds = self._others = 0.0


CORES = Cores()
"""Estimate for this process, shared by all its threads."""
_lowered: list[int] = []
"""PyTorch's number of threads in each thread that uses fewer at the moment. New threads inherit the smaller number, so this
keeps the true one."""


@contextmanager
def shared_cores(*, watch: bool = False) -> Iterator[None]:
    """Let PyTorch and volley's kernels use fewer threads in this context if other processes keep cores busy.

    PyTorch's own number is the maximum. ``watch`` measures other processes first, which takes 0.05 s. If CUDA computes, the
    number is unchanged.
    """
    most = max([torch.get_num_threads(), *_lowered])
    if most == 1 or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield
        return
    if watch:
        CORES.watch()
    if (threads := CORES.begin(most)) < most:
        _lowered.append(most)
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if threads < most:
            torch.set_num_threads(most)
            _lowered.remove(most)
        CORES.end()
