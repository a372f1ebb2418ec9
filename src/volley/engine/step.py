"""Hold one step of the engine: ``Engine.step`` makes it, fills it in line by line, and drops it."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from volley.decode.on_device import Reading
from volley.decode.work import Phase, Proposal, Rule, Shape, Work, group_by
from volley.memory.batch import RaggedBatch
from volley.memory.recurrent_pass import RecurrentPass
from volley.policies.base import Cycle
from volley.procedures.request import Request
from volley.proposers.base import Proposer


@dataclass(slots=True)
class Timings:
    """Wall-clock seconds of the parts of a step."""

    draft: float = 0.0
    """Drafting, and making the drafter's K/V of kept tokens."""
    walk: float = 0.0
    """Part of ``draft`` that a sequential head takes."""
    verify: float = 0.0
    """Target pass and verification."""

    @contextmanager
    def count(self, part: str) -> Iterator[None]:
        """Add the seconds that the body takes to ``part``."""
        started = time.perf_counter()
        yield
        setattr(self, part, getattr(self, part) + time.perf_counter() - started)


@dataclass(slots=True)
class Step:
    """One step: T tokens of all works go through the target, and R of them get logits."""

    works: list[Work[Request]]
    with_confidence: bool = False
    """True if the policy reads the drafter's confidences."""
    started: float = field(default_factory=time.perf_counter)
    timings: Timings = field(default_factory=Timings)
    settling: float = 0.0
    """Seconds spent, before drafting, on draft K/V of earlier steps' tokens."""
    drafting: float = 0.0
    """Seconds of drafting, without ``settling``."""
    has_draft_kv: bool = False
    """True if the draft K/V of this step's tokens were made within the step."""
    is_on_device: bool = False
    """True if the host has not read the drafts before verification. It then cannot tell when drafting ended, because the
    device was still at work."""
    cycles: list[Cycle] = field(default_factory=list)
    """Result of each work in :attr:`decoding`, for the policy."""
    batch: RaggedBatch | None = None
    recurrent: RecurrentPass | None = None
    """States of recurrent layers, if the target has any."""
    logits: Tensor | None = None
    """Logits ``[R, V]``; each work owns the rows in its ``rows``."""
    features: Tensor | None = None
    """Tapped hidden states ``[T, taps · H]`` of the target; ``None`` without a drafter, or if drafting is suspended for all
    requests."""

    @property
    def unsuspended(self) -> list[Work[Request]]:
        """Works that get draft K/V: the drafting of their requests is not suspended."""
        return [work for work in self.works if not work.request.drafting_suspended]

    @property
    def decoding(self) -> list[Work[Request]]:
        """Works that the policy decides about. The others read prompts, or belong to a decoding method that drafts by itself."""
        return [work for work in self.works if work.phase is Phase.DECODE]

    def note_noise_used(self) -> None:
        """Record for each request up to which position a draft has used the target's noise."""
        for work in self.works:
            if work.spec.positions and work.spec.rule is Rule.COUPLED:
                work.request.noise_used_until = max(
                    work.request.noise_used_until, work.request.length + work.spec.positions
                )


def propose(step: Step, drafter: Proposer | None) -> None:
    """Fill in the proposal of every work that asks for a draft."""
    with step.timings.count("draft"):
        drafting: list[Work[Any]] = [work for work in step.works if work.spec.positions]
        for work in step.works:
            is_read = work.phase is Phase.PREFILL and work.request.computed + work.num_known == work.request.length
            if is_read and drafter is not None:
                drafter.see(work.request.token_ids)
            if work.spec.shape is Shape.LOOKUP:  # found before the policy decided, because it weighs what was found
                work.proposal = Proposal(work.lookup_tokens[: work.spec.size])
        if drafting:
            assert drafter is not None, "a policy drafts nothing without a drafter"
            step.timings.walk = drafter.propose(drafting, with_confidence=step.with_confidence)
        step.note_noise_used()
    step.drafting = step.timings.draft - step.settling


def choose(step: Step) -> list[Reading]:
    """Let the decoding method of each request judge its work. Return the values that the host still has to read for it."""
    assert step.logits is not None
    readings: list[Reading] = []
    with step.timings.count("verify"):
        for procedure, members in group_by(step.works, lambda work: work.request.procedure).items():
            reading = procedure.verify([step.works[index] for index in members], step.logits)
            if reading is not None:
                readings.append(reading)
    return readings


def accept(step: Step, readings: Sequence[Reading]) -> None:
    """Read the chosen tokens, which completes the verdict of every work."""
    with step.timings.count("verify"):
        for reading in readings:
            reading.read()


def conclude(step: Step, work: Work[Request], now: float) -> bool:
    """Apply a verdict to its request at time ``now``: tokens and statistics. Return True if it had any tokens."""
    request, verdict, stats = work.request, work.verdict, work.request.stats
    if work.phase is Phase.PREFILL:
        stats.prefill_seconds += now - step.started
    else:
        stats.add(step.timings.draft, step.timings.walk, step.timings.verify)
    if work.is_broken:
        request.fail()
        stats.total_seconds = time.perf_counter() - request.arrived
    if not verdict.token_ids:
        if (
            request.finish_reason is None and request.remaining == 0 and request.computed == request.length
        ):  # max_tokens 0 only reads the prompt
            request.finish_reason = "length"
            stats.total_seconds = stats.time_to_first_token = time.perf_counter() - request.arrived
        return False
    taken = request.append(verdict.token_ids, verdict.accepted)
    request.computed = min(request.computed, request.length)  # the text may have ended inside the block
    request.scores += work.scores[:taken]
    if work.phase in (Phase.DECODE, Phase.VERIFY):
        stats.accepted_lengths.append(taken)
        stats.block_sizes.append(1 + len(work.proposal.token_ids))
    stats.last_tokens, stats.total_seconds = taken, time.perf_counter() - request.arrived
    if not stats.time_to_first_token:
        stats.first_tokens, stats.time_to_first_token = taken, stats.total_seconds
    stats.output_tokens = request.num_output  # set last: until then the request counts as torn
    return True
