"""Manage what the models store of each request: the target's K/V on pages, the drafter's K/V on the same pages or in a ring.

A step ends with one verdict per request. ``keep`` applies it: it moves, rolls back and publishes state. State that only drafts
read may be deferred until ``prepare``, before the next drafts. Another type of state (such as a recurrent layer's) is another
subclass here.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from volley.config import DecodingConfig
from volley.decode.work import Phase, Work
from volley.engine.step import Step
from volley.memory.attention import IntArray
from volley.memory.kv_cache import BlockTable, PagePool
from volley.memory.kv_store import KVStore
from volley.memory.upload import upload, upload_together
from volley.models.drafters.backlog import Backlog, KeptRun
from volley.models.drafters.draft_model import DraftModel
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.pilot import largest_block
from volley.procedures.request import Request

LEAST_CONTEXT = 128
"""Tokens with draft K/V that a request needs before drafting resumes after a suspension. With fewer, drafts are often wrong."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Load of an engine between two steps."""

    running: int
    waiting: int
    pages_used: int
    num_pages: int
    max_tokens: int
    """Most tokens of one request, prompt included: the context or the pages limit it."""
    max_running: int
    draft_seconds: float
    """Seconds of drafting in the last step."""
    verify_seconds: float


class StateManager(ABC):
    """Base class of managers. Each manages one type of state of all requests."""

    can_suspend = True
    """True if drafting may be suspended: this state can skip the tokens that are decoded meanwhile."""

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Reserve capacity for ``num_tokens`` tokens of a request. Return False, and change nothing, if it is not there."""
        return True

    def reserve_ahead(self, request: Request, num_tokens: int) -> bool:
        """Call :meth:`reserve` for a draft that is launched before the current one is verified."""
        return self.reserve(request, num_tokens)

    def match_prefix(self, request: Request, most: int) -> int:
        """Return how many of the first ``most`` tokens of a new request are cached."""
        return most

    def truncate(self, request: Request, num_tokens: int) -> None:
        """Use fewer tokens than :meth:`match_prefix` found, because another state has fewer cached."""

    def prepare(self, step: Step) -> None:
        """Complete the state that the step's drafts read."""

    def settle(self) -> None:
        """Complete all deferred state."""

    @abstractmethod
    def keep(self, step: Step) -> None:
        """Apply the verdicts: keep what was accepted and drop the rest. ``request.computed`` has not moved yet."""

    def withdraw(self, request: Request) -> None:
        """Remove a request's state from the prefix cache. Call this before the request is released."""

    def release(self, request: Request) -> None:
        """Free a request's state."""

    def forget(self) -> None:
        """Drop the cached prefixes."""

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Recount everything from the live requests; raise ``AssertionError`` if a count is wrong."""


class TargetPages(StateManager):
    """The target's K/V and the prefix cache. Without a draft window the drafter's K/V share the pages."""

    def __init__(self, pool: PagePool, store: KVStore, *, prefix_caching: bool) -> None:
        self.pool, self.store, self.prefix_caching = pool, store, prefix_caching

    def reserve(self, request: Request, num_tokens: int) -> bool:
        return self.pool.grow(request.table, num_tokens, request.max_length)

    def capacity(self, request: Request) -> int:
        """Return the tokens that the request could have if it took all free pages."""
        return request.table.capacity + self.pool.num_available * self.pool.page_size

    def match_prefix(self, request: Request, most: int) -> int:
        if self.prefix_caching and request.prefix_root is not None:
            usable = request.token_ids[:most]
            request.page_hashes = self.pool.match_prefix(request.table, usable, request.prefix_root)
        return request.table.capacity

    def truncate(self, request: Request, num_tokens: int) -> None:
        self.pool.rollback(request.table, num_tokens)
        del request.page_hashes[len(request.table.pages) :]

    def keep(self, step: Step) -> None:
        """Apply the verdicts. An unfinished canvas keeps its pages for the next pass, unless more than half of all pages are
        in use."""
        self._compact(step)
        has_many = 2 * self.pool.num_available >= self.pool.num_pages
        for work in step.works:
            request = work.request
            if request.canvas is None or not has_many:
                self.pool.rollback(request.table, request.computed + work.num_kept)
            if self.prefix_caching:
                self._publish(work)

    def _compact(self, step: Step) -> None:
        """Move the K/V of accepted tree nodes to the positions of their tokens."""
        sources, targets = list[IntArray](), list[IntArray]()
        for work in step.works:
            if not work.verdict.path:
                continue
            nodes = np.asarray(work.verdict.path, dtype=np.int64)
            places = np.arange(1, len(nodes) + 1)
            away = nodes != places
            if away.any():
                start, table = work.request.computed, work.request.table
                kv_slots = table.slot_array(start, start + int(nodes[-1]) + 1)
                sources.append(kv_slots[nodes[away]])
                targets.append(kv_slots[places[away]])
        if sources:
            assert step.batch is not None
            device = step.batch.positions.device
            self.store.move(*upload_together([np.concatenate(sources), np.concatenate(targets)], device))

    def _publish(self, work: Work[Request]) -> None:
        """Add the request's full pages to the prefix cache."""
        request, size = work.request, self.pool.page_size
        known = request.computed + work.num_kept
        if request.prefix_root is None or len(request.page_hashes) >= known // size:
            return
        token_ids = request.token_ids + work.verdict.token_ids[: work.verdict.accepted]
        while (done := len(request.page_hashes)) < known // size:
            parent = request.page_hashes[-1] if done else request.prefix_root
            digest = self.pool.page_hash(parent, token_ids[done * size : (done + 1) * size])
            request.page_hashes.append(digest)
            self.pool.publish(request.table.pages[done], digest)

    def withdraw(self, request: Request) -> None:
        self.pool.withdraw(request.page_hashes)

    def release(self, request: Request) -> None:
        self.pool.release(request.table)
        request.page_hashes = []

    def forget(self) -> None:
        self.pool.forget()

    def check_integrity(self, requests: Sequence[Request]) -> None:
        self.pool.check_integrity(request.table for request in requests)


