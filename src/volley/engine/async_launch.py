"""Launch the next step's GPU work before the host has read the tokens of the current step (async scheduling).

The next passes need two values that the host does not know yet: the number of accepted tokens of each draft, and the bonus
token. Both are on the device (``decode/on_device.py``). So the device starts its next passes as soon as the current ones end, and
the host commits, detokenizes and schedules in the meantime. For plain decoding the launch is one pass, in which each request
advances by one token. For chains it computes the drafter's K/V, a draft and its verification. The host lays these passes out
as if no draft token was accepted. The device then shifts their positions (``memory/graphs.py``) and the noise of sampled
drafts by the accepted counts.

A sequential head walks the positions of a draft on the device, token by token. A draft window's ring holds two blocks, so that
the next one does not overwrite what the current one reads.

The launch is speculative: it assumes that the next step drafts as many tokens as this one. The scheduler ignores it. If the
step that is scheduled matches what was launched, on the same pages, that result is used. Otherwise it is dropped, and the
step's own passes write the same K/V again. Output is the same either way.

Pages reserved for the launch are given back when the step ends and taken again by the next step. A request that ends early
leaves rows that nobody reads. In both cases the device may still write to a free page. This is safe, because the page's next
owner writes in a later launch on the same stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from volley.decode.on_device import Reading, count_accepted, draft_tokens
from volley.decode.work import Phase, Proposal, Rule, Shape, Work
from volley.engine.pacing import Pacing
from volley.engine.runner import PassOutputs, Runner
from volley.engine.scheduler import Scheduler
from volley.engine.step import Step
from volley.memory.batch import Segment
from volley.memory.graphs import MOST_ROWS
from volley.memory.upload import upload, upload_indices
from volley.models.drafters.draft_model import DraftModel
from volley.procedures.request import Request, Works
from volley.proposers.base import Proposer

_PATIENCE = 8  # equal steps in a row after which an adaptive policy is expected to repeat its decision


class _LaunchedRequest(NamedTuple):
    """Position of one request in the launched passes."""

    number: int
    before: Work[Request]
    """Its work in the step before. The verdict of that work decides where the request continues."""
    start: int
    """Position at which the request continues if none of its draft is accepted."""
    pages: list[int]


@dataclass(frozen=True)
class _Launched:
    requests: dict[Request, _LaunchedRequest]
    size: int
    """Number of tokens in each draft."""
    drafts: list[Proposal]
    """Draft of each request; empty for plain decoding."""
    outputs: PassOutputs
    run: int
    """Number of the launched pass, counted by the runner."""


class AsyncLaunch:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        pacing: Pacing,
        proposer: Proposer | None = None,
        model: DraftModel | None = None,
    ) -> None:
        """Prepare to launch passes of ``runner``. ``model`` is the drafter in use, if ``proposer`` drafts with one."""
        self.is_used = runner.target.device.type != "cpu"
        """True on a GPU. A CPU runs each operation when it is called, so launching early gains nothing there; tokens are the
        same."""
        self.proposer = proposer
        self._scheduler, self._runner, self._pacing, self._model = scheduler, runner, pacing, model
        self._launched: _Launched | None = None
        self._size = self._num_alike = 0  # draft length, and number of steps in a row that had it

    def forget(self) -> None:
        """Drop the launched passes."""
        self._launched = None

    def launch(self, step: Step, readings: Sequence[Reading]) -> None:
        """Launch the next passes of a step's requests if the next step is likely to be like this one.

        ``readings`` hold the chosen tokens, which are only on the device; those of each work begin at its ``choices``. The
        host may wait for them afterwards, because the device then has its next passes.
        """
        if len(readings) == 1 and (tokens := readings[0].values) is not None:  # one decoding method chose all tokens
            with step.timings.count("verify"):
                self._launch(step, tokens)

    def _launch(self, step: Step, tokens: Tensor) -> None:
        works = [work for work in step.works if work.rows.stop > work.rows.start]
        size = max((len(work.proposal.token_ids) for work in works), default=0)
        going_on = [work for work in works if work.request.remaining > 1]  # the others end in this step
        if not self._is_likely(step, works, size) or not going_on:
            return
        tokens = tokens.clamp_min(0)  # a row with non-finite logits chose no token; its request does not use the launch
        manager, starts = self._scheduler.kv_manager, [work.request.computed + 1 for work in going_on]
        ends = [start + (2 * (1 + size) if size else 1) for start in starts]
        if max(ends) > self._runner.target.context_length or len(going_on) * (1 + size) > MOST_ROWS:
            return
        reserve = manager.reserve_ahead if size else manager.pages.reserve
        if not all(reserve(work.request, end) for work, end in zip(going_on, ends, strict=True)):
            return
        segments = [Segment(work.request.table, start, 1 + size) for work, start in zip(going_on, starts, strict=True)]
        guesses = [Work(own.request, replace(own.spec, size=size, positions=size)) for own in going_on]
        if size:
            outputs = self._launch_chains(step, going_on, guesses, tokens, segments)
        else:
            outputs = self._replay(segments, _chosen(going_on, tokens))
        if outputs is None or self._runner.passes is None:
            return
        each = enumerate(zip(going_on, starts, strict=True))
        requests = {
            own.request: _LaunchedRequest(i, own, start, list(own.request.table.pages)) for i, (own, start) in each
        }
        drafts = [own.proposal for own in guesses]
        self._launched = _Launched(requests, size, drafts, outputs, self._runner.passes.num_runs)

    def _launch_chains(
        self, step: Step, going_on: Works, guesses: Works, tokens: Tensor, segments: list[Segment]
    ) -> PassOutputs | None:
        """Compute the drafter's K/V of ``step``, the next drafts and their verification, laid out in ``segments`` as if none
        was accepted."""
        assert step.batch is not None
        assert step.features is not None
        assert self._model is not None
        assert self.proposer is not None
        # K/V are written for whole blocks. The K/V of a rejected token are overwritten by the next block.
        spans = [(work.request.draft_table, work.request.computed, len(work.proposal.token_ids)) for work in step.works]
        slots = np.concatenate([table.slot_array(start, start + 1 + size) for table, start, size in spans])
        self._model.keep(step.features, step.batch.positions, upload(slots, tokens.device))
        step.has_draft_kv = True
        accepted, anchors = count_accepted(going_on, tokens)
        if not self.proposer.propose_unread(guesses, segments, anchors, accepted, with_confidence=step.with_confidence):
            return None
        drafts = draft_tokens(guesses, tokens.device).view(len(anchors), -1)
        return self._replay(segments, torch.cat([anchors[:, None], drafts], dim=1).flatten(), accepted)

    def _replay(self, segments: list[Segment], tokens: Tensor, moved: Tensor | None = None) -> PassOutputs | None:
        return self._runner.replay(segments, [0] * len(tokens), range(len(tokens)), {0: tokens}, moved)

    def _is_likely(self, step: Step, works: Works, size: int) -> bool:
        """Return True if the next step is likely to be like this one, with drafts of up to ``size`` tokens, and can be
        launched.

        Token rules and log-probabilities need tokens on the host, so they rule a launch out. Only chains of the drafter itself
        can be extended on the device.
        """
        is_alike = all(
            _is_chain(work) and work.choices is not None and not (work.request.rules or work.request.params.logprobs)
            for work in works
        )
        if size:
            is_alike = is_alike and self._model is not None and not self._model.reads_next and step.features is not None
        self._num_alike = 0 if not is_alike else self._num_alike + 1 if size == self._size else 1
        self._size = size
        policy, scheduler, newcomers = self._pacing.policy, self._scheduler, self._pacing.costs.arrivals.newcomers
        is_full = len(scheduler.running) >= scheduler.capacity.max_running
        return (
            self.is_used
            and self._runner.passes is not None
            and is_alike
            and (policy.is_steady or policy.block_size == 1 or self._num_alike > _PATIENCE)
            and len(works) == len(scheduler.running)  # every running request decodes, and no prompt is being read
            and (is_full or not scheduler.waiting)
            and not (newcomers is not None and newcomers())
        )

    def serves(self, works: Works) -> bool:
        """Return True if the launched passes contain everything that ``works`` ask for. Pages are compared later, in
        :meth:`serve`.

        The launch may contain more: rows of requests that ended, and longer drafts than are asked for near a request's end. If
        a policy learns from the times of passes, at least one draft must have the launched length.
        """
        launched, passes = self._launched, self._runner.passes
        if not works or launched is None or passes is None or launched.run != passes.num_runs:
            return False
        is_as_long = self._pacing.policy.is_steady or max(work.spec.size for work in works) == launched.size
        return is_as_long and all(_is_launched(work, launched) for work in works)

    def serve(self, step: Step) -> bool:
        """Give ``step`` the passes that were launched for it and return True; return False if they do not match. Unused passes
        are dropped."""
        launched, is_served = self._launched, self.serves(step.works)
        self._launched = None
        if launched is None or not is_served:
            return False
        entries = [launched.requests[work.request] for work in step.works]
        tables = [work.request.table for work in step.works]
        if any(table.pages != entry.pages[: len(table.pages)] for table, entry in zip(tables, entries, strict=True)):
            return False
        with step.timings.count("verify"):
            rows, segments = list[int](), list[Segment]()
            for work, entry in zip(step.works, entries, strict=True):
                if size := work.spec.size:
                    work.proposal = launched.drafts[entry.number].first(size)
                    step.is_on_device = True
                work.rows = slice(len(rows), len(rows) + 1 + size)
                rows += range(first := entry.number * (1 + launched.size), first + 1 + size)
                segments.append(Segment(work.request.table, work.request.computed, 1 + size))
            launched.outputs.only(rows, segments).give(step)
        step.note_noise_used()
        return True


def _is_chain(work: Work[Request]) -> bool:
    return work.phase is Phase.DECODE and work.spec.shape is Shape.CHAIN


def _is_launched(work: Work[Request], launched: _Launched) -> bool:
    """Return True if the launched passes hold the rows of this work, at the position that its last verdict led to."""
    entry, spec = launched.requests.get(work.request), work.spec
    if entry is None or entry.before.is_cut or not _is_chain(work) or spec.size > launched.size:
        return False
    is_usable = spec.rule is entry.before.spec.rule and work.may_stay_on_device
    # The first tokens of a longer block differ from those of a shorter block. Only seeded rejection sampling depends on that.
    if spec.rule is Rule.REJECTION and work.request.params.seed is not None:
        is_usable = is_usable and spec.size == launched.size
    return work.request.computed == entry.start + entry.before.verdict.accepted and (is_usable or not spec.size)


def _chosen(works: Works, tokens: Tensor) -> Tensor:
    """Return the token chosen for each of ``works``, all of which decode plainly."""
    indices = [work.choices for work in works if work.choices is not None]
    if indices == list(range(len(tokens))):
        return tokens
    return tokens.index_select(0, upload_indices(indices, tokens.device))
