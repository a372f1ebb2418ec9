"""The states of recurrent layers: each request has one slot of them, and snapshots serve the prefix cache.

A state cannot be cut where a page ends. So a prefix is found only where pages and a snapshot end together. Snapshots are taken

- at the last page boundary of a prompt,
- at every fourth page boundary of an answer, of which the newest is kept,
- at a *junction*, where pages of a prompt matched further than any snapshot: other prompts may part there too.

The least recently used snapshot makes room.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from volley.decode.work import Kind, Work
from volley.engine.capacity import Capacity
from volley.engine.states import SequenceState
from volley.engine.step import Step
from volley.memory.batch import RaggedBatch
from volley.memory.recurrent_pass import RecurrentPass, Wanted
from volley.memory.recurrent_store import RecurrentStore
from volley.models.targets.target import Target
from volley.procedures.request import Request

_BYTES = 2**30  # of all states, by default
_PREFIXES = 256
_FEWEST = 4
_ANSWER_PAGES = 4  # of an answer between two snapshots


@dataclass(slots=True)
class _Held:
    """What is known of one request beside its slot."""

    junction: int = 0
    """How many of its first tokens had pages in the cache and no snapshot; 0 if there is no junction."""
    own: bytes | None = None
    """The newest snapshot of its answer, by the hash of its page; a later one replaces it."""


class RecurrentStates(SequenceState):
    """Recurrent states of requests and prefixes. It must be the last of an engine's states: it asks how far pages matched."""

    def __init__(self, store: RecurrentStore, page_size: int, *, prefix_caching: bool) -> None:
        self.store, self.page_size, self.prefix_caching = store, page_size, prefix_caching
        self.snapshots: OrderedDict[bytes, int] = OrderedDict()
        """Slots of snapshots by the hash of the page that they follow, the least recently used first."""
        self._free = list(range(store.num_slots))
        self._held: dict[int, _Held] = {}

    @property
    def num_held(self) -> int:
        """Number of slots that requests hold."""
        return self.store.num_slots - len(self._free) - len(self.snapshots)

    # -- SequenceState -------------------------------------------------------------------------------------------------
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
        """Move every request's states to its last token that stays, and take snapshots."""
        assert step.recurrent is not None
        wanted: list[Wanted] = []
        for index, work in enumerate(step.works):
            rows, slot = work.kept_rows, work.request.table.state
            assert slot is not None, "a request that takes part holds a slot"
            if rows:
                wanted += [Wanted(index, rows[-1], slot), *self._snapshots_of(index, work, rows)]
        # A snapshot of this step may have given its slot to a later one, whose states are written in another order.
        try:
            step.recurrent.write(list({each.slot: each for each in wanted}.values()))
        except BaseException:
            self.forget()  # some would be found, and hold other states
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
        """Begin the pass over ``batch``, whose segments are those of ``works``."""
        return RecurrentPass(batch, self.store.layout, self.store, [self._marks(work) for work in works])

    def _marks(self, work: Work[Request]) -> tuple[int, ...]:
        """Rows of a part of a prompt after which states are wanted: its last one, and where snapshots are taken."""
        if work.kind is not Kind.PREFILL:
            return ()
        rows = {end - work.request.computed - 1 for end in self._boundaries(work)}
        return tuple(sorted(rows | {work.num_known - 1}))

    def _boundaries(self, work: Work[Request]) -> list[int]:
        """Where a snapshot is taken inside a part of a prompt, or at its end: numbers of tokens before it."""
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
        if work.kind is Kind.PREFILL:
            ends = self._boundaries(work)
        else:
            last = end // (size * _ANSWER_PAGES) * size * _ANSWER_PAGES
            ends = [last] if last > first else []
        wanted = []
        for boundary in ends:
            slot = self._snapshot(request, boundary, in_answer=work.kind is not Kind.PREFILL)
            if slot is not None:
                wanted.append(Wanted(index, rows[boundary - first - 1], slot))
        return wanted

    def _snapshot(self, request: Request, boundary: int, *, in_answer: bool) -> int | None:
        """The slot of a new snapshot after ``boundary`` tokens; ``None`` if there is one already, or no room."""
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
        """A free slot, or that of the least recently used snapshot other than ``keep``; ``None`` if there is none."""
        if self._free:
            return self._free.pop()
        for digest, slot in self.snapshots.items():
            if slot != keep:
                del self.snapshots[digest]
                return slot
        return None


def make_recurrent(target: Target, capacity: Capacity) -> RecurrentStates | None:
    """The states of a target's recurrent layers, if it has any. By default 256 prefixes have room, or as many as fit in 1 GiB."""
    layout = target.recurrent
    if not layout:
        return None
    most = max(_FEWEST, _BYTES // layout.bytes_per_state(target.dtype))
    num_states = capacity.num_states or min(capacity.max_running + _PREFIXES, most)
    store = RecurrentStore(layout, num_states, target.dtype, target.device)
    return RecurrentStates(store, capacity.page_size, prefix_caching=capacity.prefix_caching)
