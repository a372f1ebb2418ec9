"""The attention kernel in C against the reference, and a token alone against the same token among others."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.memory.reference import reference_attention
from tests.memory.test_attention import end_in_a_canvas, make_tables
from tests.tiles import LEVELS, kernels_of, needs_kernels
from volley.memory import native_attention as module
from volley.memory.attention import Attention, AttentionOptions, paged_attention
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_cache import BlockTable
from volley.memory.kv_store import DenseKVStore, KVStore, make_store
from volley.memory.native_attention import native_attention

pytestmark = needs_kernels
PAGE = 16
HEADS = [(4, 2, 16), (3, 3, 48), (4, 2, 64), (16, 8, 128), (8, 1, 32), (32, 1, 32), (6, 6, 80), (4, 1, 256)]
"""Heads, those of K and V, and their size: with tiles where 32 divides it."""


class Case:
    """Segments, rows for their tokens ``[T, heads + 2 · shared, d]``, and two layers of K and V."""

    def __init__(self, segments: list[Segment], heads: tuple[int, int, int], options: AttentionOptions) -> None:
        self.segments, self.options = segments, options
        self.heads, self.shared, self.dim = heads
        self.tokens = sum(segment.length for segment in segments)
        self.slots = (1 + max(page for segment in segments for page in segment.table.pages)) * PAGE
        self.rows = torch.randn(self.tokens, self.heads + 2 * self.shared, self.dim).bfloat16()
        self.past = torch.randn(2, self.slots, self.shared, self.dim).bfloat16()

    def store(self) -> DenseKVStore:
        made = DenseKVStore([(self.shared, self.dim)] * 2, self.slots, torch.bfloat16, torch.device("cpu"))
        made.write(1, slice(0, self.slots), *self.past)
        return made

    def run(self, attend: Attention, rows: Tensor | None = None) -> tuple[Tensor, DenseKVStore]:
        store = self.store()
        batch = RaggedBatch(self.segments, torch.zeros(self.tokens, dtype=torch.long))
        q, k, v = torch.split(self.rows if rows is None else rows, [self.heads, self.shared, self.shared], dim=1)
        return attend(batch, store, 1, q, k, v, self.options), store


def check(case: Case, rows: Tensor | None = None) -> None:
    """The kernel against the reference: it rounds the weights of V to bf16, and its result as the reference does."""
    (slow, expected), (fast, found) = case.run(reference_attention), case.run(native_attention, rows)
    assert torch.equal(found.keys[1], expected.keys[1])
    assert torch.equal(found.values[1], expected.values[1])
    assert not found.keys[0].any(), "another layer was written"
    torch.testing.assert_close(fast.float(), slow.float(), rtol=2**-6, atol=2**-6)


def random_parents(length: int) -> tuple[int, ...]:
    return tuple(int(torch.randint(node, ())) for node in range(1, length))


@given(
    shapes=st.lists(
        st.tuples(
            st.sampled_from([0, 3, 50, 64, 130, 200]), st.sampled_from([1, 1, 2, 7, 40, 70]), st.sampled_from("cbt")
        ),
        min_size=1,
        max_size=4,
    ),
    heads=st.sampled_from(HEADS),
    window=st.none() | st.integers(1, 90),
    layout=st.sampled_from(["consecutive", "scattered", "ring"]),
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
    level=st.sampled_from(LEVELS or [0]),
    seed=st.integers(0, 1000),
)
def test_random_ragged_batches(  # type: ignore[no-untyped-def]
    shapes, heads, window, layout, softcap, has_sinks, level, seed
) -> None:
    torch.manual_seed(seed)
    if window is None and layout == "ring":
        layout = "scattered"
    counts = [math.ceil((start + length) / PAGE) for start, length, _ in shapes]
    made = make_tables(layout, PAGE, counts, (window or 0) + max(length for _, length, _ in shapes))
    segments = [
        Segment(table, start, length, kind != "b", random_parents(length) if kind == "t" else None)
        for table, (start, length, kind) in zip(made, shapes, strict=True)
    ]
    for segment in segments:
        if segment.parents is not None and torch.rand(()) < 0.5:
            end_in_a_canvas(segment)
    if layout == "ring":
        for segment in segments:
            segment.table.first = max(0, int(torch.randint(-segment.start, segment.start + 1, ())))
    sinks = torch.randn(heads[0]) if has_sinks else None
    with kernels_of(level):
        check(Case(segments, heads, AttentionOptions(heads[2] ** -0.5, window, softcap, sinks)))


def test_faults_are_found() -> None:
    """One number of one key or of one value is another; the scale is."""
    torch.manual_seed(0)
    case = Case([Segment(BlockTable(PAGE, [2, 0, 1]), 30, 9)], (4, 2, 64), AttentionOptions(0.125))
    check(case)
    for head in (4, 6):  # the first of the keys, the first of the values
        rows = case.rows.clone()
        rows[8, head, 3] += 1
        with pytest.raises(AssertionError):
            check(case, rows)
    (found, _), (other, _) = case.run(native_attention), case.run(_scaled(native_attention, 1.2))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found.float(), other.float(), rtol=2**-6, atol=2**-6)


def _scaled(attend: Attention, factor: float) -> Attention:
    def scaled(*arguments: Any) -> Tensor:
        *others, options = arguments
        changed: Any = (*others, options._replace(scale=options.scale * factor))
        return attend(*changed)

    return scaled


# -- a token alone and among others -------------------------------------------------------------------------------------


def in_runs(lengths: list[int], attend: Attention, case: Case, start: int, others: list[Segment]) -> Tensor:
    """The tokens of a case's one chain in runs of such lengths, each beside segments of others."""
    store, found, done = case.store(), [], 0
    for length in lengths:
        segment = Segment(case.segments[0].table, start + done, length)
        batch = RaggedBatch([*others, segment], torch.zeros(length + sum(s.length for s in others), dtype=torch.long))
        rows = torch.cat((torch.randn(len(batch) - length, *case.rows.shape[1:]).bfloat16(), case.rows[done:][:length]))
        q, k, v = torch.split(rows, [case.heads, case.shared, case.shared], dim=1)
        found.append(attend(batch, store, 1, q, k, v, case.options)[-length:])
        done += length
    return torch.cat(found)


