"""Both attention implementations against a loop over the definition, on random ragged batches."""

import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.memory.reference import reference_attention
from volley.memory.attention import (
    DEFAULT_LIMITS,
    AttentionOptions,
    GroupLimits,
    paged_attention,
)
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_cache import BlockTable
from volley.memory.kv_store import DenseKVStore, KVDtype, make_store

DIM = 4


def lineage(segment: Segment, row: int) -> list[int]:
    """A token of a tree and its ancestors, itself first."""
    assert segment.parents is not None
    line = [row]
    while line[-1] > 0:
        line.append(segment.parents[line[-1] - 1])
    return line


def end_in_a_canvas(segment: Segment) -> None:
    """Make the last tokens of a tree a canvas, all but the first of them at most."""
    assert segment.parents is not None
    segment.canvas = int(torch.randint(segment.length, ()))
    following = segment.length - segment.canvas  # the first parent inside
    segment.parents = (*segment.parents[:following], *range(following, segment.length - 1))


def group_of(segment: Segment, row: int) -> tuple[int, int]:
    """Positions ``[first, end)`` of the group that holds a row."""
    end = segment.start
    for size in segment.groups or ():
        first, end = end, end + size
        if segment.start + row < end:
            return first, end
    raise AssertionError("groups divide the whole segment")


def random_groups(length: int) -> tuple[int, ...]:
    sizes: list[int] = []
    while (left := length - sum(sizes)) > 0:
        sizes.append(1 + int(torch.randint(left, ())))
    return tuple(sizes)


def visible(segment: Segment, row: int, key: int, window: int | None, symmetric: bool) -> bool:
    """The definition: who sees whom; ``row`` in the segment, ``key`` in the table."""
    if segment.groups is not None:
        first, end = group_of(segment, row)
        if symmetric and end - first > 1:
            return key < end and (window is None or abs(key - segment.start - row) <= window)
        return key < end and (window is None or key > first - window)
    if not segment.causal and symmetric:
        return window is None or abs(key - segment.start - row) <= window
    if not segment.causal:
        return window is None or key >= segment.start - window
    first = segment.length - segment.canvas
    if row > first:  # inside a canvas, where everybody sees the same
        return visible(segment, first, key, window, symmetric)
    if segment.canvas and row == first and key > segment.start + row:
        return True
    if segment.parents is None or key < segment.start:
        distance = (row if segment.parents is None else len(lineage(segment, row)) - 1) + segment.start - key
    elif key - segment.start in lineage(segment, row):
        distance = lineage(segment, row).index(key - segment.start)
    else:
        return False
    return distance >= 0 and (window is None or distance < window)


