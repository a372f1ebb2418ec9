"""Timed passes end when a GPU has done them: first costs are no launch times."""

import time
from collections import Counter
from collections.abc import Callable

import pytest

pytest.importorskip("triton")

from tests.gpu.pretended import SYNCHRONISED, Counts
from tests.gpu.test_engine import Both, both, pretended
from volley import Engine
from volley.models.targets import rehearsal

__all__ = ["both"]
TIMED = {
    "target passes": lambda engine: engine.core.runner.seconds(4, 2),
    "context K/V and draft blocks": lambda engine: engine.core.proposer.seconds(8, 2),
    "layers and choice": lambda engine: engine.core.proposer.timed_parts(8, 2),
}


def look_at_clock(
    counts: Counts, measure: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], int]:
    """Launches that were not finished whenever the clock was looked at, and how often all work was waited for."""
    unfinished: list[int] = []

    def clock() -> float:
        unfinished.append(counts.unfinished)
        return float(len(unfinished))  # a second a look: one timed run is enough

    counts.clear()
    with monkeypatch.context() as patched:
        patched.setattr(time, "perf_counter", clock)
        measure()
    waits = Counter(kind for kind, _ in counts.waits.elements())
    return unfinished, waits[SYNCHRONISED]


@pytest.mark.slow
@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("timed", TIMED.values(), ids=TIMED)
def test_a_run_is_timed_until_the_device_has_done_it(
    both: Both, timed: Callable[[Engine], object], cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretended() as counts:
        engine = Engine(both.target, both.drafter, num_pages=64, policy="fixed", cuda_graphs=cuda_graphs)
        unfinished, waits = look_at_clock(counts, lambda: timed(engine), monkeypatch)
    assert unfinished
    assert set(unfinished) == {0}
    assert waits == len(unfinished), "once before a run, whose second is not repeated, and once behind it"


def test_a_clock_that_is_looked_at_too_early_is_seen(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: drafts and their K/V are timed as launches."""
    with pretended() as counts:
        engine = Engine(both.target, both.drafter, num_pages=64, policy="fixed")
        monkeypatch.setattr(rehearsal, "synchronise", lambda _: None)
        unfinished, waits = look_at_clock(counts, lambda: TIMED["layers and choice"](engine), monkeypatch)
    assert waits == 0
    assert max(unfinished) > 0