class DraftContext(StateManager):
    """The drafter's K/V of each request's tokens, computed from the target's features and stored on the target's pages.

    Only drafts read these K/V. They are computed before the next draft, or once :attr:`most_waiting` tokens are pending. If
    drafting is rare, the drafter's weights are thus read once for many passes. No first token waits for the draft K/V of its
    prompt. Until then each step appends its features whole, and the pending tokens of a request form one open run.
    """

    can_suspend = False

    def __init__(self, model: DraftModel, most_waiting: int = 256) -> None:
        self.model, self.most_waiting = model, most_waiting
        self.backlog = Backlog(model.keep)
        self._open: dict[Request, KeptRun] = {}
        self._decoded = 0
        """Number of answer tokens among those that the last step added."""

    def prepare(self, step: Step) -> None:
        """Compute the pending draft K/V if the step drafts, or if too many are pending. Only the share of the last step's
        tokens counts as drafting time, because the others were due anyway.

        A step that reads a prompt defers them, unless twice as many are pending, so that its first token comes sooner.
        """
        waiting, most = len(self.backlog), self.most_waiting
        if any(work.phase is Phase.PREFILL for work in step.works):
            most *= 2
        if not waiting or not (waiting >= most or any(work.spec.positions for work in step.works)):
            return
        started, overdue = time.perf_counter(), 1 - self._decoded / waiting
        self.settle()
        step.settling = overdue * (time.perf_counter() - started)

    def settle(self) -> None:
        self._decoded = 0
        for request in list(self._open):
            self._close(request)
        self.backlog.write()

    def keep(self, step: Step) -> None:
        works = step.unsuspended
        if not works or step.has_draft_kv:
            return
        runs = [self._open.setdefault(work.request, KeptRun(work.request.computed)) for work in works]
        counts = [work.num_kept for work in works]
        self.backlog.add(self._kept_features(step, works), runs, counts)
        self._decoded = sum(work.num_kept for work in works if work.phase is not Phase.PREFILL)

    def release(self, request: Request) -> None:
        self._close(request)

    def _close(self, request: Request) -> None:
        """Record the slots for the draft K/V of a request's pending tokens, while the request still owns them."""
        run = self._open.pop(request, None)
        if run is not None:
            table = request.draft_table
            self.backlog.close(run, table.slot_array(max(run.start, table.earliest), run.end))

    def _kept_features(self, step: Step, works: list[Work[Request]]) -> Tensor:
        """Return the features ``[Σ kept, taps · H]`` of the kept tokens, work by work."""
        assert step.batch is not None
        assert step.features is not None
        features = step.features
        if sum(work.num_kept for work in works) < len(features):  # otherwise all rows are kept, in order
            features = _kept_rows(step, features)
        return self._with_next(works, features) if self.model.reads_next else features

    def _with_next(self, works: list[Work[Request]], features: Tensor) -> Tensor:
        """Combine each row of ``features`` with the token after it, which is known by now. The last row is stored for the next
        draft."""
        following, end = list[int](), 0
        for work in works:
            request, count = work.request, work.num_kept
            first, tokens = request.computed + 1, request.token_ids + work.verdict.token_ids
            after = tokens[first : first + count]
            following += after + [0] * (count - len(after))  # no token comes after a prompt that is only read
            end += count
            if count:
                request.tapped = features[end - 1].clone()
        return self.model.with_next(features, torch.tensor(following, device=features.device))


