"""The Triton attention kernel against the reference: on a GPU compiled, elsewhere in Triton's interpreter."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory.kernels import DEVICE
from volley import native
from volley.memory.attention import AttentionOptions, paged_attention, reference_attention
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kernels import attention as kernel
from volley.memory.kernels import attention_for
from volley.memory.kv_cache import BlockTable
from volley.memory.kv_store import DenseKVStore, make_store
from volley.memory.native_attention import native_attention


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
        segments.append(Segment(table, start, length, causal))
    return segments


def check(
    segments: list[Segment],
    options: AttentionOptions,
    heads: tuple[int, int],
    dim: int,
    splits: int,
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
    found = kernel.ragged_attention(batch, stores[1], 1, queries, keys, values, options, splits, block_keys=16)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(stores[0].keys[1], stores[1].keys[1])


SEGMENTS = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 2, 5, 9]), st.booleans()), min_size=1, max_size=3
)


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
    splits=st.sampled_from([1, 1, 2, 8]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30)
def test_random_ragged_batches(  # type: ignore[no-untyped-def]
    shapes, page_size, window, symmetric, ring, heads, dim, softcap, sinks, splits, seed
) -> None:
    torch.manual_seed(seed)
    segments = make_segments(shapes, page_size, window, ring)
    sink_logits = torch.randn(heads[0] * heads[1], device=DEVICE) if sinks else None
    check(segments, AttentionOptions(0.3, window, softcap, sink_logits, symmetric), heads, dim, splits)


def test_a_prompt_of_many_tiles_beside_a_single_token() -> None:
    torch.manual_seed(0)
    segments = make_segments([(3, 70, True), (40, 1, True), (10, 40, False)], 16, None, False)
    check(segments, AttentionOptions(0.3), (1, 3), 16, 1)
    check(segments, AttentionOptions(0.3, 20), (1, 3), 16, 2)


def test_half_precision() -> None:
    torch.manual_seed(0)
    segments = make_segments([(30, 4, True), (20, 8, False)], 4, None, False)
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter multiplies bf16 wrongly
    check(segments, AttentionOptions(0.3), (2, 2), 16, 1, dtype, 2e-2)
    check(segments, AttentionOptions(0.3), (2, 2), 16, 4, dtype, 2e-2)


@pytest.mark.parametrize("window", [None, 1, 3, 13])
@pytest.mark.parametrize("splits", [1, 4])
def test_trees_beside_chains(window: int | None, splits: int) -> None:
    torch.manual_seed(0)
    segments = make_segments([(11, 7, True), (5, 7, True), (8, 9, True), (3, 2, False)], 4, None, False)
    segments[0].parents = (0, 0, 1, 1, 4, 2)
    segments[2].parents = (0, 1, 1, 3, 3, 2, 6, 0)
    check(segments, AttentionOptions(0.3, window), (2, 2), 8, splits)


@pytest.mark.parametrize("window", [None, 6])
def test_groups_beside_chains(window: int | None) -> None:
    torch.manual_seed(0)
    segments = make_segments([(8, 8, True), (5, 7, True), (3, 2, False)], 4, None, False)
    segments[0].groups, segments[1].groups = (4, 4), (1, 1, 1, 4)
    check(segments, AttentionOptions(0.3, window), (2, 2), 8, 1)


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


@pytest.mark.skipif(DEVICE.type == "cuda", reason="says how programs are divided on a GPU")
def test_splits_fill_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        multi_processor_count = 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)

    def splits(start: int, segments: int) -> int:
        shapes = [(start, 1, True)] * segments
        batch = RaggedBatch(make_segments(shapes, 16, None, False), torch.zeros(segments, dtype=torch.long))
        plan = kernel.tiled_batch(batch, AttentionOptions(1.0), 4)
        return int(kernel.choose_splits(plan, 8, torch.device("cuda")))

    assert splits(8000, 1) == 16  # 31 parts at least of 256 keys; 33 programs would fill the GPU
    assert splits(300, 1) == 1
    assert splits(8000, 64) == 1
