"""The next passes of decoding, launched on a GPU before the host has read the tokens of the passes before.

All that they need and the host does not know yet is how many tokens of each draft are kept and which token is behind them, and
both are on the device (``decode/late.py``). So the device has its next passes when these end, and the host commits, makes texts,
schedules and describes passes while it works. For plain decoding that is one pass, each request going on by one token. For chains
it is the drafter's K/V, a draft and its verification. Their passes are described as if nothing was accepted, and moved on the
device (``memory/graphs.py``), as is the noise of sampled drafts.

The launch is a guess: the next step is as long as this one. It is scheduled as ever, once the tokens are known, and takes what
was launched if that has what it asks, on the same pages; else it launches passes of its own, which write the same K/V again. So
nothing that decides knows of it, and tokens are those of launching later.

Pages for the next tokens are given back with the step and taken again by the next. A request that ends unforeseen leaves rows
that nobody reads. In both cases the device may still write to a page that is free: whoever gets it writes in a later launch, and
so after that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from volley.decode.late import count_accepted, draft_tokens
from volley.decode.work import Kind, Rule, Shape, Work
from volley.engine.pacing import Pacing
from volley.engine.runner import Pass, Runner
from volley.engine.scheduler import Scheduler
from volley.engine.step import Step
from volley.memory.batch import Segment
from volley.memory.graphs import MOST_ROWS
from volley.memory.upload import upload, upload_indices
from volley.models.drafters.draft_model import DraftModel
from volley.procedures.request import Request
from volley.proposers.base import Proposer
from volley.types import Proposal

_PATIENCE = 8  # steps alike in a row after which a policy that may change its mind is expected to go on so

Works = Sequence[Work[Request]]


class _Foreseen(NamedTuple):
    """Of a request in the passes that were launched."""

    number: int
    before: Work[Request]
    """Its part of the step before, which decides where it goes on."""
    start: int
    """Where it goes on if nothing of its draft is kept."""
    pages: list[int]


@dataclass(frozen=True)
class _Launched:
    places: dict[Request, _Foreseen]
    size: int
    """Tokens of each draft."""
    drafts: list[Proposal]
    """Of each request, if they are drafted for."""
    outputs: Pass
    run: int
    """Its number among the runner's passes."""