def _kept_rows(step: Step, features: Tensor) -> Tensor:
    """Return the kept rows of ``features [T, taps · H]``, for the requests whose drafting is not suspended."""
    assert step.batch is not None
    pairs = [
        pair for pair in zip(step.works, step.batch.offsets, strict=False) if not pair[0].request.drafting_suspended
    ]
    if all(work.verdict.path is None for work, _ in pairs):  # the first rows of each chain
        return torch.cat([features[start : start + work.num_kept] for work, start in pairs])
    rows = [np.array(work.kept_rows, dtype=np.int64) + start for work, start in pairs]
    return features[upload(np.concatenate(rows), features.device)]


class DraftRing(DraftContext):
    """The drafter's K/V of the last tokens only, on a ring of pages for every running request.

    A full page is published by its hash and not written again: a ring that wraps around to it takes another page instead. So
    after a prefix hit, the ring begins with those pages of the window before it that are still cached.
    """

    def __init__(
        self,
        model: DraftModel,
        window: int,
        page_size: int,
        max_running: int,
        most_waiting: int = 256,
        reach: int | None = None,
    ) -> None:
        """Make rings for ``max_running`` requests. Beside the window a ring holds ``reach`` tokens, by default one block. With
        two blocks, the next one can be drafted before the current one is verified."""
        super().__init__(model, most_waiting)
        self.window, self.page_size, self.block_size = window, page_size, model.block_size
        self._reach = reach or self.block_size
        self.num_pages = ring_pages(self._reach, window, page_size)
        self.pool = PagePool(self.num_pages * num_rings(max_running), page_size)
        self.can_suspend = not model.reads_next
        self._with_gap = set[Request]()  # requests whose last tokens have no draft K/V, because drafting is suspended

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Reserve a ring, and capacity in it for a block after the known tokens."""
        if not (request.draft_table.is_ring and request.draft_table.pages):
            request.draft_table = self._begin(request)
        if request not in self._with_gap:
            self._enter(request, request.computed + self.block_size)
        return True

    def reserve_ahead(self, request: Request, num_tokens: int) -> bool:
        if request.drafting_suspended or request in self._with_gap or num_tokens > request.computed + 1 + self._reach:
            return False
        self._enter(request, num_tokens)
        return True

    def _begin(self, request: Request) -> BlockTable:
        """Make a ring with the cached pages of the window before the request's next token."""
        end = request.computed // self.page_size
        earliest = max(0, request.computed - self.window) // self.page_size
        known = dict[int, int]()
        for number in range(end - 1, earliest - 1, -1):
            page = self.pool.find(request.page_hashes[number])
            if page is None:
                break
            known[number % self.num_pages] = page
        fresh = iter(self.pool.take(self.num_pages - len(known)))
        pages = [known[place] if place in known else next(fresh) for place in range(self.num_pages)]
        table = BlockTable(self.page_size, pages, is_ring=True)
        table.first, table.num_entered = (end - len(known)) * self.page_size, end
        return table

    def prepare(self, step: Step) -> None:
        for request in [work.request for work in step.unsuspended if work.request in self._with_gap]:
            self._resume(request)
        super().prepare(step)

    def _resume(self, request: Request) -> None:
        """Resume drafting after a suspension. The drafter never sees the tokens that were skipped."""
        self._with_gap.remove(request)
        request.draft_table.first = request.computed
        request.drafts_from = request.computed + LEAST_CONTEXT + 1
        self._enter(request, request.computed + self.block_size)

    def _enter(self, request: Request, end: int) -> None:
        """Give the positions before ``end`` writable pages."""
        table, last = request.draft_table, (end - 1) // self.page_size
        if last < table.num_entered:
            return
        run, earliest = self._open.get(request), last + 1 - self.num_pages
        if run is not None and run.start < earliest * self.page_size:
            self._close(request)  # before another page gets its slots
        for number in range(max(table.num_entered, earliest), last + 1):
            place = number % self.num_pages
            table.pages[place] = self.pool.writable(table.pages[place])
        table.num_entered = last + 1

    def keep(self, step: Step) -> None:
        works = step.unsuspended
        for work in works:
            self._enter(work.request, work.request.computed + work.num_kept)
        super().keep(step)
        for work in works:
            self._publish(work)
        if len(works) < len(step.works):
            for work in step.works:
                if work.request.drafting_suspended and work.request not in self._with_gap:
                    self._close(work.request)
                    self._with_gap.add(work.request)

    def _publish(self, work: Work[Request]) -> None:
        """Publish the pages that are full now, though their K/V may be computed later."""
        request, size = work.request, self.page_size
        end = request.computed + work.num_kept
        if request.computed // size == end // size:
            return
        known = -(-request.draft_table.first // size)
        first = max(known, request.computed // size, (end - 1) // size + 1 - self.num_pages)
        for number in range(first, min(end // size, len(request.page_hashes))):
            self.pool.publish(request.draft_table.pages[number % self.num_pages], request.page_hashes[number])

    def withdraw(self, request: Request) -> None:
        self.pool.withdraw(request.page_hashes)

    def release(self, request: Request) -> None:
        super().release(request)
        self._with_gap.discard(request)
        if request.draft_table.is_ring:  # a request that was not admitted has no ring; its table is the target's
            self.pool.release(request.draft_table)

    def forget(self) -> None:
        self.pool.forget()

    def check_integrity(self, requests: Sequence[Request]) -> None:
        self.pool.check_integrity(request.draft_table for request in requests)


def num_rings(max_running: int) -> int:
    """Return the number of rings in a pool: a few more than can be in use, which cache windows of prompts and answers."""
    return max_running + 4


def ring_pages(num_drafted: int, window: int, page_size: int) -> int:
    """Return the pages of a ring that holds a draft window and ``num_drafted`` tokens of blocks, at any alignment."""
    return -(-(window + num_drafted) // page_size) + 1


class DraftSpan(NamedTuple):
    """Context that a drafter sees, and what it drafts, in tokens."""

    window: int | None
    block_size: int
    """Largest block that is drafted."""
    reach: int
    """Size of the blocks that a draft ring holds."""


def draft_span(drafter: Drafter, config: DecodingConfig, *, cuda_graphs: bool) -> DraftSpan:
    """Return what a drafter sees and drafts under ``config``."""
    block = largest_block(config, drafter.config.block_size, drafter.folder)
    return DraftSpan(drafter.config.window_for(config.draft_window), block, block * blocks_in_ring(cuda_graphs))


def blocks_in_ring(cuda_graphs: bool) -> int:
    """Return how many blocks a ring holds: two if the next pass may be launched before the current one is verified."""
    return 1 + cuda_graphs


class KVManager:
    """Manages all states of all requests for the scheduler."""

    def __init__(self, pages: TargetPages, others: Iterable[StateManager]) -> None:
        self.pages = pages
        self.states: tuple[StateManager, ...] = (pages, *others)
        self.can_suspend = all(state.can_suspend for state in self.states)

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Reserve capacity for ``num_tokens`` tokens in every state."""
        return all(state.reserve(request, num_tokens) for state in self.states)

    def reserve_ahead(self, request: Request, num_tokens: int) -> bool:
        """Call :meth:`reserve` for a draft that is launched before the current one is verified."""
        return all(state.reserve_ahead(request, num_tokens) for state in self.states)

    def admit(self, request: Request, num_tokens: int) -> bool:
        """Reuse the cached prefix of a request. Return False, and hold nothing, if ``num_tokens`` tokens would not fit."""
        request.computed = request.procedure.matchable(request)
        if request.first_unscored is not None:  # cached positions have no logits
            request.computed = min(request.computed, request.first_unscored)
        for state in self.states:
            request.computed = state.match_prefix(request, request.computed)
        for state in self.states:
            state.truncate(request, request.computed)
        if self.pages.capacity(request) < num_tokens or not all(s.reserve(request, 0) for s in self.states):
            self.release(request)
            return False
        if request.num_output == 0 and not request.stats.preemptions:  # after a preemption it finds its own pages
            request.stats.cached_tokens = request.computed
        return True

    def prepare(self, step: Step) -> None:
        """Complete the state that the step's drafts read."""
        with step.timings.count("draft"):
            for state in self.states:
                state.prepare(step)

    @torch.inference_mode()
    def settle(self) -> None:
        """Complete all deferred state, so that all K/V can be read."""
        for state in self.states:
            state.settle()

    def keep(self, step: Step) -> None:
        """Apply the step's verdicts to every state."""
        for state in self.states:
            with step.timings.count("draft" if isinstance(state, DraftContext) else "verify"):
                state.keep(step)
        for work in step.works:
            work.request.computed += work.num_kept

    def withdraw(self, request: Request) -> None:
        """Remove a request's pages, draft K/V and recurrent states from the prefix cache."""
        for state in self.states:
            state.withdraw(request)

    def release(self, request: Request) -> None:
        """Release every state, the last one first: pending draft K/V must record their slots while the request owns its pages."""
        for state in reversed(self.states):
            state.release(request)
        request.computed = 0

    def forget(self) -> None:
        """Drop the cached prefixes."""
        for state in self.states:
            state.forget()

    def check_integrity(self, requests: Sequence[Request]) -> None:
        for state in self.states:
            state.check_integrity(requests)
