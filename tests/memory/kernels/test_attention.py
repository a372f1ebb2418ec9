"""The Triton attention kernel against the reference: on a GPU compiled, elsewhere in Triton's interpreter."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.memory.kernels import DEVICE
from tests.memory.reference import reference_attention
from volley import native
from volley.memory.attention import AttentionOptions, paged_attention
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kernels import attention as kernel
from volley.memory.kernels import attention_for, launching
from volley.memory.kv_cache import BlockTable
from volley.memory.kv_store import DenseKVStore, make_store
from volley.memory.native_attention import native_attention
from volley.memory.tiles import Tiling, tiled_batch


def make_segments(shapes: list[tuple[int, int, bool]], page_size: int, window: int | None, ring: bool) -> list[Segment]:
    """Segments on scattered pages, or on rings just large enough for the window."""
    counts = [math.ceil((start + length) / page_size) for start, length, _ in shapes]
    if ring and window is not None:
        counts = [math.ceil((window + length) / page_size) + 1 for _, length, _ in shapes]
    order = torch.randperm(sum(counts)).tolist()
    segments = []
    for (start, length, causal), count in zip(shapes, counts, strict=True):
        table = BlockTable(page_size, order[:count], is_ring=ring and window is not None)
        order = order[count:]
        if table.is_ring:
            table.first = max(0, int(torch.randint(-start, start + 1, ())))
        segments.append(Segment(table, start, length, causal))
    return segments


def check(
    segments: list[Segment],
    options: AttentionOptions,
    heads: tuple[int, int],
    dim: int,
    parted: bool,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-4,
) -> None:
    kv_heads, groups = heads
    batch = RaggedBatch(segments, torch.zeros(sum(s.length for s in segments), dtype=torch.long, device=DEVICE))
    page_size = segments[0].table.page_size
    slots = (1 + max(page for s in segments for page in s.table.pages)) * page_size
    stores = [DenseKVStore([(kv_heads, dim)] * 2, slots, dtype, DEVICE) for _ in range(2)]
    garbage = torch.randn(2, slots, kv_heads, dim).to(dtype)
    for store in stores:
        store.keys[1].copy_(garbage[0])
        store.values[1].copy_(garbage[1])
    queries = torch.randn(kv_heads * groups, len(batch), dim).to(DEVICE, dtype).transpose(0, 1)
    keys, values = torch.randn(2, len(batch), kv_heads, dim).to(DEVICE, dtype)
    expected = reference_attention(batch, stores[0], 1, queries, keys, values, options)
    found = kernel.ragged_attention(batch, stores[1], 1, queries, keys, values, options, parted)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(stores[0].keys[1], stores[1].keys[1])
    assert torch.equal(stores[0].values[1], stores[1].values[1])


SEGMENTS = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 2, 5, 9]), st.booleans()), min_size=1, max_size=3
)


@pytest.mark.slow
@given(
    shapes=SEGMENTS,
    page_size=st.integers(1, 5),
    window=st.none() | st.integers(1, 20),
    symmetric=st.booleans(),
    ring=st.booleans(),
    heads=st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (1, 20)]),
    dim=st.sampled_from([8, 16, 24]),
    softcap=st.none() | st.just(2.0),
    sinks=st.booleans(),
    parted=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30)
def test_random_ragged_batches(  # type: ignore[no-untyped-def]
    shapes, page_size, window, symmetric, ring, heads, dim, softcap, sinks, parted, seed
) -> None:
    torch.manual_seed(seed)
    segments = make_segments(shapes, page_size, window, ring)
    sink_logits = torch.randn(heads[0] * heads[1], device=DEVICE) if sinks else None
    check(segments, AttentionOptions(0.3, window, softcap, sink_logits, symmetric), heads, dim, parted)


@pytest.mark.slow
def test_a_prompt_of_many_tiles_beside_a_single_token() -> None:
    torch.manual_seed(0)
    segments = make_segments([(3, 70, True), (40, 1, True), (10, 40, False)], 16, None, False)
    check(segments, AttentionOptions(0.3), (1, 3), 16, False)
    check(segments, AttentionOptions(0.3, 20), (1, 3), 16, True)


@pytest.mark.slow
def test_half_precision() -> None:
    torch.manual_seed(0)
    segments = make_segments([(30, 4, True), (20, 8, False)], 4, None, False)
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter multiplies bf16 wrongly
    check(segments, AttentionOptions(0.3), (2, 2), 16, False, dtype, 2e-2)
    check(segments, AttentionOptions(0.3), (2, 2), 16, True, dtype, 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 1, 3, 13])
@pytest.mark.parametrize("parted", [False, True])
def test_trees_beside_chains(window: int | None, parted: bool) -> None:
    torch.manual_seed(0)
    segments = make_segments([(11, 7, True), (5, 7, True), (8, 9, True), (3, 2, False)], 4, None, False)
    segments[0].parents = (0, 0, 1, 1, 4, 2)
    segments[2].parents = (0, 1, 1, 3, 3, 2, 6, 0)
    check(segments, AttentionOptions(0.3, window), (2, 2), 8, parted)
    segments[0].parents, segments[0].canvas = (0, 1, 0, 1, 2, 5), 2
    segments[2].parents, segments[2].canvas = (0, 1, 1, 3, 2, 5, 6, 7), 4
    check(segments, AttentionOptions(0.3, window), (2, 2), 8, parted)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 1, 2, 6, 20])
@pytest.mark.parametrize("parted", [False, True])
@pytest.mark.parametrize("ring", [False, True])
def test_groups_beside_chains(window: int | None, parted: bool, ring: bool) -> None:
    torch.manual_seed(0)
    segments = make_segments([(8, 8, True), (25, 7, True), (3, 2, False), (30, 5, True)], 4, window, ring)
    segments[0].groups, segments[1].groups = (4, 4), (1, 1, 1, 4)
    check(segments, AttentionOptions(0.3, window), (2, 2), 8, parted)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantised_store_takes_the_other_path(kind: Any) -> None:
    torch.manual_seed(0)
    segments = make_segments([(6, 3, True)], 4, None, False)
    batch = RaggedBatch(segments, torch.zeros(3, dtype=torch.long, device=DEVICE))
    stores = [make_store(kind, [(2, 8)], 12, torch.float32, DEVICE) for _ in range(2)]
    queries, keys, values = torch.randn(3, 3, 2, 8, device=DEVICE)
    options = AttentionOptions(0.3)
    found = kernel.ragged_attention(batch, stores[0], 0, queries, keys, values, options)
    assert torch.equal(found, paged_attention(batch, stores[1], 0, queries, keys, values, options))


def test_the_kernel_is_chosen_where_it_can_run() -> None:
    assert attention_for(torch.device("cpu")) is (native_attention if native.available else paged_attention)
    assert attention_for(torch.device("cuda")) is kernel.ragged_attention


@pytest.mark.slow
@pytest.mark.parametrize(("window", "sinks"), [(None, False), (200, True)])
def test_a_token_alone_is_the_same_to_the_bit_as_in_a_block_of_any_batch(
    window: int | None, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy's product, which the interpreter uses, rounds a row by its place among others; a GPU does not."""
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: (a[:, :, None] * b).sum(axis=1, dtype=dtype))
    torch.manual_seed(0)
    length, start, page_size, dim = 16, 270, 16, 8
    table, other = BlockTable(page_size, torch.randperm(20).tolist()), BlockTable(page_size, range(20, 60))
    store = DenseKVStore([(1, dim)], 60 * page_size, torch.float32, DEVICE)
    store.keys[0].normal_()
    store.values[0].normal_()
    queries, keys, values = torch.randn(3, length + 1, 2, dim, device=DEVICE)
    keys, values = keys[:, :1], values[:, :1]
    options = AttentionOptions(0.3, window, None, torch.randn(2, device=DEVICE) if sinks else None)

    def attend(segments: list[Segment], rows: slice, parted: bool) -> Tensor:
        batch = RaggedBatch(segments, torch.zeros(rows.stop - rows.start, dtype=torch.long, device=DEVICE))
        return kernel.ragged_attention(batch, store, 0, queries[rows], keys[rows], values[rows], options, parted)

    block = attend([Segment(table, start, length)], slice(0, length), False)
    beside = attend([Segment(table, start, length), Segment(other, 600, 1)], slice(0, length + 1), True)
    assert torch.equal(beside[:length], block)
    for row, parted in ((0, True), (7, False), (15, True)):
        assert torch.equal(attend([Segment(table, start + row, 1)], slice(row, row + 1), parted)[0], block[row])


def test_parts_have_programs_of_their_own_where_tiles_leave_processors_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "num_processors", lambda _: 132)

    def is_parted(start: int, segments: int, part_bytes: int = 2**20) -> bool:
        shapes = [(start, 1, True)] * segments
        batch = RaggedBatch(make_segments(shapes, 16, None, False), torch.zeros(segments, dtype=torch.long))
        tiled = tiled_batch(batch, Tiling(None, False, 4, 8))
        assert tiled.num_parts == -(-(start + 1) // kernel.PART)
        return kernel.worth_parting(tiled, 8, part_bytes, torch.device("cuda"))

    assert is_parted(8000, 1)
    assert not is_parted(200, 1)
    assert not is_parted(8000, 64)
    assert not is_parted(8000, 1, 2**24)
