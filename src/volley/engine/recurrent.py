"""What recurrent layers remember of each request: one slot of states that moves with the tokens that stay, and snapshots of it.

A state cannot be cut where a page ends, so a prefix is found only where pages and a snapshot end together. Snapshots are taken at
the last page boundary of a prompt, at every fourth one of an answer (the newest is kept), and where pages had matched further
than any snapshot: other prompts may part there too. The least recently used ones make room.
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
from volley.models.target import Target
from volley.procedures.request import Request

_BYTES = 2**30  # of all states, by default
_PREFIXES = 256
_FEWEST = 4
_ANSWER_PAGES = 4  # of an answer between two snapshots


@dataclass(slots=True)
class _Held:
    """What is known of a request beside its slot."""

    junction: int = 0
    """The first tokens, so many, that others had computed too and that had no snapshot."""
    own: bytes | None = None
    """The snapshot within its answer, which a later one replaces."""


class RecurrentStates(SequenceState):
    """Recurrent states of all requests and of prefixes; the last of the states, for it asks at which page others have matched."""

    def __init__(self, store: RecurrentStore, page_size: int, *, prefix_caching: bool) -> None:
        self.store, self.page_size, self.prefix_caching = store, page_size, prefix_caching
        self.snapshots: OrderedDict[bytes, int] = OrderedDict()
        """Slots by the hash of the page that the states follow; least recently used first."""
        self._free = list(range(store.num_slots))
        self._held: dict[int, _Held] = {}

    @property
    def num_held(self) -> int:
        """Slots of requests; the others are free or hold snapshots."""
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
        """A slot; what a prefix left is copied into it."""
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
            rows, slot = _kept(work), work.request.table.state
            assert slot is not None, "a request that takes part holds a slot"
            if rows:
                wanted += [Wanted(index, rows[-1], slot), *self._snapshots_of(index, work, rows)]
        step.recurrent.write(wanted)

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
        """The pass of a step's works, which are the segments of ``batch``."""
        return RecurrentPass(batch, self.store.layout, self.store, [self._marks(work) for work in works])

    def _marks(self, work: Work[Request]) -> tuple[int, ...]:
        """A prompt's tokens stay; states are wanted after its last one and at the page boundaries that others may ask for."""
        if work.kind is not Kind.PREFILL:
            return ()
        rows = {end - work.request.computed - 1 for end in self._boundaries(work)}
        return tuple(sorted(rows | {work.num_known - 1}))

    def _boundaries(self, work: Work[Request]) -> list[int]:
        """Page boundaries inside a part of a prompt, or at its end, where a snapshot is wanted."""
        request, size = work.request, self.page_size
        if not self.prefix_caching:
            return []
        last = (request.prefill_end - 1) // size * size  # a prompt's last token is always computed
        ends = sorted({self._held[request.request_id].junction, last})
        return [end for end in ends if request.computed < end <= request.computed + work.num_known]

    def _snapshots_of(self, index: int, work: Work[Request], rows: list[int]) -> list[Wanted]:
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
        """The slot of a new snapshot after so many tokens; ``None`` where there is one already, or no room."""
        held, digest = self._held[request.request_id], request.page_hashes[boundary // self.page_size - 1]
        if digest in self.snapshots:
            self.snapshots.move_to_end(digest)
            return None
        slot = None
        if in_answer:
            slot = self.snapshots.pop(held.own, None) if held.own else None
            held.own = digest
        slot = self._take() if slot is None else slot
        if slot is not None:
            self.snapshots[digest] = slot
        return slot

    def _take(self, keep: int | None = None) -> int | None:
        """A slot that is free, or that of the least recently used snapshot, if it is not ``keep``."""
        if self._free:
            return self._free.pop()
        for digest, slot in self.snapshots.items():
            if slot != keep:
                del self.snapshots[digest]
                return slot
        return None


def _kept(work: Work[Request]) -> list[int]:
    """Rows of a work's segment that stay, in the order of their positions."""
    if work.verdict.path is not None:
        return [0, *work.verdict.path]
    return list(range(work.num_kept))


def make_recurrent(target: Target, capacity: Capacity) -> RecurrentStates | None:
    """The states of a target's recurrent layers, if it has any: by default those of 256 prefixes too, as far as 1 GiB goes."""
    layout = target.recurrent
    if not layout:
        return None
    most = max(_FEWEST, _BYTES // layout.bytes_per_state(target.dtype))
    num_states = capacity.num_states or min(capacity.max_running + _PREFIXES, most)
    store = RecurrentStore(layout, num_states, target.dtype, target.device)
    return RecurrentStates(store, capacity.page_size, prefix_caching=capacity.prefix_caching)
