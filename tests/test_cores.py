"""Threads give way to other processes: scripted use of cores, then a busy process beside an engine."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiles import needs_kernels
from volley import Engine, SamplingParams
from volley.cores import Cores, CpuTime, read_cpu_time, shared_cores
from volley.models.targets.diffusion import load_target
from volley.models.targets.target import Target

CHAT = [{"role": "user", "content": "How do I use `grep`?"}]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="what others compute is read from /proc/stat")


class Scripted:
    """A clock and what processes computed until then."""

    def __init__(self) -> None:
        self.now = self.everyone = self.own = 0.0

    def pass_by(self, seconds: float, *, others: float, own: float) -> None:
        """``others`` and ``own`` are cores in use."""
        self.now += seconds
        self.own += seconds * own
        self.everyone += seconds * (others + own)

    def cores(self, count: int) -> Cores:
        return Cores(count, lambda: CpuTime(self.everyone, self.own), lambda: self.now)


@contextmanager
def threads(most: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(most)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def all_cores_busy() -> Iterator[None]:
    """A process for each core that computes all the while."""
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in os.sched_getaffinity(0)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it has begun
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def work(script: Scripted, cores: Cores, seconds: float, *, others: float, own: float) -> int:
    """Steps of 0.05 s; the threads of the last."""
    found = 0
    for _ in range(round(seconds / 0.05)):
        found = cores.begin(4)
        script.pass_by(0.05, others=others, own=own)
        cores.end()
    return found


@pytest.mark.parametrize(
    ("others", "expected"), [(0.0, 4), (0.4, 4), (0.6, 3), (1.0, 3), (2.0, 2), (3.0, 1), (4.0, 1), (9.0, 1)]
)
def test_threads_are_as_many_as_others_leave_cores_for(others: float, expected: int) -> None:
    script = Scripted()
    cores = script.cores(4)
    assert cores.begin(4) == 4  # nothing is known yet
    assert work(script, cores, 1.0, others=others, own=2.0) == expected
    assert cores.begin(2) == min(expected, 2)


def test_threads_come_back_when_others_are_done() -> None:
    script = Scripted()
    cores = script.cores(2)
    load = [(0.0, 2.0), (0.75, 1.25), (1.0, 1.0), (0.0, 1.0), (0.0, 2.0)]
    assert [work(script, cores, 1.1, others=others, own=own) for others, own in load] == [2, 1, 1, 2, 2]


def test_what_others_compute_in_turns_with_this_process_does_not_count() -> None:
    script = Scripted()
    cores = script.cores(2)
    for _ in range(20):
        assert work(script, cores, 0.3, others=0.0, own=2.0) == 2
        script.pass_by(0.3, others=2.0, own=0.0)


def test_short_work_adds_up() -> None:
    script = Scripted()
    cores = script.cores(2)
    found = []
    for _ in range(8):
        found.append(work(script, cores, 0.3, others=1.0, own=1.0))
        script.pass_by(10.0, others=0.0, own=0.0)
    assert (found[0], found[-1]) == (2, 1)


def test_before_any_work_a_moment_says_what_others_do() -> None:
    script = Scripted()
    cores = script.cores(2)
    cores.watch(lambda seconds: script.pass_by(seconds, others=1.0, own=0.0))
    assert cores.begin(2) == 1
    cores.watch(lambda seconds: script.pass_by(seconds, others=0.0, own=0.0))
    assert cores.begin(2) == 2


def test_where_nothing_is_known_all_threads_are_used() -> None:
    script = Scripted()
    cores = Cores(2, lambda: None, lambda: script.now)
    cores.watch(lambda seconds: script.pass_by(seconds, others=2.0, own=0.0))
    assert work(script, cores, 3.0, others=2.0, own=0.0) == 2


@on_linux
def test_the_system_counts_for_each_core(tmp_path: Path) -> None:
    """Times of each core: user, nice, system, idle. Processes that give way count for one that gives way, too."""
    stat = tmp_path / "stat"
    rows = [f"cpu{core} 1000 200 30 99999 7 0 0" for core in os.sched_getaffinity(0)]
    stat.write_text("\n".join(["cpu  9 9 9 9", *rows, "cpu99999 5 5 5 5", "intr 5 5", ""]))
    found = read_cpu_time(stat)
    assert found is not None
    is_nice = os.getpriority(os.PRIO_PROCESS, 0) > 0
    assert found.everyone == pytest.approx(len(rows) * (12.3 if is_nice else 10.3))
    assert 0 < found.own <= time.process_time()
    assert read_cpu_time(tmp_path / "nothing") is None


@on_linux
def test_what_others_compute_is_seen() -> None:
    """Reads the clock."""
    with all_cores_busy():
        before = read_cpu_time()
        time.sleep(0.5)
        after = read_cpu_time()
    assert before is not None
    assert after is not None
    assert after.everyone - before.everyone > after.own - before.own + 0.2


@on_linux
def test_threads_are_lowered_inside_and_a_new_thread_learns_no_lower_number() -> None:
    """Reads the clock."""
    found: dict[str, int] = {}

    def elsewhere() -> None:
        found["new thread"] = torch.get_num_threads()
        with shared_cores():
            found["inside of it"] = torch.get_num_threads()
        found["after it"] = torch.get_num_threads()

    with threads(2), all_cores_busy():
        with shared_cores(watch=True):
            found["inside"] = torch.get_num_threads()
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        found["after"] = torch.get_num_threads()
    assert found == {"inside": 1, "new thread": 1, "inside of it": 1, "after it": 2, "after": 2}


@pytest.mark.slow
@on_linux
@needs_kernels
def test_an_engine_beside_busy_processes_uses_fewer_threads_and_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads the clock."""
    params, loading, used = SamplingParams(max_tokens=48, ignore_eos=True), list[int](), list[int]()

    def load(*args: Any, **options: Any) -> Target:
        loading.append(torch.get_num_threads())
        return load_target(*args, **options)

    monkeypatch.setattr("volley.engine.engine.load_target", load)
    expected = next(Engine.from_pretrained().generate([CHAT], params)).token_ids
    with threads(2), all_cores_busy():
        engine = Engine.from_pretrained()
        engine.on_verified.append(lambda *_: used.append(torch.get_num_threads()))
        assert next(engine.generate([CHAT], params)).token_ids == expected
        assert torch.get_num_threads() == 2
    assert loading == [1, 1]
    assert set(used) == {1}


@pytest.mark.slow
@on_linux
@needs_kernels
def test_tokens_do_not_depend_on_the_number_of_threads() -> None:
    params, found = SamplingParams(max_tokens=32, ignore_eos=True, temperature=1.0, seed=1), []
    for numbers in ([1], [2], [1, 2, 2]):
        engine = Engine.from_pretrained()
        request, step = engine.add_request(CHAT, params), 0
        while request.finish_reason is None:
            with threads(numbers[step % len(numbers)]):
                engine.step()
            step += 1
        found.append(request.result().token_ids)
    assert found[1:] == found[:1] * 2
