"""The next pass of plain decoding, launched on a GPU before the host has read the tokens of the pass before.

All that such a pass needs and the host does not know yet are those tokens, which the device has: each request goes on by one
token, at the next position, in the next slot. So the device has its next pass when one ends, and the host commits, makes texts,
schedules and describes passes while it works. The launch is a guess. The next step is scheduled as ever, once the tokens are
known, and takes what was launched if that is just what it asks, on the same pages; else it launches a pass of its own, which
writes the same K/V again. So nothing that decides knows of it, and tokens are those of launching later.

A page for the next token is given back with the step and taken again by the next. A request that ends unforeseen leaves a row
that nobody reads. In both cases the device may still write to a page that is free: whoever gets it writes in a later launch, and
so after that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from volley.decode.work import Kind, Work
from volley.engine.pacing import Pacing
from volley.engine.runner import Pass, Runner
from volley.engine.scheduler import Scheduler
from volley.engine.step import Step
from volley.memory.batch import Segment
from volley.memory.upload import upload_indices
from volley.procedures.request import Request

_PATIENCE = 8  # plain steps in a row after which a policy that may draft is expected to go on so


class _Foreseen(NamedTuple):
    """Of a request in the pass that was launched."""

    row: int
    start: int
    page: int
    """Where the K/V of its token are written."""

    @classmethod
    def of(cls, request: Request, row: int, start: int) -> "_Foreseen":
        return cls(row, start, request.table.pages[start // request.table.page_size])


@dataclass(frozen=True)
class _Launched:
    places: dict[Request, _Foreseen]
    outputs: Pass
    run: int
    """Its number among the runner's passes."""


class Ahead:
    def __init__(self, scheduler: Scheduler, runner: Runner, pacing: Pacing, device: torch.device) -> None:
        self.is_used = device.type != "cpu"
        """A CPU computes whenever it is told to, so there nothing is gained; the same path gives the same tokens."""
        self._scheduler, self._runner, self._pacing = scheduler, runner, pacing
        self._launched: _Launched | None = None
        self._num_plain = 0  # plain steps in a row

    def launch(self, works: Sequence[Work[Request]], tokens: Tensor) -> None:
        """Launch the next pass of ``works`` if plain decoding of these is all that is likely to come next.

        To be called while only the device knows their ``tokens``, those of each work from its ``choices`` on. The host may wait
        for these afterwards: the device goes on with the pass.
        """
        self._launched = None
        passes, pages = self._runner.passes, self._scheduler.sequences.pages
        going_on = [work for work in works if work.request.remaining > 1]  # the others end here
        if passes is None or not self._is_likely(works) or not going_on:
            return
        ends = [work.request.computed + 2 for work in going_on]
        if not all(pages.reserve(work.request, end) for work, end in zip(going_on, ends, strict=True)):
            return
        segments = [Segment(work.request.table, end - 1, 1) for work, end in zip(going_on, ends, strict=True)]
        chosen = [work.choices for work in going_on if work.choices is not None]
        if chosen != list(range(len(tokens))):
            tokens = tokens.index_select(0, upload_indices(chosen, tokens.device))
        outputs = self._runner.replay(segments, [0] * len(segments), range(len(segments)), {0: tokens})
        if outputs is None:
            return
        pairs = enumerate(zip(going_on, segments, strict=True))
        places = {work.request: _Foreseen.of(work.request, row, segment.start) for row, (work, segment) in pairs}
        self._launched = _Launched(places, outputs, passes.num_runs)

    def _is_likely(self, works: Sequence[Work[Request]]) -> bool:
        """Whether the next step decodes ``works`` plainly. Rules and log-probabilities need tokens that the host knows."""
        is_plain = all(
            _is_plain(work) and work.choices is not None and not (work.request.rules or work.request.params.logprobs)
            for work in works
        )
        self._num_plain = self._num_plain + 1 if is_plain else 0
        scheduler, newcomers = self._scheduler, self._pacing.costs.arrivals.newcomers
        is_full = len(scheduler.running) >= scheduler.capacity.max_running
        return (
            self.is_used
            and is_plain
            and (self._pacing.policy.block_size == 1 or self._num_plain > _PATIENCE)
            and len(works) == len(scheduler.running)  # all of them, and no prompt that is being read
            and (is_full or not scheduler.waiting)
            and not (newcomers is not None and newcomers())
        )

    def serves(self, works: Sequence[Work[Request]]) -> bool:
        """Whether the pass that was launched is what ``works`` ask for. Its other rows are those of requests that ended."""
        launched, passes = self._launched, self._runner.passes
        if launched is None or passes is None or launched.run != passes.num_runs:
            return False
        return bool(works) and all(self._is_foreseen(work, launched.places.get(work.request)) for work in works)

    @staticmethod
    def _is_foreseen(work: Work[Request], place: _Foreseen | None) -> bool:
        if place is None or not _is_plain(work) or work.request.computed != place.start:
            return False
        return place == _Foreseen.of(work.request, place.row, place.start)

    def serve(self, step: Step) -> bool:
        """Give a step the pass that was launched for it; False if there is none. Either way it is used now or never."""
        launched, is_served = self._launched, self.serves(step.works)
        self._launched = None
        if launched is None or not is_served:
            return False
        with step.timings.count("verify"):
            rows = [launched.places[work.request].row for work in step.works]
            outputs = launched.outputs
            if rows != list(range(len(outputs.batch))):
                outputs = outputs.only(rows)
            for row, work in enumerate(step.works):
                work.rows = slice(row, row + 1)
            outputs.give(step)
        return True


def _is_plain(work: Work[Request]) -> bool:
    return work.kind is Kind.DECODE and work.num_tokens == 1
