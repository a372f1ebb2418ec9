"""First tokens under the default policy and under plain decoding of the same arrivals, in modelled seconds: no clock is read.

Prompts come at random (Poisson) while others decode. Passes, drafts and answers are made up; who takes part, how much is drafted,
verified and learnt is decided by the engine's own scheduler, pacing and policy.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import pytest

from tests.engine.test_scheduler import World
from tests.made_up import with_batch
from volley.decode.work import Kind, Shape, Work
from volley.engine.step import Step
from volley.policies.base import Policy
from volley.policies.cost import Costs
from volley.policies.fixed import Fixed
from volley.policies.goodput import Goodput
from volley.procedures.request import Request
from volley.types import Proposal, Verdict

BLOCK = 16
LATER = 1.15
"""Times plain decoding's 99th percentile that the policy's may be."""


@dataclass(frozen=True)
class Machine:
    """What passes take, in seconds."""

    base: float = 4.5e-3
    token: float = 0.4e-3
    reading: float = 0.13e-3
    """A token of a prompt, which chooses none."""
    draft: float = 2e-3

    def target(self, tokens: int, requests: int) -> float:
        return self.base + self.token * tokens

    def drafter(self, tokens: int, requests: int) -> float:
        return self.draft


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made)
    return made


class Server(World):
    """Answers prompts that come at random; drafts are right about as often as they claim, copies in nine of ten tokens."""

    def __init__(self, policy: Policy, machine: Machine, clock: Clock, block_size: int, seed: int) -> None:
        self.machine, self.clock = machine, clock
        super().__init__(
            policy,
            random.Random(seed),
            made_costs=Costs(machine.drafter, machine.target),
            block_size=block_size,
            pages=4000,
            max_batch_tokens=512,
            max_running=64,
        )
        self.waits: list[float] = []
        self.cycles: list[tuple[float, bool]] = []

    def serve(self, arrivals: list[tuple[float, int, int]]) -> None:
        """``arrivals`` are times, lengths of prompts and of answers."""
        came: dict[Request, float] = {}
        left = list(reversed(arrivals))
        while left or self.scheduler.has_work:
            if not self.scheduler.has_work:
                self.clock.now = max(self.clock.now, left[-1][0])
            while left and left[-1][0] <= self.clock.now:
                at, length, tokens = left.pop()
                if self.scheduler.is_decoding:
                    self.pacing.costs.arrivals.came()
                came[self.arrive(length, max_tokens=tokens)] = at
            self.now = self.clock.now
            self.step()
            for own in [own for own in came if own.num_output]:
                self.waits.append(self.clock.now - came.pop(own))

    def run(self, step: Step) -> None:
        self.propose(step)
        self.forward(step)
        super().run(step)
        self.pacing.observe(with_batch(step))

    def propose(self, step: Step) -> None:
        if any(work.ask.positions for work in step.works):
            self.clock.now += self.machine.draft
        for work in step.works:
            size = work.ask.size
            if size:
                work.proposal = Proposal([self.chance.randrange(3) for _ in range(size)])
            if work.ask.positions:
                alone = np.clip([self.chance.gauss(0.75, 0.25) for _ in range(size)], 0.05, 0.99)
                is_tree = work.ask.shape is Shape.TREE
                work.proposal.confidence = (np.cumprod(alone) if is_tree else alone).tolist()
                work.proposal.parents = tuple(range(size)) if is_tree else None
        self.pacing.trim(step)

    def forward(self, step: Step) -> None:
        read = sum(work.num_known for work in step.works if work.kind is Kind.PREFILL)
        tokens = sum(1 + len(work.proposal.token_ids) for work in step.decoding)
        self.clock.now += self.machine.base + self.machine.token * tokens + self.machine.reading * read
        if step.decoding:
            self.cycles.append((self.clock.now - step.started, bool(read)))

    def judge(self, work: Work[Request]) -> None:
        if work.kind is Kind.PREFILL:
            super().judge(work)
            return
        tokens, sure = work.proposal.token_ids, work.proposal.confidence
        if work.ask.shape is Shape.TREE:
            sure = [own / before for own, before in zip(sure, [1.0, *sure], strict=False)]
        chances = sure if work.ask.positions else [0.9] * len(tokens)
        accepted = next((i for i, chance in enumerate(chances) if self.chance.random() > chance), len(tokens))
        path = tuple(range(1, accepted + 1)) if work.ask.shape is Shape.TREE else None
        work.verdict = Verdict(accepted, [*tokens[:accepted], self.chance.randrange(3)], path)


def arrivals(rate: float, count: int, seed: int) -> list[tuple[float, int, int]]:
    chance, at, made = random.Random(seed), 0.0, []
    for _ in range(count):
        at += chance.expovariate(rate)
        made.append((at, chance.randint(40, 120), chance.choice([32, 48, 64, 80, 96])))
    return made


def p99(waits: list[float]) -> float:
    return sorted(waits)[int(0.99 * len(waits))]


def test_explore(clock: Clock) -> None:
    import sys, cProfile

    for rate in (0.5, 2, 4, 8):
        for machine in (Machine(), Machine(4.5e-3, 0.2e-3, 0.1e-3, 1e-3)):
            row = []
            for policy, size in ((Fixed(1), 1), (Goodput(), BLOCK)):
                clock.now = 0.0
                own = Server(policy, machine, clock, size, 1)
                t0 = time.process_time()
                own.serve(arrivals(rate, 150, 7))
                took = time.process_time() - t0
                row.append(
                    (
                        p99(own.waits),
                        fmean(own.waits),
                        clock.now,
                        fmean(s for s, _ in own.cycles),
                        max(s for s, _ in own.cycles),
                        sum(len(r.token_ids) - r.num_prompt for r in own.arrived),
                        took,
                    )
                )
            p, v = row
            print(
                f"{rate} p99 {v[0] / p[0]:.2f} mean {v[1] / p[1]:.2f} p99 {1e3 * p[0]:.1f} {1e3 * v[0]:.1f} cycle {1e3 * p[3]:.1f} {1e3 * v[3]:.1f} longest {1e3 * p[4]:.1f} {1e3 * v[4]:.1f} steps {len(own.cycles)} end {p[2] / v[2]:.3f} tau {sum(r.num_output for r in own.arrived)} cpu {p[6]:.1f} {v[6]:.1f}",
                file=sys.stderr,
            )