def check_runs(
    attend: Attention, heads: tuple[int, int, int], window: int | None, start: int, softcap: float | None = None
) -> None:
    torch.manual_seed(start)
    table = BlockTable(PAGE, [3, 9, 0, 5, 1, 7, 2, 12, 8, 11, 10, 4, 6])
    sinks = None if softcap is None else torch.randn(heads[0])
    case = Case([Segment(table, start, 80)], heads, AttentionOptions(heads[2] ** -0.5, window, softcap, sinks))
    case.slots += 8 * PAGE
    case.past = torch.randn(2, case.slots, case.shared, case.dim).bfloat16()
    others = [Segment(BlockTable(PAGE, range(13, 21)), 60, 20), Segment(BlockTable(PAGE, range(17, 21)), 5, 1)]
    expected = case.run(attend)[0]
    for lengths in ([1] * 80, [2, 3, 5, 7, 11, 13, 17, 22], [79, 1], [16] * 5):
        for beside in ([], others[:1], others):
            assert torch.equal(in_runs(lengths, attend, case, start, beside), expected), (lengths[:2], len(beside))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("heads", "window", "start", "softcap"),
    [
        ((4, 2, 64), None, 0, None),
        ((8, 2, 128), None, 61, None),
        ((3, 3, 48), 33, 100, None),
        ((8, 1, 32), 70, 128, None),
        ((4, 1, 256), 70, 61, 3.0),
    ],
)
def test_a_token_is_the_same_in_any_run(
    heads: tuple[int, int, int], window: int | None, start: int, softcap: float | None, level: int
) -> None:
    """With sinks where scores are capped."""
    with kernels_of(level):
        check_runs(native_attention, heads, window, start, softcap)


