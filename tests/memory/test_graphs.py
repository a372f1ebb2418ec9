"""Passes in fixed memory against those over a batch of their own: the same outputs, and only their own K/V change."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from volley.memory import graphs
from volley.memory.attention import AttentionOptions, paged_attention
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.graphs import MOST_ROWS, Bucket, StaticPasses, num_tiles, static_passes
from volley.memory.kernels import launching
from volley.memory.kv_cache import BlockTable
from volley.memory.kv_store import DenseKVStore, make_store
from volley.memory.tiles import Tiling, tile_array

CPU = torch.device("cpu")
SIZE, PAGES, VOCAB = 4, 60, 17


class Model:
    """One layer of attention over embedded tokens."""

    def __init__(self, window: int | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = torch.randn(3, VOCAB, 2, 8, generator=generator)
        self.options = AttentionOptions(0.4, window)
        self.store = make_store("auto", [(2, 8)], (PAGES + 1) * SIZE, torch.float32, CPU)
        self.batches: list[RaggedBatch] = []

    def forward(self, batch: RaggedBatch, rows: Tensor) -> list[Tensor]:
        self.batches.append(batch)
        turned = batch.positions.float().cos()[:, None, None]
        q, k, v = (self.weights[part][batch.token_ids] * turned for part in range(3))
        mixed = paged_attention(batch, self.store, 0, q, k, v, self.options)
        return [mixed[rows].flatten(1), batch.token_ids]

    def kv(self) -> Tensor:
        assert isinstance(self.store, DenseKVStore)
        return torch.stack((self.store.keys[0], self.store.values[0]))


def passes_of(model: Model) -> StaticPasses:
    passes = static_passes(model.forward, model.store, SIZE, CPU)
    assert passes is not None
    return passes


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Segment], list[int], list[int], dict[int, int]]:
    """Segments on pages of their own, tokens, the rows that are wanted, and which runs are late: their lengths by first row."""
    count = draw(st.integers(1, 9))
    pages = draw(st.permutations(range(PAGES)))
    segments: list[Segment] = []
    for _ in range(count):
        start, length = draw(st.integers(0, 14)), draw(st.integers(1, 9))
        own = -(-(start + length) // SIZE)
        parents = tuple(draw(st.integers(0, i)) for i in range(length - 1)) if draw(st.booleans()) else None
        segments.append(Segment(BlockTable(SIZE, pages[:own]), start, length, parents=parents))
        if parents is not None and (canvas := draw(st.integers(0, length - 1))):
            following = length - canvas
            segments[-1].parents, segments[-1].canvas = (*parents[:following], *range(following, length - 1)), canvas
        pages = pages[own:]
    total = sum(segment.length for segment in segments)
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=total, max_size=total))
    rows = sorted(draw(st.sets(st.integers(0, total - 1), min_size=1)))
    offsets = np.cumsum([0, *(segment.length for segment in segments)]).tolist()
    late = {
        offset + 1: segment.length - 1
        for offset, segment in zip(offsets, segments, strict=False)
        if segment.length > 1 and draw(st.booleans())
    }
    return segments, tokens, rows, late


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(st.lists(batches(), min_size=1, max_size=3), st.sampled_from([None, 5]))
def test_outputs_are_equal_and_nobody_elses_kv_change(passing: list[Any], window: int | None) -> None:
    """Several passes follow each other, so that what one leaves in fixed memory meets the next."""
    fixed, own = Model(window), Model(window)
    passes = passes_of(fixed)
    for segments, tokens, rows, late in passing:
        before = fixed.kv()
        runs = {row: torch.tensor(tokens[row : row + size]) for row, size in late.items()}
        known = [0 if any(row <= i < row + size for row, size in late.items()) else t for i, t in enumerate(tokens)]
        found = passes(segments, known, rows, runs)
        assert found is not None
        batch, (mixed, ids) = found
        expected, expected_ids = own.forward(*RaggedBatch.on_device(segments, known, rows, CPU, runs))
        assert ids[: len(tokens)].tolist() == expected_ids.tolist() == tokens
        torch.testing.assert_close(mixed[: len(rows)], expected, rtol=1e-5, atol=1e-6)
        assert (len(batch), batch.segments) == (len(tokens), segments)
        written = np.concatenate([one.table.slot_array(one.start, one.end) for one in segments])
        beside = np.setdiff1d(np.arange(PAGES * SIZE), written)
        assert torch.equal(fixed.kv()[:, beside], before[:, beside])
        torch.testing.assert_close(fixed.kv()[:, written], own.kv()[:, written], rtol=1e-5, atol=1e-6)
        assert len(fixed.batches[-1]) >= len(tokens)


def test_rows_that_fill_up_a_living_page_are_seen() -> None:
    """The planted fault: the page that is nobody's is the first request's."""
    model = Model()
    passes = StaticPasses(model.forward, BlockTable(SIZE, [0]), CPU)
    segments = [Segment(BlockTable(SIZE, [0, 1]), 4, 3)]
    model.store.write(0, slice(0, 4), torch.ones(4, 2, 8), torch.ones(4, 2, 8))
    before = model.kv()
    assert passes(segments, [1, 2, 3], [2]) is not None
    assert torch.equal(model.kv()[:, :4], before[:, :4]), "three rows are a bucket of their own"
    assert passes([Segment(BlockTable(SIZE, [0, 1]), 3, 5)], [1] * 5, [4]) is not None
    assert not torch.equal(model.kv()[:, :3], before[:, :3])


def test_a_bucket_holds_its_segments() -> None:
    assert Bucket.of([1]) == Bucket(1, 1, 1)
    assert Bucket.of([1, 1, 1]) == Bucket(4, 4, 1)
    assert Bucket.of([16] * 11) == Bucket(16, 192, 1)
    assert Bucket.of([MOST_ROWS]) == Bucket(1, MOST_ROWS, 1)
    assert Bucket.of([MOST_ROWS + 1]) is None
    assert Bucket.of([1] * 65) is None


def test_few_requests_have_as_many_rows_whatever_they_verify() -> None:
    for count in (1, 2, 3, 5, 8):
        buckets = {Bucket.of([size] * count, 16) for size in range(1, 17)}
        assert buckets == {Bucket.of([16] * (1 << (count - 1).bit_length()))}
    assert Bucket.of([1], 10) == Bucket.of([10], 10) == Bucket(1, 12, 1)
    assert Bucket.of([1] * 16, 16) == Bucket.of([1] * 16), "sixteen times sixteen rows would not be free"
    assert Bucket.of([17], 16) == Bucket.of([17])


def test_what_is_warmed_up_needs_no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = StaticPasses(Model().forward, BlockTable(SIZE, [PAGES]), CPU, 6)
    passes.warm_up(5, 9, 64, causal=True)
    known = passes.num_graphs
    assert known == len({Bucket.of([size] * count, 6) for size in range(1, 10) for count in range(1, 9)})
    for count in range(1, 6):
        for size in range(1, 10):
            run = passes.made_up([size] * count, 20, causal=True)
            assert run is not None
            run()
    assert passes.num_graphs == known


def test_what_cannot_be_captured_is_run_and_no_more_is_tried_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[object]()
    monkeypatch.setattr(graphs.launching, "capture", lambda *given: tried.append(given))
    passes = StaticPasses(Model().forward, BlockTable(SIZE, [PAGES]), CPU, 6)
    passes.warm_up(5, 9, 64, causal=True)
    assert (len(tried), passes.num_graphs, passes.is_refused) == (1, 0, True)
    refused = passes.made_up([3], 5, causal=True)
    monkeypatch.undo()
    whole = StaticPasses(Model().forward, BlockTable(SIZE, [PAGES]), CPU, 6).made_up([3], 5, causal=True)
    assert refused is not None
    assert whole is not None
    torch.testing.assert_close(refused()[:3], whole()[:3])


def test_what_all_logits_have_in_common_says_nothing() -> None:
    """Models may give all tokens a low logit, beside which two tokens look alike."""
    torch.manual_seed(0)
    logits, other = (3 * torch.randn(50) - 100 for _ in range(2))
    assert graphs._are_alike(logits + 0.01 * torch.randn(50), logits)
    assert not graphs._are_alike(other, logits)
    logits[7] = -torch.inf
    assert graphs._are_alike(logits.clone(), logits)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.sampled_from([1, 3, 16]))
def test_a_bucket_has_room_for_all_tiles(lengths: list[int], tokens: int) -> None:
    bucket, tiling = Bucket.of(lengths), Tiling(None, False, tokens, 1)
    if bucket is None:
        return
    rest = [bucket.rows - sum(lengths)] if bucket.rows > sum(lengths) else []
    segments = [Segment(BlockTable(SIZE, [0]), 0, length) for length in lengths + rest]
    assert len(tile_array(segments, tiling)) <= num_tiles(bucket, tiling)


def test_what_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    passes = passes_of(model)
    assert passes([Segment(BlockTable(SIZE, range(PAGES)), 0, 20)] * 20, [0] * 400, [0]) is None
    assert passes.made_up([MOST_ROWS + 1], 0, causal=True) is None
    monkeypatch.setattr(graphs, "segment_arrays", lambda _: (np.zeros((1, 7)), np.zeros(2**20)))
    passes.tilings = [Tiling(None, False, 1, 1)]
    assert passes([Segment(BlockTable(SIZE, [0]), 0, 1)], [0], [0]) is None, "too many pages"


def test_made_up_text_is_on_nobodys_page() -> None:
    model = Model()
    passes = passes_of(model)
    before = model.kv()
    run = passes.made_up([3, 3], 6, causal=False)
    assert run is not None
    assert run().shape == (6, 16)
    assert torch.equal(model.kv()[:, : PAGES * SIZE], before[:, : PAGES * SIZE])
    assert [segment.start for segment in model.batches[-1].segments] == [6, 6]
    assert passes.nbytes > 4 * 2**20


def test_operations_that_no_capture_sees_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a replay that does nothing."""
    passes = StaticPasses(Model().forward, BlockTable(SIZE, [PAGES]), CPU)
    assert passes.repeats()

    def capture(run: Callable[[], object], _: torch.device) -> Callable[[], None]:
        run()
        return lambda: None

    monkeypatch.setattr(launching, "capture", capture)
    assert not StaticPasses(Model().forward, BlockTable(SIZE, [PAGES]), CPU).repeats()
