"""What was written late, and together, is what would have been written at once."""

import random
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from volley.models.backlog import Backlog, KeptRun

SLOTS = 24
ADAPTERS: list[Any] = [None, None, "one", "other"]


class Written:
    """A store that notes who wrote each slot last."""

    def __init__(self) -> None:
        self.features, self.positions = torch.zeros(SLOTS, 2), torch.zeros(SLOTS, dtype=torch.long)
        self.adapters: list[Any] = [None] * SLOTS
        self.calls: list[Any] = []

    def __call__(self, features: Tensor, positions: Tensor, kv_slots: slice | Tensor, adapter: Any) -> None:
        assert len(features) == len(positions) == len(torch.arange(SLOTS)[kv_slots])
        self.features[kv_slots], self.positions[kv_slots] = features, positions
        for slot in torch.arange(SLOTS)[kv_slots].tolist():
            self.adapters[slot] = adapter
        self.calls.append(adapter)


def random_runs(chance: random.Random) -> list[KeptRun]:
    """Of some requests, whose slots are one after another, or not."""
    free, runs = list(range(SLOTS)), []
    for _ in range(chance.randint(1, 3)):
        start, count = chance.randrange(100), chance.randint(1, 6)
        if chance.random() < 0.5:
            first = chance.randrange(SLOTS - count)
            slots = list(range(first, first + count))
        else:
            slots = chance.sample(free, min(count, len(free)))
        if slots and set(slots) <= set(free):
            free = [slot for slot in free if slot not in slots]
            is_slice = slots == list(range(slots[0], slots[-1] + 1))
            where = slice(slots[0], slots[-1] + 1) if is_slice else torch.tensor(slots)
            runs.append(KeptRun(start, start + len(slots), where))
    return runs


@given(chance=st.integers(0, 2**32 - 1).map(random.Random), count=st.integers(0, 12))
@settings(max_examples=200)
def test_the_last_owner_of_a_slot_has_it(chance: random.Random, count: int) -> None:
    late, at_once = Written(), Written()
    backlog = Backlog(late)
    for _ in range(count):
        runs, adapter = random_runs(chance), chance.choice(ADAPTERS)
        features = torch.rand(sum(run.end - run.start for run in runs), 2)
        waiting = len(backlog)
        backlog.add(features, runs, adapter)
        assert len(backlog) == waiting + len(features)
        for run, rows in zip(runs, features.split([run.end - run.start for run in runs]), strict=True):
            at_once(rows, torch.arange(run.start, run.end), run.kv_slots, adapter)
        if chance.random() < 0.2:
            backlog.write()
            assert len(backlog) == 0
    backlog.write()
    assert torch.equal(late.features, at_once.features)
    assert torch.equal(late.positions, at_once.positions)
    assert late.adapters == at_once.adapters


def test_one_product_for_each_adapter() -> None:
    written = Written()
    backlog = Backlog(written)
    for at, adapter in enumerate([None, "one", None, "one", None]):
        backlog.add(torch.rand(2, 2), [KeptRun(0, 2, slice(2 * at, 2 * at + 2))], adapter)  # type: ignore[arg-type]
    backlog.write()
    assert written.calls == [None, "one"]
    backlog.write()
    assert len(written.calls) == 2


def test_what_could_not_be_written_is_not_tried_again() -> None:
    """A request whose K/V cannot be made is found by reading the others again; it must not wait for them here."""
    tries = []

    def broken(*_: Any) -> None:
        tries.append(1)
        raise RuntimeError

    backlog = Backlog(broken)
    backlog.add(torch.rand(1, 2), [KeptRun(0, 1, slice(0, 1))], None)
    for _ in range(2):
        try:
            backlog.write()
        except RuntimeError:
            continue
    assert len(tries) == 1
