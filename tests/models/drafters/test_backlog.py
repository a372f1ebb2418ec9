"""K/V written late and together equal those written at once."""

import random
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from volley.models.drafters.backlog import Backlog, KeptRun

SLOTS = 24


class Written:
    """A store that notes who wrote each slot last."""

    def __init__(self) -> None:
        self.features, self.positions = torch.zeros(SLOTS, 2), torch.zeros(SLOTS, dtype=torch.long)

    def __call__(self, features: Tensor, positions: Tensor, kv_slots: slice | Tensor) -> None:
        assert len(features) == len(positions) == len(torch.arange(SLOTS)[kv_slots])
        self.features[kv_slots], self.positions[kv_slots] = features, positions


class Waiting:
    """A backlog of random requests, and a store that is written as soon as a run is closed, token by token."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.on_device, self.at_once = Written(), Written()
        self.backlog = Backlog(self.on_device)
        self.open: list[tuple[KeptRun, list[Tensor]]] = []

    def add(self) -> None:
        for _ in range(self.chance.randint(0, 2)):
            self.open.append((KeptRun(self.chance.randrange(100)), []))
        members = self.chance.sample(self.open, self.chance.randint(0, len(self.open)))
        counts = [self.chance.randint(0, 4) for _ in members]
        features, waiting = torch.rand(sum(counts), 2), len(self.backlog)
        self.backlog.add(features, [run for run, _ in members], counts)
        assert len(self.backlog) == waiting + len(features)
        for (run, rows), own in zip(members, features.split(counts), strict=True):
            rows += own
            assert run.end - run.start == len(rows)

    def close(self) -> None:
        """Some of a run's last tokens have slots, one after another or not."""
        run, rows = self.open.pop(self.chance.randrange(len(self.open)))
        count = self.chance.randint(min(1, len(rows)), min(len(rows), SLOTS))
        first = self.chance.randrange(SLOTS + 1 - count)
        is_slice = self.chance.random() < 0.5
        slots = list(range(first, first + count)) if is_slice else self.chance.sample(range(SLOTS), count)
        self.backlog.close(run, np.array(slots, dtype=np.int64))
        for slot, place in zip(slots, range(run.end - count, run.end), strict=True):
            self.at_once(rows[place - run.start][None], torch.tensor([place]), torch.tensor([slot]))

    def write(self) -> None:
        while self.open:
            self.close()
        self.backlog.write()
        assert len(self.backlog) == 0
        assert torch.equal(self.on_device.features, self.at_once.features)
        assert torch.equal(self.on_device.positions, self.at_once.positions)


@given(chance=st.integers(0, 2**32 - 1).map(random.Random), count=st.integers(0, 12))
def test_who_closed_last_has_a_slot(chance: random.Random, count: int) -> None:
    waiting = Waiting(chance)
    for _ in range(count):
        waiting.add()
        while waiting.open and chance.random() < 0.4:
            waiting.close()
        if chance.random() < 0.2:
            waiting.write()
    waiting.write()


def test_slots_one_after_another_are_a_slice() -> None:
    """So that no indices are made of those of a single request."""
    seen: list[Any] = []
    backlog, run = (
        Backlog(lambda features, positions, kv_slots: seen.append((features, positions, kv_slots))),
        KeptRun(7),
    )
    first, second = torch.rand(2, 2), torch.rand(1, 2)
    backlog.add(first, [run], [2])
    backlog.add(second, [run], [1])
    backlog.close(run, np.arange(20, 23))
    backlog.write()
    ((features, positions, kv_slots),) = seen
    assert torch.equal(features, torch.cat([first, second]))
    assert (positions.tolist(), kv_slots) == ([7, 8, 9], slice(20, 23))


def test_what_could_not_be_written_is_not_tried_again() -> None:
    """A request whose K/V cannot be made is found by reading the others again; it must not wait for them here."""
    tries = []

    def broken(*_: Any) -> None:
        tries.append(1)
        raise RuntimeError

    backlog, run = Backlog(broken), KeptRun(0)
    backlog.add(torch.rand(1, 2), [run], [1])
    backlog.close(run, np.arange(1))
    for _ in range(2):
        try:
            backlog.write()
        except RuntimeError:
            continue
    assert len(tries) == 1
