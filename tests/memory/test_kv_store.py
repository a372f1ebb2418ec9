"""Every kind of store: what was written last is what is read, through any block table, singly or all layers at once."""

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from volley.errors import ConfigError
from volley.memory.kv_cache import BlockTable
from volley.memory.kv_store import DenseKVStore, KVDtype, bytes_per_token, make_store

CPU = torch.device("cpu")
KINDS = get_args(KVDtype)
TOLERANCE = {"auto": 0.0, "int8": 0.02, "int4": 0.3}  # of a vector's norm
SIZE, PAGES = 3, 6


def table_of(layout: str, order: list[int]) -> BlockTable:
    if layout == "ring":
        return BlockTable(SIZE, order[:3], is_ring=True)
    return BlockTable(SIZE, range(1, PAGES) if layout == "consecutive" else order)


WRITES = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5), st.booleans()), min_size=1, max_size=8)


@given(
    kind=st.sampled_from(KINDS),
    layout=st.sampled_from(["consecutive", "scattered", "ring"]),
    order=st.permutations(range(PAGES)),
    writes=WRITES,
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([4, 6, 16]),
    seed=st.integers(0, 10**6),
)
def test_what_was_written_last_is_read(kind, layout, order, writes, heads, head_dim, seed) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(seed)
    table = table_of(layout, order)
    layers = 2
    store = make_store(kind, [(heads, head_dim)] * layers, PAGES * SIZE, torch.float32, CPU)
    written: dict[int, torch.Tensor] = {}  # position → [layers, 2, heads, d]
    for start, length, together in writes:
        end = min(start + length, 15) if layout != "ring" else start + length
        vectors = torch.randn(layers, 2, end - start, heads, head_dim) * 10 ** torch.randint(-2, 3, ()).float()
        slots = table.slots(start, end)
        if together:
            store.write_layers(slots, vectors[:, 0], vectors[:, 1])
        else:
            for layer in range(layers):
                store.write(layer, slots, *vectors[layer])
        for position in range(start, end):
            if layout == "ring":
                written = {p: v for p, v in written.items() if p % 9 != position % 9}
            written[position] = vectors[:, :, position - start]
    runs = [(p, p + 1) for p in written] if layout == "ring" else _runs(sorted(written))
    for start, end in runs:
        for layer in range(layers):
            expected = torch.stack([written[p][layer] for p in range(start, end)], dim=1)
            keys, values = store.extract(layer, table, start, end)
            assert keys.is_contiguous()
            assert values.is_contiguous()
            error = (torch.stack((keys, values)) - expected).norm(dim=-1)
            assert bool((error <= TOLERANCE[kind] * expected.norm(dim=-1) + 1e-9).all())
            raw = store.read(layer, table.slots(start, end))
            for mine, theirs in zip(raw, (keys, values), strict=True):
                torch.testing.assert_close(store.unrotate(layer, mine), theirs)
                torch.testing.assert_close(store.rotate(layer, theirs), mine, rtol=1e-4, atol=1e-5)


def _runs(positions: list[int]) -> list[tuple[int, int]]:
    starts = [p for p in positions if p - 1 not in positions]
    ends = [p + 1 for p in positions if p + 1 not in positions]
    return list(zip(starts, ends, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_extraction_across_the_seam_of_a_ring(kind: KVDtype) -> None:
    torch.manual_seed(0)
    store = make_store(kind, [(2, 16)], 40, torch.float32, CPU)
    table = BlockTable(4, [7, 2, 5], is_ring=True)
    keys, values = torch.randn(2, 30, 2, 16)
    for start in range(0, 30, 5):
        store.write(0, table.slots(start, start + 5), keys[start : start + 5], values[start : start + 5])
    for found, true in zip(store.extract(0, table, 18, 30), (keys[18:], values[18:]), strict=True):
        assert bool(((found - true).norm(dim=-1) <= TOLERANCE[kind] * true.norm(dim=-1)).all())
    with pytest.raises(AssertionError, match="ring table cannot hold"):
        store.extract(0, table, 17, 30)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [slice(3, 8), torch.tensor([9, 0, 4, 5, 1])])
def test_layers_written_together_are_layers_written_singly(kind: KVDtype, slots: slice | torch.Tensor) -> None:
    torch.manual_seed(0)
    together, singly = (make_store(kind, [(2, 8)] * 3, 10, torch.float32, CPU) for _ in range(2))
    keys, values = torch.randn(2, 3, 5, 2, 8)
    together.write_layers(slots, keys, values)
    for layer in range(3):
        singly.write(layer, slots, keys[layer], values[layer])
        for mine, theirs in zip(together.read(layer, slice(0, 10)), singly.read(layer, slice(0, 10)), strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_may_differ_in_shape(kind: KVDtype) -> None:
    torch.manual_seed(0)
    store = make_store(kind, [(2, 8), (1, 16)], 6, torch.float32, CPU)
    keys = torch.randn(2, 1, 16)
    store.write(1, slice(2, 4), keys, -keys)
    found, negative = store.extract(1, BlockTable(2, [0, 1, 2]), 2, 4)
    assert float((found - keys).norm() / keys.norm()) <= TOLERANCE[kind]
    torch.testing.assert_close(found, -negative, rtol=1e-2, atol=1e-2)
    with pytest.raises(AssertionError, match="written one by one"):
        store.write_layers(slice(0, 1), keys, keys)


@pytest.mark.parametrize(("source", "target"), [([5], [1]), ([3, 4, 6], [2, 3, 4]), ([3, 5, 2], [1, 2, 3]), ([], [])])
@pytest.mark.parametrize("shapes", [[(2, 8), (2, 8)], [(2, 8), (1, 6)]], ids=["alike", "unlike"])
@pytest.mark.parametrize("kind", KINDS)
def test_moved_slots_may_overlap(
    kind: KVDtype, shapes: list[tuple[int, int]], source: list[int], target: list[int]
) -> None:
    torch.manual_seed(0)
    store = make_store(kind, shapes, 8, torch.float32, CPU)
    for layer, shape in enumerate(shapes):
        store.write(layer, slice(0, 8), *torch.randn(2, 8, *shape))
    before = [store.read(layer, torch.arange(8)) for layer in range(2)]
    store.move(*(torch.tensor(slots, dtype=torch.long) for slots in (source, target)))
    came = torch.arange(8)
    came[target] = torch.tensor(source, dtype=torch.long)
    for layer in range(2):
        for mine, old in zip(store.read(layer, slice(0, 8)), before[layer], strict=True):
            assert torch.equal(mine, old[came])


def test_a_dense_store_is_read_in_place() -> None:
    store = DenseKVStore([(2, 4)] * 2, 8, torch.float32, CPU)
    keys, _ = store.read(1, slice(2, 5))
    assert keys.data_ptr() == store.keys[1][2].data_ptr()


def test_bytes_per_token() -> None:
    shapes = [(8, 128)] * 36
    sizes = {kind: bytes_per_token(kind, shapes, torch.bfloat16) for kind in KINDS}
    assert sizes == {"auto": 36 * 2 * 8 * 256, "int8": 36 * 2 * 8 * 130, "int4": 36 * 2 * 8 * 66}
    shapes = [(2, 8), (1, 6)]
    for kind in KINDS:
        store = make_store(kind, shapes, 5, torch.float32, CPU)
        assert store.nbytes == 5 * bytes_per_token(kind, shapes, torch.float32)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown kind of K/V 'int5'; did you mean 'int[48]'"):
        make_store("int5", [(1, 8)], 4, torch.float32, CPU)  # type: ignore[arg-type]