def test_attention_that_depends_on_the_run_is_found() -> None:
    def dependent(batch: RaggedBatch, *others: Any) -> Tensor:
        """The number of tokens changes what is rounded."""
        return native_attention(batch, *others) * (1 + 2**-8 * (len(batch) % 2))

    with pytest.raises(AssertionError):
        check_runs(dependent, (4, 2, 64), None, 0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("heads", [(4, 2, 64), (3, 3, 48)])
def test_the_path_of_a_tree_is_a_chain(heads: tuple[int, int, int], window: int | None, level: int) -> None:
    torch.manual_seed(0)
    parents = random_parents(24)
    options = AttentionOptions(heads[2] ** -0.5, window)
    tree = Case([Segment(BlockTable(PAGE, [4, 1, 6, 3, 0, 2]), 57, 24, parents=parents)], heads, options)
    with kernels_of(level):
        of_tree = tree.run(native_attention)[0]
        for leaf in range(24):
            path = [leaf]
            while path[0]:
                path.insert(0, parents[path[0] - 1])
            chain = Case([Segment(tree.segments[0].table, 57, len(path))], heads, options)
            chain.slots, chain.past, chain.rows = tree.slots, tree.past, tree.rows[path]
            assert torch.equal(chain.run(native_attention)[0], of_tree[path])


# -- what goes to PyTorch's operations ----------------------------------------------------------------------------------


@pytest.fixture
def passed_on(monkeypatch: pytest.MonkeyPatch) -> list[AttentionOptions]:
    """The options of the calls that were passed on."""
    calls: list[AttentionOptions] = []

    def noted(*arguments: Any) -> Tensor:
        calls.append(arguments[-1])
        return paged_attention(*arguments)

    monkeypatch.setattr(module, "paged_attention", noted)
    return calls


@pytest.mark.parametrize(
    ("change", "causal", "is_passed_on"),
    [
        ({}, True, False),
        ({"window": 5}, False, False),
        ({"symmetric": True}, False, False),  # means nothing without a window
        ({"softcap": 2.0}, True, False),
        ({"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, True, False),
        ({"window": 5, "symmetric": True}, False, True),
    ],
)
def test_options_of_layers(
    change: dict[str, Any], causal: bool, is_passed_on: bool, passed_on: list[AttentionOptions]
) -> None:
    torch.manual_seed(0)
    segments = [Segment(BlockTable(PAGE, [1, 0]), 11, 9, causal)]
    check(Case(segments, (4, 2, 16), AttentionOptions(0.25, **change)))
    assert bool(passed_on) == is_passed_on


def quantised(kind: Any) -> Callable[[], KVStore]:
    return lambda: make_store(kind, [(2, 16)], 4 * PAGE, torch.bfloat16, torch.device("cpu"))


def dense(dtype: torch.dtype, heads: int = 2, dim: int = 16) -> Callable[[], KVStore]:
    return lambda: DenseKVStore([(heads, dim)], 4 * PAGE, dtype, torch.device("cpu"))


@pytest.mark.parametrize(
    ("make", "heads", "dim", "is_passed_on"),
    [
        (dense(torch.bfloat16), 4, 16, False),
        (quantised("int8"), 4, 16, True),
        (quantised("int4"), 4, 16, True),
        (dense(torch.float32), 4, 16, True),
        (dense(torch.bfloat16, dim=24), 4, 24, True),
        (dense(torch.bfloat16, dim=272), 4, 272, True),
        (dense(torch.bfloat16, heads=1), 33, 16, True),
    ],
)
def test_stores_and_shapes(
    make: Callable[[], KVStore], heads: int, dim: int, is_passed_on: bool, passed_on: list[AttentionOptions]
) -> None:
    torch.manual_seed(0)
    stores = make(), make()
    dtype = torch.float32 if stores[0].read(0, slice(0, 1))[0].dtype == torch.float32 else torch.bfloat16
    shared = stores[0].read(0, slice(0, 1))[0].shape[1]
    batch = RaggedBatch([Segment(BlockTable(PAGE, [2, 1]), 0, 20)], torch.zeros(20, dtype=torch.long))
    rows, options = torch.randn(20, heads + 2 * shared, dim).to(dtype), AttentionOptions(dim**-0.5)
    q, k, v = torch.split(rows, [heads, shared, shared], dim=1)
    found = native_attention(batch, stores[0], 0, q, k, v, options)
    expected = reference_attention(batch, stores[1], 0, q, k, v, options)
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-5, atol=2**-5)
    assert bool(passed_on) == is_passed_on


def test_rows_that_lie_otherwise(passed_on: list[AttentionOptions]) -> None:
    """Heads before tokens, as transformers has them: the kernel reads whole tokens."""
    torch.manual_seed(0)
    case = Case([Segment(BlockTable(PAGE, [1, 0]), 11, 9)], (4, 2, 16), AttentionOptions(0.25))
    check(case, case.rows.transpose(0, 1).contiguous().transpose(0, 1))
    assert passed_on


def test_a_single_token_lies_in_any_way(passed_on: list[AttentionOptions]) -> None:
    """The stride between tokens means nothing there: PyTorch's operations in its place would give other bits than in a batch."""
    torch.manual_seed(0)
    case = Case([Segment(BlockTable(PAGE, [1, 0]), 11, 1)], (4, 2, 16), AttentionOptions(0.25))
    batch, store = RaggedBatch(case.segments, torch.zeros(1, dtype=torch.long)), case.store()
    q, k, v = torch.split(case.rows, [4, 2, 2], dim=1)
    turned = q.as_strided(q.shape, (16, 16, 1), q.storage_offset())  # as transformers' rotation leaves one
    assert turned.stride(0) != v.stride(0)
    assert torch.equal(native_attention(batch, store, 1, turned, k, v, case.options), case.run(native_attention)[0])
    assert not passed_on


def test_a_plan_serves_all_layers_of_one_window() -> None:
    batch = RaggedBatch([Segment(BlockTable(PAGE, [0]), 0, 3)], torch.zeros(3, dtype=torch.long))
    assert module.attention_plan(batch, None) is module.attention_plan(batch, None)
    assert module.attention_plan(batch, 2) is not module.attention_plan(batch, None)
