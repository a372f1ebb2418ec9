"""Choose the works of the next step: decoding requests first, then chunks of prompts, by priority and age.

A draft makes a pass longer, and a prompt that arrives during the pass waits for its end. The scheduler pays that time back to
prompts with two clocks. ``_started`` is the time of the last step. ``_prompts_due`` is the number of seconds that prompts
still have before drafting resumes. A step in which drafts sat out subtracts its duration; any other step sets the clock to its
duration. While it is positive and there are prompts to read, requests that draft sit out; requests that decode plainly go on.

If pages run out, the youngest running request of the lowest priority gives its pages back and waits. It resumes by recomputing
its tokens. Noise belongs to positions, so the request goes on with the same tokens.
"""

import time
from bisect import insort_left, insort_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter

from volley.decode.work import Phase, Shape, Work
from volley.engine.capacity import Capacity
from volley.engine.kv_manager import KVManager
from volley.engine.pacing import Pacing
from volley.engine.step import Step
from volley.procedures.request import Request


class Scheduler:
    def __init__(
        self, capacity: Capacity, kv_manager: KVManager, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.capacity = capacity
        self._clock = clock
        self.kv_manager = kv_manager
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """Running requests. Both queues are ordered: the first request is served first."""
        self.step = 0
        self._started = 0.0  # time of the last step
        self._prompts_due = 0.0
        """Seconds that prompts still have before drafting resumes."""
        self._drafts_sat_out = False

    def add(self, request: Request) -> None:
        insort_right(self.waiting, request, key=_priority)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def is_decoding(self) -> bool:
        """True if any request decodes. A prompt that arrives now may have to wait for that pass."""
        return any(request.is_decoding for request in self.running)

    def schedule(
        self, pacing: Pacing, is_launched: Callable[[Sequence[Work[Request]]], bool] = lambda _: False
    ) -> Step:
        """Make the next step. It has no works only if there is nothing to do.

        ``is_launched`` returns True if the device already runs exactly these works; they have no pages yet at that time.
        Prompts are then read after them.
        """
        started = time.perf_counter()
        works: list[Work[Request]] = []
        under_way = min(len(self.running) + len(self.waiting), self.capacity.max_running)
        most, decoding, unread = self.capacity.max_batch_tokens, list[Request](), list[Request]()
        for request in self.running:
            (decoding if request.is_decoding else unread).append(request)
        commits = [work for request in unread if (work := _read(request, most)).phase is Phase.COMMIT]
        decided = pacing.decide(decoding, under_way)
        is_under_way = is_launched([*decided, *commits])
        may_sit_out = self._are_prompts_due(self._clock()) and not is_under_way
        drafting = [work for work in decided if may_sit_out and _drafts(work)]
        others = [work for work in decided if not (may_sit_out and _drafts(work))]
        in_turn, away = self._in_turn([*others, *commits])
        for work in in_turn:
            self._schedule(work, works)
        self._share_out(works)
        committing = {work.request for work in commits}
        unread = [request for request in unread if request not in committing]
        reads = not is_under_way and self._read_prompts(pacing, works, unread, under_way)
        if not works:  # the canvas in turn found no pages: schedule the first other canvas that does
            for work in away:
                if self._schedule(work, works):
                    break
        self._drafts_sat_out = reads and bool(drafting)
        if drafting and not self._drafts_sat_out:
            for work in drafting:
                self._schedule(work, works)
            self._share_out(works)
        self._grow_others(works)
        assert works or not self.has_work, "a pool that fits every single request always schedules one"
        pacing.suspend_drafting(works, self.running, under_way)
        return Step(works, pacing.policy.uses_confidence, started)

    def _are_prompts_due(self, now: float) -> bool:
        """Update both clocks to ``now``. Return True if prompts go before drafts."""
        seconds, self._started = now - self._started, now
        self._prompts_due = self._prompts_due - seconds if self._drafts_sat_out else seconds
        return self._prompts_due > 0

    def _read_prompts(self, pacing: Pacing, works: list[Work[Request]], unread: list[Request], under_way: int) -> bool:
        """Schedule chunks of prompts, ``unread`` first, with the tokens left in the pass. Return True if any was scheduled."""
        most, before = self.capacity.max_batch_tokens, len(works)
        budget = max(most - sum(work.num_tokens for work in works), -(-most // 8))  # chains must not starve prompts
        for reader in unread:
            if budget > 0:
                budget -= self._schedule(_read(reader, budget), works)
        while budget > 0 and len(self.running) < self.capacity.max_running:
            request = next((own for own in self.waiting if not self._is_held(own)), None)
            if request is None:
                break
            if not self.kv_manager.admit(request, self._first_reach(request, pacing.policy.block_size)):
                break
            self.waiting.remove(request)
            insort_right(self.running, request, key=_priority)
            work = pacing.decide([request], under_way)[0] if request.is_decoding else _read(request, budget)
            if work.spec.shape is not Shape.CHAIN:
                work.spec = work.spec.cut(max(work.spec.positions, budget - 1))
            taken = self._schedule(work, works)
            if not taken:  # too few pages after all: it waits again
                break
            budget -= taken
        return len(works) > before

    @staticmethod
    def _first_reach(request: Request, block_size: int) -> int:
        """Return the positions that a request needs after its prompt: for one block, or to the end of its canvas."""
        nearest = min(request.length + 1, request.max_length)
        canvas = request.procedure.reach(request.num_prompt, nearest, request.params)
        return max(canvas, min(request.length + block_size, request.max_length))

    def _is_held(self, request: Request) -> bool:
        """Return True if a request waits for another one that is about to read the same prompt."""
        other = request.after
        if other is not None:
            is_read = other.num_output > 0 or other.is_decoding
            if is_read or not (other in self.running or other in self.waiting):
                other = request.after = None
        return other is not None

    def _in_turn(self, works: list[Work[Request]]) -> tuple[list[Work[Request]], list[Work[Request]]]:
        """Split ``works`` into those that take part and canvases that exceed the token budget. Canvases go by priority, then
        by longest wait.

        A draft that a decoding method made itself is always verified. If the budget is short, it runs without the canvas
        behind it.
        """
        self.step += 1
        most = budget = self.capacity.max_batch_tokens
        waiting = set[Request]()
        canvases = [work for work in works if work.phase in (Phase.DENOISE, Phase.COMMIT, Phase.VERIFY)]
        for work in sorted(canvases, key=attrgetter("request.params.priority", "request.denoised_at")):
            fits = work.num_tokens <= budget or budget == most
            if work.phase is Phase.VERIFY and not fits:
                work.spec, work.num_fused, fits = replace(work.spec, size=work.spec.size - work.num_fused), 0, True
            if fits:
                budget -= work.num_tokens
                work.request.denoised_at = self.step
            else:
                waiting.add(work.request)
        in_turn = [work for work in works if work.request not in waiting]
        return in_turn, [work for work in works if work.request in waiting]

    def _schedule(self, work: Work[Request], works: list[Work[Request]]) -> int:
        """Add a work to ``works``, preempting requests that are served later if it needs their pages. Return its number of
        tokens.

        Trees and prompt-lookup drafts get their pages later, when every request has some.
        """
        request = work.request
        if request not in self.running:  # it was preempted in this step
            return 0
        chain = work.spec.size if work.spec.shape is Shape.CHAIN else work.spec.positions
        while not self.kv_manager.reserve(request, request.computed + work.num_known + chain):
            victim = self.running[-1]
            self.preempt(victim)
            works[:] = [other for other in works if other.request is not victim]
            if victim is request:
                return 0
        works.append(work)
        return work.num_tokens

    def _share_out(self, works: list[Work[Request]]) -> None:
        """Give trees and prompt-lookup drafts half of the tokens that chains leave, in equal parts; prompts get the rest."""
        larger = [work for work in works if work.spec.shape is not Shape.CHAIN]
        left = self.capacity.max_batch_tokens - sum(
            work.num_tokens if work.spec.shape is Shape.CHAIN else work.num_known + work.spec.positions
            for work in works
        )
        for work in larger:
            work.spec = work.spec.cut(work.spec.positions + max(0, left) // 2 // len(larger))

    def _grow_others(self, works: list[Work[Request]]) -> None:
        """Reserve pages for trees and prompt-lookup drafts, which are cut if few pages are left."""
        for work in works:
            if work.spec.shape is not Shape.CHAIN:
                request = work.request
                work.spec = work.spec.cut(self.kv_manager.pages.capacity(request) - request.length)
                grown = self.kv_manager.reserve(request, request.length + work.spec.size)
                assert grown, "the spec was cut to the free pages"

    def preempt(self, request: Request) -> None:
        """Take a running request's pages. It waits ahead of all others of its priority."""
        self.running.remove(request)
        self.kv_manager.release(request)
        request.stats.preemptions += 1
        insort_left(self.waiting, request, key=_priority)

    def begin_anew(self) -> list[Request]:
        """Preempt all running requests after a step that failed. Return those that cannot go on: ended, failed or torn."""
        for request in self.waiting:
            self.kv_manager.release(request)  # pages that a failed admission gave it
        for request in self.running[::-1]:
            self.preempt(request)
            request.canvas = None  # its pass may be half done
        return [one for one in self.waiting if one.is_torn or one.error is not None or one.finish_reason is not None]

    def finish(self, request: Request) -> None:
        """Remove a request that ended or was aborted, wherever it is."""
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self.kv_manager.release(request)


def _read(request: Request, budget: int) -> Work[Request]:
    """Make the work of a prompt's next chunk."""
    return request.procedure.read(request, min(budget, request.prefill_end - request.computed))


_priority = attrgetter("params.priority")


def _drafts(work: Work[Request]) -> bool:
    return work.phase is Phase.DECODE and work.spec.size > 0
