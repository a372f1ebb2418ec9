"""Manage the states of recurrent layers: one slot per request, and snapshots for the prefix cache.

A recurrent state cannot be cut at a page boundary. So a cached prefix ends where both a page and a snapshot end. Snapshots are
taken

- at the last page boundary of a prompt,
- at every fourth page boundary of an answer, of which only the newest is kept,
- at a *junction*: where the pages of a prompt matched further than any snapshot, because other prompts may diverge there too.

The least recently used snapshot is evicted first.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from volley.decode.work import Phase, Work
from volley.engine.capacity import Capacity
from volley.engine.kv_manager import StateManager
from volley.engine.step import Step
from volley.memory.batch import RaggedBatch
from volley.memory.recurrent_pass import RecurrentPass, Wanted
from volley.memory.recurrent_store import RecurrentStore
from volley.models.targets.target import Target
from volley.procedures.request import Request

_BYTES = 2**30  # of all states, by default
_PREFIXES = 256
_FEWEST = 4
_ANSWER_PAGES = 4  # pages of an answer between two snapshots


@dataclass(slots=True)
class _Held:
    """Snapshot bookkeeping of one request."""

    junction: int = 0
    """Number of its first tokens that had cached pages but no snapshot; 0 if there is no junction."""
    own: bytes | None = None
    """Page hash of the newest snapshot of its answer; a later snapshot replaces it."""


class RecurrentStates(StateManager):
    """Recurrent states of requests and cached prefixes. It must be last among an engine's states, because it needs to know how
    far pages matched."""

    def __init__(self, store: RecurrentStore, page_size: int, *, prefix_caching: bool) -> None:
        self.store, self.page_size, self.prefix_caching = store, page_size, prefix_caching
        self.snapshots: OrderedDict[bytes, int] = OrderedDict()
        """Slots of snapshots by the hash of the page before them, least recently used first."""
        self._free = list(range(store.num_slots))
        self._held: dict[int, _Held] = {}

    @property
    def num_held(self) -> int:
        """Number of slots that requests hold."""
        return self.store.num_slots - len(self._free) - len(self.snapshots)

    # -- StateManager -------------------------------------------------------------------------------------------------
    def match_prefix(self, request: Request, most: int) -> int:
        held = self._held[request.request_id] = _Held()
        for pages in range(most // self.page_size, 0, -1):
            digest = request.page_hashes[pages - 1]
            if digest in self.snapshots:
                self.snapshots.move_to_end(digest)
                break
        else:
            pages = 0
        if most > pages * self.page_size:
            held.junction = most // self.page_size * self.page_size
        return pages * self.page_size

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Give the request a slot, and copy the snapshot of its prefix into it."""
        table = request.table
        if table.state is None:
            source = self.snapshots.get(request.page_hashes[-1]) if request.computed else None
            table.state = self._take(keep=source)
            if table.state is not None and source is not None:
                self.store.copy(source, table.state)
        return table.state is not None

    def keep(self, step: Step) -> None:
        """Advance every request's state to its last kept token, and take snapshots."""
        assert step.recurrent is not None
        wanted: list[Wanted] = []
        for index, work in enumerate(step.works):
            rows, slot = work.kept_rows, work.request.table.state
            assert slot is not None, "a request that takes part holds a slot"
            if rows:
                wanted += [Wanted(index, rows[-1], slot), *self._snapshots_of(index, work, rows)]
        # A later snapshot may have taken the slot of an earlier one in this step; then only the later one is written.
        try:
            step.recurrent.write(list({each.slot: each for each in wanted}.values()))
        except BaseException:
            self.forget()  # published snapshots may be unwritten
            raise

    def withdraw(self, request: Request) -> None:
        self._free += [self.snapshots.pop(digest) for digest in request.page_hashes if digest in self.snapshots]

    def release(self, request: Request) -> None:
        self._held.pop(request.request_id, None)
        if request.table.state is not None:
            self._free.append(request.table.state)
            request.table.state = None

    def check_integrity(self, requests: Sequence[Request]) -> None:
        held = [request.table.state for request in requests if request.table.state is not None]
        every = sorted([*held, *self.snapshots.values(), *self._free])
        assert every == list(range(self.store.num_slots)), "a slot of states is lost or used twice"

    def forget(self) -> None:
        """Drop all snapshots."""
        self._free += self.snapshots.values()
        self.snapshots.clear()

    # -- passes and snapshots ------------------------------------------------------------------------------------------
    def start(self, batch: RaggedBatch, works: Sequence[Work[Request]]) -> RecurrentPass:
        """Begin the pass over ``batch``, whose segments belong to ``works``."""
        return RecurrentPass(batch, self.store.layout, self.store, [self._marks(work) for work in works])

    def _marks(self, work: Work[Request]) -> tuple[int, ...]:
        """Return the rows of a prompt chunk whose states are needed: its last row, and the rows at snapshot boundaries."""
        if work.phase is not Phase.PREFILL:
            return ()
        rows = {end - work.request.computed - 1 for end in self._boundaries(work)}
        return tuple(sorted(rows | {work.num_known - 1}))

    def _boundaries(self, work: Work[Request]) -> list[int]:
        """Return the snapshot boundaries within a prompt chunk, as numbers of tokens from the start of the prompt."""
        request, size = work.request, self.page_size
        if not self.prefix_caching:
            return []
        last = (request.prefill_end - 1) // size * size  # a prompt's last token is always computed
        ends = sorted({self._held[request.request_id].junction, last})
        return [end for end in ends if request.computed < end <= request.computed + work.num_known]

    def _snapshots_of(self, index: int, work: Work[Request], rows: Sequence[int]) -> list[Wanted]:
        request, size = work.request, self.page_size
        if not self.prefix_caching:
            return []
        first, end = request.computed, request.computed + len(rows)
        if work.phase is Phase.PREFILL:
            ends = self._boundaries(work)
        else:
            last = end // (size * _ANSWER_PAGES) * size * _ANSWER_PAGES
            ends = [last] if last > first else []
        wanted = []
        for boundary in ends:
            slot = self._snapshot(request, boundary, in_answer=work.phase is not Phase.PREFILL)
            if slot is not None:
                wanted.append(Wanted(index, rows[boundary - first - 1], slot))
        return wanted

    def _snapshot(self, request: Request, boundary: int, *, in_answer: bool) -> int | None:
        """Return the slot for a new snapshot after ``boundary`` tokens; ``None`` if one exists already or no slot is free."""
        held, digest = self._held[request.request_id], request.page_hashes[boundary // self.page_size - 1]
        if digest in self.snapshots:
            self.snapshots.move_to_end(digest)
            return None
        slot = None
        if in_answer:
            slot = self.snapshots.pop(held.own, None) if held.own else None
            held.own = digest
        if slot is None:
            slot = self._take()
        if slot is not None:
            self.snapshots[digest] = slot
        return slot

    def _take(self, keep: int | None = None) -> int | None:
        """Return a free slot, or evict the least recently used snapshot other than ``keep``; ``None`` if there is none."""
        if self._free:
            return self._free.pop()
        for digest, slot in self.snapshots.items():
            if slot != keep:
                del self.snapshots[digest]
                return slot
        return None


def make_recurrent(target: Target, capacity: Capacity) -> RecurrentStates | None:
    """Make the states of a target's recurrent layers, if it has any. By default they hold 256 prefixes, or as many as fit in 1
    GiB."""
    layout = target.recurrent
    if not layout:
        return None
    most = max(_FEWEST, _BYTES // layout.bytes_per_state(target.dtype))
    num_states = capacity.num_states or min(capacity.max_running + _PREFIXES, most)
    store = RecurrentStore(layout, num_states, target.dtype, target.device)
    return RecurrentStates(store, capacity.page_size, prefix_caching=capacity.prefix_caching)
