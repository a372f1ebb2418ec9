"""Allocate K/V pages, and record them in the block tables of their holders.

A page is an id for ``page_size`` consecutive token positions of one request. The same id addresses the target's and the
drafter's K/V of those positions, so one block table, one prefix hash and one rollback serve both models.

A page has one of three states: *used* (``refs > 0``), *cached* (``refs == 0``, content known by hash, reusable until evicted)
or *free*. A request's pages are consecutive if possible, because attention then reads K/V without a copy. So each table softly
reserves the run it is expected to grow into, and others take from that run only if nothing else is left.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from volley.errors import CapacityError, ConfigError


class BlockTable:
    """Pages of one request's K/V: position p is in slot ``pages[p // size] · size + p % size``.

    A *ring* table has a fixed number of pages and wraps around: it holds only the last ``len(pages) · size`` positions, and
    none before ``first``. ``num_entered`` counts the pages of the text that have been assigned a place in the ring so far.
    """

    __slots__ = ("_runs", "first", "is_ring", "num_entered", "page_size", "pages", "reserved", "state")

    def __init__(self, page_size: int, pages: Iterable[int] = (), *, is_ring: bool = False) -> None:
        self.page_size = page_size
        self.is_ring = is_ring
        self.first = self.num_entered = 0
        self.pages: list[int] = []
        self.reserved: range = range(0)
        self.state: int | None = None  # slot of the request's recurrent states, if the model has any
        self._runs = 0  # number of consecutive runs that the pages form
        self.extend(pages)

    @property
    def capacity(self) -> int:
        """Number of positions that the table can hold."""
        return len(self.pages) * self.page_size

    @property
    def earliest(self) -> int:
        """First position that a ring may still hold; earlier ones were overwritten."""
        return max(0, self.num_entered - len(self.pages)) * self.page_size if self.is_ring else 0

    def extend(self, pages: Iterable[int]) -> None:
        for page in pages:
            if not self.pages or page != self.pages[-1] + 1:
                self._runs += 1
            self.pages.append(page)

    def truncate(self, num_pages: int) -> list[int]:
        """Drop the pages after the first ``num_pages``; return them, last first."""
        dropped: list[int] = []
        while len(self.pages) > num_pages:
            page = self.pages.pop()
            dropped.append(page)
            if not self.pages or page != self.pages[-1] + 1:
                self._runs -= 1
        return dropped

    @property
    def is_consecutive(self) -> bool:
        """True if the positions are consecutive in memory."""
        return self._runs == 1 and not self.is_ring

    def slots(self, start: int, end: int) -> slice | Tensor:
        """Return the slots of positions ``[start, end)``: a slice if they are consecutive, else indices ``[n]``."""
        size = self.page_size
        if self.is_consecutive:
            offset = self.pages[0] * size
            assert end <= self.capacity, "positions must lie in allocated pages"
            return slice(offset + start, offset + end)
        return torch.from_numpy(self.slot_array(start, end))

    def slot_array(self, start: int, end: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Return :meth:`slots` as indices ``[n]``."""
        if self.is_consecutive:
            assert end <= self.capacity, "positions must lie in allocated pages"
            offset = self.pages[0] * self.page_size
            return np.arange(offset + start, offset + end)
        positions = np.arange(start, end)
        pages = np.asarray(self.pages, dtype=np.int64)
        blocks = positions // self.page_size
        if self.is_ring:
            assert end - start <= self.capacity, "a ring table cannot hold that many positions"
            blocks %= len(pages)
        return np.asarray(pages[blocks] * self.page_size + positions % self.page_size)