def by_definition(
    batch: RaggedBatch, histories: list[tuple[Tensor, Tensor]], queries: Tensor, options: AttentionOptions
) -> Tensor:
    """Attention token by token and head by head over K/V that never saw a page; ``histories`` hold ``[end, kv, d]``."""
    output = torch.zeros_like(queries)
    for segment, offset, (keys, values) in zip(batch.segments, batch.offsets, histories, strict=False):
        groups = queries.shape[1] // keys.shape[1]
        for row in range(segment.length):
            seen = [
                k
                for k in range(segment.table.first, segment.end)
                if visible(segment, row, k, options.window, options.symmetric)
            ]
            for head in range(queries.shape[1]):
                scores = keys[seen, head // groups] @ queries[offset + row, head] * options.scale
                if options.softcap is not None:
                    scores = options.softcap * torch.tanh(scores / options.softcap)
                weights = scores.exp()
                total = weights.sum() + (options.sinks[head].exp() if options.sinks is not None else 0)
                output[offset + row, head] = weights @ values[seen, head // groups] / total
    return output


def make_tables(layout: str, page_size: int, pages: list[int], span: int) -> list[BlockTable]:
    """One table a segment on disjoint pages of one pool; ``span``: positions a ring must hold."""
    if layout == "ring":
        count = math.ceil(span / page_size) + 1
        return [BlockTable(page_size, range(i * count, (i + 1) * count), is_ring=True) for i in range(len(pages))]
    order = torch.randperm(sum(pages)).tolist() if layout == "scattered" else list(range(sum(pages)))
    tables = []
    for count in pages:
        tables.append(BlockTable(page_size, order[:count]))
        order = order[count:]
    return tables


def check(
    shapes: list[tuple[int, int, bool]],
    *,
    page_size: int,
    layout: str,
    window: int | None,
    heads: tuple[int, int],
    softcap: float | None,
    sinks: bool,
    seed: int,
    trees: bool = False,
    symmetric: bool = False,
    kind: KVDtype = "auto",
    limits: GroupLimits = DEFAULT_LIMITS,
) -> None:
    """Both implementations against the definition, or against each other where the store is not exact.

    ``trees``: half of the causal segments are random trees, which may end in a canvas. Half of the others have groups: random
    ones, or one that is all of it.
    """
    torch.manual_seed(seed)
    kv_heads, groups = heads
    span = (window or 0) + max(length for _, length, _ in shapes)
    pages = [math.ceil((start + length) / page_size) for start, length, _ in shapes]
    tables = make_tables(layout, page_size, pages, span)
    segments = [Segment(table, *shape) for table, shape in zip(tables, shapes, strict=True)]
    for segment in segments:
        if layout == "ring":
            segment.table.first = max(0, int(torch.randint(-segment.start, segment.start + 1, ())))
        if trees and segment.causal and torch.rand(()) < 0.5:
            segment.parents = tuple(int(torch.randint(node, ())) for node in range(1, segment.length))
            if torch.rand(()) < 0.5:
                end_in_a_canvas(segment)
        elif trees and segment.causal and torch.rand(()) < 0.5:
            segment.groups = random_groups(segment.length) if torch.rand(()) < 0.5 else (segment.length,)
    batch = RaggedBatch(segments, torch.zeros(sum(segment.length for segment in segments), dtype=torch.long))
    slots = (1 + max(page for table in tables for page in table.pages)) * page_size
    stores = [make_store(kind, [(kv_heads, DIM)] * 2, slots, torch.float32, torch.device("cpu")) for _ in range(2)]
    histories = [(torch.randn(s.end, kv_heads, DIM), torch.randn(s.end, kv_heads, DIM)) for s in segments]
    garbage = torch.randn(slots, kv_heads, DIM) * 10
    for store in stores:
        store.write(1, slice(0, slots), garbage, garbage)
        for segment, (keys, values) in zip(segments, histories, strict=True):
            for position in range(segment.start):  # one by one: a ring forgets what it wraps over
                slot = torch.from_numpy(segment.table.slot_array(position, position + 1))
                store.write(1, slot, keys[position : position + 1], values[position : position + 1])
    keys, values = (torch.cat([h[i][s.start :] for s, h in zip(segments, histories, strict=True)]) for i in range(2))
    queries = torch.randn(len(batch), kv_heads * groups, DIM)
    sink_logits = torch.randn(kv_heads * groups) if sinks else None
    options = AttentionOptions(0.4, window, softcap, sink_logits, symmetric)

    slow = reference_attention(batch, stores[0], 1, queries, keys, values, options)
    fast = paged_attention(batch, stores[1], 1, queries, keys, values, options, limits)
    if kind == "auto":
        torch.testing.assert_close(slow, by_definition(batch, histories, queries, options), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)
    mine, theirs = (store.read(1, slice(0, slots)) for store in stores)
    torch.testing.assert_close(mine, theirs)
    assert not stores[1].read(0, slice(0, slots))[0].any(), "another layer was written"


SEGMENTS = st.lists(
    st.tuples(st.integers(0, 11), st.sampled_from([1, 1, 2, 3, 5]), st.booleans()), min_size=1, max_size=5
)


@given(
    shapes=SEGMENTS,
    page_size=st.integers(1, 4),
    layout=st.sampled_from(["consecutive", "scattered"]),
    window=st.none() | st.integers(1, 9),
    heads=st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]),
    softcap=st.none() | st.just(2.0),
    sinks=st.booleans(),
    copy_limit=st.sampled_from([0, 200, DEFAULT_LIMITS.copied_bytes]),
    padded=st.sampled_from([0, 3, DEFAULT_LIMITS.padded_rows]),
    trees=st.booleans(),
    symmetric=st.booleans(),
    kind=st.sampled_from(["auto", "auto", "int8", "int4"]),
    seed=st.integers(0, 1000),
)
def test_random_ragged_batches(copy_limit: int, padded: int, **drawn: Any) -> None:
    check(**drawn, limits=GroupLimits(copy_limit, padded, padded or DEFAULT_LIMITS.padded_keys))


@given(
    shapes=SEGMENTS,
    page_size=st.integers(1, 4),
    window=st.integers(1, 9),
    heads=st.sampled_from([(1, 1), (2, 2)]),
    symmetric=st.booleans(),
    kind=st.sampled_from(["auto", "auto", "int8", "int4"]),
    seed=st.integers(0, 1000),
)
def test_random_ring_tables(**drawn: Any) -> None:
    check(**drawn, layout="ring", softcap=None, sinks=False)


def test_planning_happens_once_for_all_layers() -> None:
    table = BlockTable(4, [0])
    batch = RaggedBatch([Segment(table, 0, 3)], torch.zeros(3, dtype=torch.long))
    store = DenseKVStore([(1, DIM)] * 2, 4, torch.float32, torch.device("cpu"))
    x = torch.randn(3, 1, DIM)
    paged_attention(batch, store, 0, x, x, x, AttentionOptions(1.0))
    plans = dict(batch.plans)
    paged_attention(batch, store, 1, x, x, x, AttentionOptions(1.0))
    assert batch.plans.keys() == plans.keys()
    assert all(batch.plans[key] is plans[key] for key in plans)
