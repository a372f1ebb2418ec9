"""As many threads as other processes leave cores for.

A parallel loop ends with its slowest thread. Where one of them shares a core with another process, the others wait at the end of
each loop until that process is put aside: beside a busy process two threads are slower than one. How much other processes compute
is in Linux's ``/proc/stat``; elsewhere all threads are used.
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

_SAMPLED = 0.1  # seconds between two looks at what others compute
_PERIOD = 0.5  # seconds of computing over which that is averaged
_PAUSE = 0.02  # seconds without computing: what others did meanwhile, perhaps in turns with this process, says nothing
_WATCHED = 0.05
_TICK = 100  # of the system's clock in a second, as all its counters are given
_ON_LINUX = sys.platform == "linux"


class CpuTime(NamedTuple):
    """Seconds of CPU time so far."""

    everyone: float
    """Of all processes on the cores that this one may run on; without those that give way to it (``nice``)."""
    own: float
    """Of this process."""


def read_cpu_time(stat: Path = Path("/proc/stat")) -> CpuTime | None:
    """What was computed, to 10 ms, from the system's file of counters; ``None`` where there is none."""
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
    """How many cores others leave to this process, from what they computed beside it of late."""

    def __init__(
        self,
        count: int | None = None,
        read: Callable[[], CpuTime | None] = read_cpu_time,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``count``: the cores that this process may run on."""
        self._count = count or (len(os.sched_getaffinity(0)) if _ON_LINUX else os.cpu_count() or 1)
        self._read, self._clock = read, clock
        self._ended = self._looked = -math.inf
        self._before: CpuTime | None = None
        self._seconds = self._others = self._taken = 0.0

    def begin(self, most: int) -> int:
        """How many threads to use of ``most`` for the work that begins now; :meth:`end` is called after it."""
        now = self._clock()
        is_pause = now - self._ended > _PAUSE
        if is_pause or now - self._looked >= _SAMPLED:
            self._look(now, counts=not is_pause)
        if self._seconds >= _PERIOD:
            self._conclude()
        return max(min(most, int(self._count - self._taken + 0.5)), 1)

    def end(self) -> None:
        """Note that work has ended."""
        self._ended = self._clock()

    def watch(self, wait: Callable[[float], None] = time.sleep) -> None:
        """See for a moment what others compute, before this process begins to."""
        self._look(self._clock(), counts=False)
        wait(_WATCHED)
        self._seconds = self._others = 0.0
        self._look(self._clock(), counts=True)
        self._conclude()

    def _look(self, now: float, *, counts: bool) -> None:
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
"""Those of this process, whatever its threads do."""
_lowered: list[int] = []
"""What PyTorch had in threads that use fewer at this moment. A new thread begins with fewer, though it may have as many."""


@contextmanager
def shared_cores(*, watch: bool = False) -> Iterator[None]:
    """Let PyTorch and volley's kernels use fewer threads inside where other processes keep cores busy.

    The number that PyTorch has is the most. ``watch``: see first what others do, which takes 0.05 s. Where CUDA computes all
    threads stay.
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