class Ahead:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        pacing: Pacing,
        proposer: Proposer | None = None,
        model: DraftModel | None = None,
    ) -> None:
        """``model`` is the drafter at work, if ``proposer`` drafts with one."""
        self.is_used = runner.target.device.type != "cpu"
        """A CPU computes whenever it is told to, so there nothing is gained; the same path gives the same tokens."""
        self.proposer = proposer
        self._scheduler, self._runner, self._pacing, self._model = scheduler, runner, pacing, model
        self._step: Step | None = None  # the one under way
        self._launched: _Launched | None = None
        self._size = self._num_alike = 0  # drafts of so many tokens, in so many steps in a row

    def forget(self) -> None:
        """Let nobody take what is launched."""
        self._launched = None

    def launch(self, works: Works, tokens: Tensor) -> None:
        """Launch the next passes of ``works`` if a step like this one is all that is likely to come next.

        To be called while only the device knows their ``tokens``, those of each work from its ``choices`` on. The host may wait
        for these afterwards: the device goes on with the passes.
        """
        step, self._step, self._launched = self._step, None, None
        size = max((len(work.proposal.token_ids) for work in works), default=0)
        going_on = [work for work in works if work.request.remaining > 1]  # the others end here
        if step is None or not self._is_likely(step, works, size) or not going_on:
            return
        tokens = tokens.clamp_min(
            0
        )  # a row that is not finite chose none; its request takes nothing of what is launched
        pages, starts = self._scheduler.sequences.pages, [work.request.computed + 1 for work in going_on]
        ends = [start + (2 * (1 + size) if size else 1) for start in starts]
        if max(ends) > self._runner.target.context_length or len(going_on) * (1 + size) > MOST_ROWS:
            return
        if not all(pages.reserve(work.request, end) for work, end in zip(going_on, ends, strict=True)):
            return
        segments = [Segment(work.request.table, start, 1 + size) for work, start in zip(going_on, starts, strict=True)]
        guesses = [Work(own.request, replace(own.ask, size=size, positions=size)) for own in going_on]
        if size:
            outputs = self._launch_chains(step, going_on, guesses, tokens, segments)
        else:
            outputs = self._replay(segments, _chosen(going_on, tokens))
        if outputs is None or self._runner.passes is None:
            return
        each = enumerate(zip(going_on, starts, strict=True))
        places = {own.request: _Foreseen(i, own, start, list(own.request.table.pages)) for i, (own, start) in each}
        drafts = [own.proposal for own in guesses]
        self._launched = _Launched(places, size, drafts, outputs, self._runner.passes.num_runs)

    def _launch_chains(
        self, step: Step, going_on: Works, guesses: Works, tokens: Tensor, segments: list[Segment]
    ) -> Pass | None:
        """The drafter's K/V of ``step``, the next drafts, and their verification in ``segments`` if none was kept of the last."""
        assert step.batch is not None
        assert step.features is not None
        assert self._model is not None
        assert self.proposer is not None
        # Of the whole blocks: what is written for a token that is not kept lies where the next block is.
        spans = [(work.request.table, work.request.computed, len(work.proposal.token_ids)) for work in step.works]
        slots = np.concatenate([table.slot_array(start, start + 1 + size) for table, start, size in spans])
        self._model.keep(step.features, step.batch.positions, upload(slots, tokens.device), None)
        step.has_draft_kv = True
        accepted, anchors = count_accepted(going_on, tokens)
        if not self.proposer.propose_unread(guesses, segments, anchors, accepted, with_confidence=step.with_confidence):
            return None
        drafts = draft_tokens(guesses, tokens.device).view(len(anchors), -1)
        return self._replay(segments, torch.cat([anchors[:, None], drafts], dim=1).flatten(), accepted)

    def _replay(self, segments: list[Segment], tokens: Tensor, moved: Tensor | None = None) -> Pass | None:
        return self._runner.replay(segments, [0] * len(tokens), range(len(tokens)), {0: tokens}, moved)

    def _is_likely(self, step: Step, works: Works, size: int) -> bool:
        """Whether the next step is like this one, with drafts of up to ``size`` tokens, and can be launched.

        Rules and log-probabilities need tokens that the host knows. Chains of the drafter itself alone can be drafted on.
        """
        is_alike = all(
            _is_chain(work) and work.choices is not None and not (work.request.rules or work.request.params.logprobs)
            for work in works
        )
        if size:
            is_alike = is_alike and self._model is not None and not self._model.reads_next and step.features is not None
            is_alike = is_alike and all(_is_drafted_by_drafter(work.request) for work in works)
        self._num_alike = 0 if not is_alike else self._num_alike + 1 if size == self._size else 1
        self._size = size
        policy, scheduler, newcomers = self._pacing.policy, self._scheduler, self._pacing.costs.arrivals.newcomers
        is_full = len(scheduler.running) >= scheduler.capacity.max_running
        return (
            self.is_used
            and self._runner.passes is not None
            and is_alike
            and (policy.is_steady or policy.block_size == 1 or self._num_alike > _PATIENCE)
            and len(works) == len(scheduler.running)  # all of them, and no prompt that is being read
            and (is_full or not scheduler.waiting)
            and not (newcomers is not None and newcomers())
        )

    def serves(self, works: Works) -> bool:
        """Whether what was launched has all that ``works`` ask for, if they get the pages that it was launched with.

        Its other rows are those of requests that ended, and of longer drafts than are asked for near an end. If a policy may
        learn from the times of passes, some draft must be as long.
        """
        launched, passes = self._launched, self._runner.passes
        if not works or launched is None or passes is None or launched.run != passes.num_runs:
            return False
        is_as_long = self._pacing.policy.is_steady or max(work.ask.size for work in works) == launched.size
        return is_as_long and all(_is_foreseen(work, launched) for work in works)

    def serve(self, step: Step) -> bool:
        """Give a step what was launched for it; False if there is nothing. Either way it is used now or never."""
        launched, is_served = self._launched, self.serves(step.works)
        self._step, self._launched = step, None
        if launched is None or not is_served:
            return False
        places = [launched.places[work.request] for work in step.works]
        tables = [work.request.table for work in step.works]
        if any(table.pages != place.pages[: len(table.pages)] for table, place in zip(tables, places, strict=True)):
            return False
        with step.timings.count("verify"):
            rows, segments = list[int](), list[Segment]()
            for work, place in zip(step.works, places, strict=True):
                if size := work.ask.size:
                    work.proposal = launched.drafts[place.number].first(size)
                    step.is_late = True
                work.rows = slice(len(rows), len(rows) + 1 + size)
                rows += range(first := place.number * (1 + launched.size), first + 1 + size)
                segments.append(Segment(work.request.table, work.request.computed, 1 + size))
            launched.outputs.only(rows, segments).give(step)
        step.foresee()
        return True


def _is_chain(work: Work[Request]) -> bool:
    return work.kind is Kind.DECODE and work.ask.shape is Shape.CHAIN


def _is_drafted_by_drafter(request: Request) -> bool:
    """Without an adapter and without a window, whose ring has no room for two blocks."""
    return request.adapter is None and request.draft_table is request.table


def _is_foreseen(work: Work[Request], launched: _Launched) -> bool:
    place, ask = launched.places.get(work.request), work.ask
    if place is None or place.before.is_cut or not _is_chain(work) or ask.size > launched.size:
        return False
    is_usable = ask.rule is place.before.ask.rule and work.may_be_late
    # The first tokens of a longer block are others than those of a shorter one. Here alone, answers depend on which they are.
    if ask.rule is Rule.SPECULATIVE and work.request.params.seed is not None:
        is_usable = is_usable and ask.size == launched.size
    return work.request.computed == place.start + place.before.verdict.accepted and (is_usable or not ask.size)


def _chosen(works: Works, tokens: Tensor) -> Tensor:
    """The token of each of ``works`` that decode plainly."""
    places = [work.choices for work in works if work.choices is not None]
    if places == list(range(len(tokens))):
        return tokens
    return tokens.index_select(0, upload_indices(places, tokens.device))
