"""The page pool: allocation, sharing by content, rollback, and books that always balance."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from volley.errors import CapacityError, ConfigError
from volley.memory.kv_cache import BlockTable, PagePool

SIZE = 3
PAGES = 10


def test_consecutive_pages_are_a_slice() -> None:
    table = BlockTable(4, [5, 6, 7])
    assert table.slots(2, 11) == slice(22, 31)
    assert table.slot_array(2, 11).tolist() == list(range(22, 31))


def test_scattered_pages_are_gathered() -> None:
    table = BlockTable(2, [7, 0, 1])
    slots = table.slots(1, 6)
    assert isinstance(slots, torch.Tensor)
    assert slots.tolist() == [15, 0, 1, 2, 3]


def test_dropping_the_stray_page_makes_a_table_a_slice_again() -> None:
    table = BlockTable(2, [3, 4, 0, 1])
    assert isinstance(table.slots(0, 2), torch.Tensor)
    assert table.truncate(2) == [1, 0]
    assert table.slots(0, 4) == slice(6, 10)
    table.extend([5])
    assert table.slots(0, 6) == slice(6, 12)


def test_a_ring_wraps_around() -> None:
    table = BlockTable(2, [4, 5, 6], is_ring=True)
    slots = table.slots(4, 9)
    assert isinstance(slots, torch.Tensor)
    assert slots.tolist() == [12, 13, 8, 9, 10]
    with pytest.raises(AssertionError, match="ring table cannot hold"):
        table.slots(0, 7)


def test_positions_beyond_the_pages_are_refused() -> None:
    with pytest.raises(AssertionError, match="allocated pages"):
        BlockTable(4, [0]).slots(0, 5)


def test_a_request_keeps_consecutive_pages_while_others_grow_beside_it() -> None:
    pool = PagePool(16, 4)
    tables = [BlockTable(4) for _ in range(3)]
    for tokens in range(1, 17):
        for table in tables:
            assert pool.grow(table, tokens, 16)
    assert all(isinstance(table.slots(0, 16), slice) for table in tables)


def test_a_reservation_gives_way_when_nothing_else_is_left() -> None:
    pool = PagePool(4, 4)
    hopeful, urgent = BlockTable(4), BlockTable(4)
    assert pool.grow(hopeful, 4, 16)
    assert pool.grow(urgent, 12)
    assert not pool.grow(hopeful, 8, 16)
    pool.check_integrity([hopeful, urgent])


def cache_pages(pool: PagePool, pages: list[int]) -> None:
    """Fill an empty pool, publish ``pages`` with their number as content, and release those, in order."""
    tables = [BlockTable(pool.page_size) for _ in range(pool.num_pages)]
    for table in tables:
        pool.grow(table, pool.page_size)
    for page in pages:
        pool.publish(page, pool.page_hash(b"", [page] * pool.page_size))
        pool.release(next(table for table in tables if table.pages == [page]))


def is_cached(pool: PagePool, page: int) -> bool:
    table = BlockTable(pool.page_size)
    found = pool.match_prefix(table, [page] * (pool.page_size + 1))
    pool.release(table)
    return bool(found)


def test_scattered_cached_pages_are_evicted_least_recently_released_first() -> None:
    pool = PagePool(5, 2)
    cache_pages(pool, [4, 0, 2])
    big = BlockTable(2)
    assert pool.grow(big, 4)
    assert big.pages == [4, 0]
    assert [is_cached(pool, page) for page in (0, 2, 4)] == [False, True, False]


def test_free_pages_are_taken_before_cached_ones() -> None:
    pool = PagePool(4, 2)
    kept = BlockTable(2)
    pool.grow(kept, 2)
    pool.publish(kept.pages[0], pool.page_hash(b"", [0, 0]))
    pool.release(kept)
    other = BlockTable(2)
    assert pool.grow(other, 6)
    assert is_cached(pool, 0)
    assert pool.grow(other, 8)
    assert not is_cached(pool, 0)


def test_whole_pages_are_matched() -> None:
    pool = PagePool(4, 2)
    table = BlockTable(2)
    pool.grow(table, 4)
    first = pool.page_hash(b"", [1, 2])
    pool.publish(table.pages[0], first)
    pool.publish(table.pages[1], pool.page_hash(first, [3, 4]))
    assert len(pool.match_prefix(BlockTable(2), [1, 2, 3, 4])) == 2
    assert len(pool.match_prefix(BlockTable(2), [1, 2, 3])) == 1
    assert pool.match_prefix(BlockTable(2), [1]) == []


def test_a_page_is_found_only_after_the_same_beginning() -> None:
    pool = PagePool(4, 2)
    assert pool.page_hash(pool.page_hash(b"", [1, 2]), [3, 4]) != pool.page_hash(pool.page_hash(b"", [2, 2]), [3, 4])


@pytest.mark.parametrize("shape", [(0, 4), (-1, 4), (4, 0)])
def test_an_empty_pool_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="is empty; raise kv_mib or num_pages"):
        PagePool(*shape)


def test_a_request_larger_than_the_pool_is_refused() -> None:
    pool = PagePool(3, 4)
    pool.check_fits(12)
    with pytest.raises(
        CapacityError, match=r"13 tokens needs 4 pages .* has 3; raise kv_mib or num_pages or lower max_tokens"
    ):
        pool.check_fits(13)


def test_a_page_cannot_be_released_twice() -> None:
    pool = PagePool(2, 2)
    table = BlockTable(2)
    pool.grow(table, 2)
    twin = BlockTable(2, table.pages)
    pool.release(table)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(twin)


def corrupt_refs(pool: PagePool, table: BlockTable) -> None:
    pool._refs[table.pages[0]] += 1


def corrupt_table(_: PagePool, table: BlockTable) -> None:
    table.truncate(1)


def corrupt_reservation(pool: PagePool, _: BlockTable) -> None:
    pool._reserved[7] += 1


def corrupt_hashes(pool: PagePool, table: BlockTable) -> None:
    pool._hash_of[table.pages[0]] = b"other"


def corrupt_cached(pool: PagePool, table: BlockTable) -> None:
    pool._cached[table.pages[0]] = None


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (corrupt_refs, "page 0 has 2 references, its tables hold 1"),
        (corrupt_table, "page 1 has 1 references, its tables hold 0"),
        (corrupt_reservation, "page 7 is reserved 1 times, tables say 0"),
        (corrupt_hashes, "hashes and pages disagree"),
        (corrupt_cached, "cached pages are not exactly"),
    ],
)
def test_check_integrity_sees_a_corrupted_pool(corrupt, message: str) -> None:  # type: ignore[no-untyped-def]
    pool = PagePool(8, 2)
    table = BlockTable(2)
    pool.grow(table, 6)
    pool.publish(table.pages[0], pool.page_hash(b"", [1, 2]))
    pool.check_integrity([table])
    corrupt(pool, table)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity([table])


@dataclass(eq=False)
class Client:
    """A request as the engine drives the pool: positions below ``computed`` are final."""

    tokens: list[int]
    table: BlockTable = field(default_factory=lambda: BlockTable(SIZE))
    computed: int = 0
    hashes: list[bytes] = field(default_factory=list)


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=SIZE * 5)


class PoolMachine(RuleBasedStateMachine):
    """Random clients on a small pool, beside a record of what really is in every page."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES, SIZE)
        self.clients: list[Client] = []
        self.content: list[list[tuple[int, ...] | None]] = [[None] * SIZE for _ in range(PAGES)]
        """For every slot the sequence up to and including its token; ``None`` for what was never written."""

    def pick(self, data: st.DataObject) -> Client:
        return data.draw(st.sampled_from(self.clients))

    def write(self, client: Client, position: int, history: tuple[int, ...]) -> None:
        page = client.table.pages[position // SIZE]
        assert sum(page in other.table.pages for other in self.clients) == 1, "a shared page would be written"
        assert page not in self.pool._hash_of, "a page that others may find would be written"
        self.content[page][position % SIZE] = history

    def snapshot(self) -> tuple[object, ...]:
        pool = self.pool
        books = (pool._refs.tolist(), pool._reserved.tolist(), dict(pool._hash_of), dict(pool._page_of))
        return (*books, list(pool._cached), [(list(c.table.pages), c.table.reserved) for c in self.clients])

    @precondition(lambda self: len(self.clients) < 5)
    @rule(tokens=TOKENS)
    def arrive(self, tokens: list[int]) -> None:
        client = Client(tokens)
        client.hashes = self.pool.match_prefix(client.table, tokens[:-1])  # it needs a position to compute
        client.computed = client.table.capacity
        assert len(client.hashes) == len(client.table.pages)
        assert client.computed < len(tokens)
        for position in range(client.computed):
            page = client.table.pages[position // SIZE]
            assert self.content[page][position % SIZE] == tuple(tokens[: position + 1]), "a hit with other tokens"
        self.clients.append(client)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), extra=st.integers(0, SIZE * 4), hope=st.integers(0, SIZE * 4))
    def grow(self, data: st.DataObject, extra: int, hope: int) -> None:
        client = self.pick(data)
        wanted = client.computed + extra
        need = max(0, self.pool.pages_for(wanted) - len(client.table.pages))
        before, available, held = self.snapshot(), self.pool.num_available, list(client.table.pages)
        grown = self.pool.grow(client.table, wanted, wanted + hope)
        assert grown == (need <= available)
        if not grown:
            assert self.snapshot() == before
            return
        assert client.table.pages[: len(held)] == held
        assert len(client.table.pages) == len(held) + need
        assert self.pool.num_available == available - need

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), count=st.integers(1, SIZE * 3), drafted=st.integers(0, SIZE * 2))
    def compute_and_publish(self, data: st.DataObject, count: int, drafted: int) -> None:
        """Compute tokens, and rejected draft tokens after them, which are rolled back."""
        client = self.pick(data)
        end = min(client.computed + count, len(client.tokens), client.table.capacity)
        for position in range(client.computed, end):
            self.write(client, position, tuple(client.tokens[: position + 1]))
        for position in range(end, min(end + drafted, client.table.capacity)):
            self.write(client, position, (99,))
        client.computed = end
        self.pool.rollback(client.table, end)
        assert len(client.table.pages) == self.pool.pages_for(end)
        while (done := len(client.hashes)) < end // SIZE:
            parent = client.hashes[-1] if done else b""
            client.hashes.append(self.pool.page_hash(parent, client.tokens[done * SIZE : (done + 1) * SIZE]))
            self.pool.publish(client.table.pages[done], client.hashes[-1])

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        client = self.pick(data)
        self.clients.remove(client)
        self.pool.release(client.table)
        assert not client.table.pages

    @rule()
    def forget(self) -> None:
        used = self.pool.num_used
        self.pool.forget()
        assert self.pool.num_used == used
        assert self.pool.match_prefix(BlockTable(SIZE), [0] * (2 * SIZE)) == []

    @invariant()
    def books_balance(self) -> None:
        self.pool.check_integrity(client.table for client in self.clients)
        held = {page for client in self.clients for page in client.table.pages}
        assert self.pool.num_used == len(held)
        assert self.pool.num_available == PAGES - len(held)

    @invariant()
    def final_content_survives(self) -> None:
        for client in self.clients:
            for position in range(client.computed):
                page = client.table.pages[position // SIZE]
                assert self.content[page][position % SIZE] == tuple(client.tokens[: position + 1])

    @invariant()
    def slots_agree_with_pages(self) -> None:
        for client in self.clients:
            capacity = client.table.capacity
            slots = client.table.slots(0, capacity) if capacity else torch.tensor([])
            found = np.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots.numpy()
            assert [int(slot) for slot in found[::SIZE]] == [page * SIZE for page in client.table.pages]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(stateful_step_count=40)


def test_growth_spares_cached_pages_while_others_are_free() -> None:
    pool = PagePool(8, 4)
    growing, finished = BlockTable(4), BlockTable(4)
    assert pool.grow(growing, 4)
    assert pool.grow(finished, 4)
    assert finished.pages == [growing.pages[0] + 1]
    tokens = [1, 2, 3, 4]
    pool.publish(finished.pages[0], pool.page_hash(b"", tokens))
    pool.release(finished)
    assert pool.grow(growing, 8)
    again = BlockTable(4)
    assert len(pool.match_prefix(again, [*tokens, 5])) == 1
    pool.check_integrity([growing, again])
