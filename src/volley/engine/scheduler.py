"""Who takes part in the next step: decoding requests first, then prompts in chunks, by priority and age.

When pages run out the youngest running request of the last priority gives its pages back and waits; it resumes by recomputing
its tokens, and since randomness belongs to positions, it goes on with the very tokens it would have had.
"""

from bisect import insort_left, insort_right
from collections import deque
from dataclasses import dataclass

from volley.engine.request import Request
from volley.memory.kv_cache import BlockTable, PagePool


@dataclass(slots=True)
class Scheduled:
    """What one request does in this step: compute ``num_known`` of its tokens and verify up to ``max_draft`` more.

    With ``max_nodes`` the drafter still fills ``max_draft`` slots, and a tree of up to so many tokens is verified instead;
    without slots they are tokens found in the text.
    """

    request: Request
    num_known: int
    max_draft: int
    max_nodes: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the target's pass, at most."""
        return self.num_known + max(self.max_draft, self.max_nodes)

    @property
    def emits(self) -> bool:
        """Whether the step reaches the request's last token, so that a new one can be chosen."""
        return self.request.computed + self.num_known == len(self.request.token_ids)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    max_running: int
    max_batch_tokens: int
    """Tokens of one target pass. Decoding requests always take part, with their chains; the rest share what is left, and
    prompts always an eighth."""
    prefix_caching: bool


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        ring_pool: PagePool | None = None,
        ring_pages: int = 0,
        draft_window: int = 0,
    ) -> None:
        """With a draft window every running request also owns ``ring_pages`` pages of ``ring_pool``."""
        self.config = config
        self.pool = pool
        self.ring_pool = ring_pool
        self.ring_pages = ring_pages
        self.draft_window = draft_window
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """Both from the first to be served to the last."""

    def add(self, request: Request) -> None:
        insort_right(self.waiting, request, key=_priority)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self, block_size: int) -> list[Scheduled]:
        """The next step's work; ``block_size`` counts the anchor. Empty only when there is nothing to do."""
        plan: list[Scheduled] = []
        for request in list(self.running):
            if request.is_decoding:
                self._schedule_decoding(request, block_size, plan)
        self._share_out(plan)
        left = self.config.max_batch_tokens - sum(scheduled.num_tokens for scheduled in plan)
        budget = max(left, -(-self.config.max_batch_tokens // 8))  # or chains might starve prompts
        for request in list(self.running):
            if budget > 0 and not request.is_decoding:
                budget -= self._schedule_prefill(request, budget, plan)
        while budget > 0 and self.waiting and len(self.running) < self.config.max_running:
            request = self.waiting[0]
            if not self._admit(request, block_size):
                break
            if request.is_decoding:
                budget -= self._schedule_decoding(request, block_size, plan)
            else:
                budget -= self._schedule_prefill(request, budget, plan)
        self._grow_others(plan)
        assert plan or not self.has_work, "a pool that fits every single request always schedules one"
        return plan

    def _schedule_decoding(self, request: Request, block_size: int, plan: list[Scheduled]) -> int:
        max_draft = max(0, min(block_size - 1, request.draft_slots, request.remaining - 1))
        if not self._grow(request, len(request.token_ids) + max_draft, plan):
            return 0
        scheduled = Scheduled(request, 1, max_draft, request.draft_nodes if max_draft else request.copied)
        plan.append(scheduled)
        return scheduled.num_tokens

    def _share_out(self, plan: list[Scheduled]) -> None:
        """Of what chains leave of a pass trees and copies share half, each request as much; the rest is for prompts."""
        larger = [scheduled for scheduled in plan if scheduled.max_nodes]
        left = self.config.max_batch_tokens - sum(scheduled.num_known + scheduled.max_draft for scheduled in plan)
        for scheduled in larger:
            scheduled.max_nodes = min(scheduled.max_nodes, scheduled.max_draft + max(0, left) // 2 // len(larger))

    def _grow_others(self, plan: list[Scheduled]) -> None:
        """Pages for trees and for what was found, out of what nobody else wants; where few are left they are smaller."""
        for scheduled in plan:
            if scheduled.max_nodes:
                request, length = scheduled.request, len(scheduled.request.token_ids)
                room = request.table.capacity + self.pool.num_available * self.pool.page_size - length
                scheduled.max_nodes = min(scheduled.max_nodes, room)
                grown = self.pool.grow(request.table, length + scheduled.max_nodes, request.max_length)
                assert grown, "there was room"

    def _schedule_prefill(self, request: Request, budget: int, plan: list[Scheduled]) -> int:
        size = min(budget, request.prefill_end - request.computed)
        if not self._grow(request, request.computed + size, plan):
            return 0
        plan.append(Scheduled(request, size, 0))
        return size

    def _admit(self, request: Request, block_size: int) -> bool:
        """Let the first waiting request run if all it has and its first block fit, so that it is not thrown out at once."""
        if self.config.prefix_caching:
            self._match_prefix(request)
        needed = self.pool.pages_for(min(len(request.token_ids) + block_size, request.max_length))
        missing = needed - len(request.table.pages)
        if missing > self.pool.num_available or not self._open_ring(request):
            self._release(request)
            return False
        self.waiting.popleft()
        insort_right(self.running, request, key=_priority)
        return True

    def _match_prefix(self, request: Request) -> None:
        usable = request.token_ids[: request.prefill_end + (request.num_output > 0)]
        request.page_hashes = self.pool.match_prefix(request.table, usable, request.prefix_root)
        request.computed = request.table.capacity
        if self.ring_pool is not None:
            # The ring starts empty: the window before the first block must be computed again to have its features.
            request.computed = max(0, request.computed - self.draft_window) // self.pool.page_size * self.pool.page_size
            self.pool.rollback(request.table, request.computed)
            del request.page_hashes[len(request.table.pages) :]
        if request.num_output == 0:
            request.stats.cached_tokens = request.computed

    def _open_ring(self, request: Request) -> bool:
        if self.ring_pool is None:
            return True
        request.draft_table = BlockTable(self.pool.page_size, is_ring=True)
        return self.ring_pool.grow(request.draft_table, self.ring_pages * self.pool.page_size)

    def _grow(self, request: Request, num_tokens: int, plan: list[Scheduled]) -> bool:
        """Pages for ``num_tokens`` positions, taken from those served after it if need be. False: it lost its own."""
        if request not in self.running:
            return False
        while not self.pool.grow(request.table, num_tokens, request.max_length):
            victim = self.running[-1]
            self.preempt(victim)
            plan[:] = [scheduled for scheduled in plan if scheduled.request is not victim]
            if victim is request:
                return False
        return True

    def preempt(self, request: Request) -> None:
        """Take a running request's pages; it waits before all others of its priority."""
        self.running.remove(request)
        self._release(request)
        request.found, request.copied = [], 0  # it may go on in a step for which nothing was looked up
        request.stats.preemptions += 1
        insort_left(self.waiting, request, key=_priority)

    def finish(self, request: Request) -> None:
        """Remove a request that ended or was aborted, wherever it is."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._release(request)

    def _release(self, request: Request) -> None:
        self.pool.release(request.table)
        request.computed = 0
        request.page_hashes = []
        if self.ring_pool is not None:
            self.ring_pool.release(request.draft_table)

    def check_integrity(self) -> None:
        """Recount every page of both pools from the requests alive."""
        alive = [*self.running, *self.waiting]
        self.pool.check_integrity(request.table for request in alive)
        if self.ring_pool is not None:
            self.ring_pool.check_integrity(request.draft_table for request in alive)


def _priority(request: Request) -> int:
    return request.params.priority