class PagePool:
    """Allocates pages, shares them by content hash, and takes them back."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ConfigError(f"a pool of {num_pages} pages of {page_size} tokens is empty; raise kv_mib or num_pages")
        self.num_pages = num_pages
        self.page_size = page_size
        self._refs = np.zeros(num_pages, dtype=np.int32)
        self._reserved = np.zeros(num_pages, dtype=np.int32)  # number of tables that softly reserve each page
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first

    # -- sizes ---------------------------------------------------------------------------------------------------------
    @property
    def num_available(self) -> int:
        """Number of pages that can be allocated now: free and cached ones."""
        return self.num_pages - int(np.count_nonzero(self._refs))

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_available

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def check_fits(self, num_tokens: int) -> None:
        """Refuse a request that can never finish, however long it waits."""
        if self.pages_for(num_tokens) > self.num_pages:
            raise CapacityError(
                f"a request of {num_tokens} tokens needs {self.pages_for(num_tokens)} pages and the whole pool has "
                f"{self.num_pages}; raise kv_mib or num_pages or lower max_tokens"
            )

    # -- allocation ----------------------------------------------------------------------------------------------------
    def grow(self, table: BlockTable, num_tokens: int, expected_tokens: int | None = None) -> bool:
        """Extend ``table`` to hold ``num_tokens`` positions. Return False, and change nothing, if the pool has too few pages.

        ``expected_tokens`` is the expected length of the request; the first call reserves that run.
        """
        need = self.pages_for(num_tokens) - len(table.pages)
        if need <= 0:
            return True
        if need > self.num_available:
            return False
        expected = max(self.pages_for(expected_tokens or num_tokens) - len(table.pages), need)
        chosen = self._take(self._following(table, need))
        if len(chosen) < need:
            chosen += self._take(self._choose(need - len(chosen), expected))
        table.extend(chosen)
        if not table.reserved:
            table.reserved = range(chosen[0], min(chosen[0] + expected, self.num_pages))
            self._reserved[chosen[0] : table.reserved.stop] += 1
        return True

    def _take(self, pages: list[int]) -> list[int]:
        for page in pages:
            self._evict(page)
            self._refs[page] = 1
        return pages

    def _following(self, table: BlockTable, need: int) -> list[int]:
        """Return available pages that continue the table's last run, except those that others reserved or that are better kept
        cached."""
        if not table.pages:
            return []
        spare = self.num_available - len(self._cached)
        pages: list[int] = []
        page = table.pages[-1] + 1
        while len(pages) < need and page < self.num_pages and self._refs[page] == 0:
            hoped_for = self._reserved[page] > (page in table.reserved)
            if hoped_for or (page in self._cached and spare >= need):
                break
            pages.append(page)
            page += 1
        return pages

    def _choose(self, need: int, expected: int) -> list[int]:
        """Choose pages for a new run: the tightest unreserved run of ``expected`` free pages, else the cheapest pages."""
        free = (self._refs == 0) & (self._reserved == 0)
        uncached = free.copy()
        uncached[list(self._cached)] = False
        for candidates, length in ((uncached, expected), (free, expected), (uncached, need), (free, need)):
            start = _tightest_run(candidates, length)
            if start is not None:
                return list(range(start, start + need))
        return self._any(need)

    def _any(self, need: int) -> list[int]:
        """Choose the cheapest pages anywhere: unreserved ones first, cached ones last."""
        is_free = self._refs == 0
        is_free[list(self._cached)] = False
        free = np.flatnonzero(is_free)
        order: list[int] = free[np.argsort(self._reserved[free], kind="stable")[:need]].tolist()
        return order + list(islice(self._cached, need - len(order)))

    def take(self, count: int) -> list[int]:
        """Allocate pages for a ring. Least recently released ones are evicted if no page is free; ``count`` must be available."""
        assert count <= self.num_available, "a ring asks for what the pool was made for"
        return self._take(self._any(count))

    def writable(self, page: int) -> int:
        """Return ``page`` if only one table holds it and it is not published, else a new page in its place."""
        if self._refs[page] == 1 and page not in self._hash_of:
            return page
        self._drop(page)
        return self.take(1)[0]

    def _evict(self, page: int) -> None:
        if page in self._cached:
            del self._cached[page]
        digest = self._hash_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]

    # -- release -------------------------------------------------------------------------------------------------------
    def rollback(self, table: BlockTable, num_tokens: int) -> None:
        """Give back the whole pages after position ``num_tokens``; later slots of the last page are overwritten by new tokens."""
        for page in table.truncate(self.pages_for(num_tokens)):
            self._drop(page)

    def release(self, table: BlockTable) -> None:
        """Give back all pages. Published pages stay cached until they are needed."""
        self._reserved[table.reserved.start : table.reserved.stop] -= 1
        table.reserved = range(0)
        for page in table.truncate(0):  # last first, so that a prefix is evicted after its continuation
            self._drop(page)

    def _drop(self, page: int) -> None:
        self._refs[page] -= 1
        assert self._refs[page] >= 0, "a page was released twice"
        if self._refs[page] == 0 and page in self._hash_of:
            self._cached[page] = None

    # -- prefix cache --------------------------------------------------------------------------------------------------
    def page_hash(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """Hash a full page's tokens and everything before it."""
        assert len(token_ids) == self.page_size
        return hashlib.blake2b(np.asarray(token_ids, dtype=np.int64).tobytes(), key=parent, digest_size=16).digest()

    def match_prefix(self, table: BlockTable, token_ids: Sequence[int], root: bytes = b"") -> list[bytes]:
        """Take the cached pages that hold a prefix of ``token_ids`` into an empty ``table``; return their hashes.

        ``root`` is the parent of the first page's hash.
        """
        assert not table.pages, "a prefix is matched before anything is allocated"
        hashes: list[bytes] = []
        parent = root
        for start in range(0, len(token_ids) - self.page_size + 1, self.page_size):
            parent = self.page_hash(parent, token_ids[start : start + self.page_size])
            page = self.find(parent)
            if page is None:
                break
            table.extend([page])
            hashes.append(parent)
        return hashes

    def find(self, digest: bytes) -> int | None:
        """Take the page with that hash, if there is one."""
        page = self._page_of.get(digest)
        if page is not None:
            self._refs[page] += 1
            self._cached.pop(page, None)
        return page

    def publish(self, page: int, digest: bytes) -> None:
        """Add a full, final page to the prefix cache. The first page with a hash wins; a later duplicate stays private."""
        if digest not in self._page_of and page not in self._hash_of:
            self._page_of[digest] = page
            self._hash_of[page] = digest

    def withdraw(self, digests: Iterable[bytes]) -> None:
        """Remove these hashes from the prefix cache; pages in use stay in use."""
        for digest in digests:
            page = self._page_of.get(digest)
            if page is not None:
                self._evict(page)

    def forget(self) -> None:
        """Empty the prefix cache; pages in use stay in use."""
        self._hash_of.clear()
        self._page_of.clear()
        self._cached.clear()

    # -- integrity -----------------------------------------------------------------------------------------------------
    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Recount everything from the live ``tables``; raise ``AssertionError`` with the first page whose count is wrong."""
        refs = np.zeros(self.num_pages, dtype=np.int32)
        reserved = np.zeros(self.num_pages, dtype=np.int32)
        for table in tables:
            np.add.at(refs, np.asarray(table.pages, dtype=np.int64), 1)
            reserved[table.reserved.start : table.reserved.stop] += 1
        for page in np.flatnonzero(refs != self._refs):
            raise AssertionError(f"page {page} has {self._refs[page]} references, its tables hold {refs[page]}")
        for page in np.flatnonzero(reserved != self._reserved):
            raise AssertionError(f"page {page} is reserved {self._reserved[page]} times, tables say {reserved[page]}")
        assert {p: d for d, p in self._page_of.items()} == self._hash_of, "prefix hashes and pages disagree"
        idle = {page for page in self._hash_of if self._refs[page] == 0}
        assert idle == set(self._cached), "cached pages are not exactly the idle hashed ones"


def _tightest_run(free: "np.ndarray[tuple[int], np.dtype[np.bool_]]", length: int) -> int | None:
    """Return the start of the shortest run of true values that is at least ``length`` long."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], free.astype(np.int8), [0]))))
    starts, sizes = edges[::2], edges[1::2] - edges[::2]
    fitting = np.flatnonzero(sizes >= length)
    return int(starts[fitting[np.argmin(sizes[fitting])]]) if len(fitting) else None
