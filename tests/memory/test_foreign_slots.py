"""Attention reads the slots of a segment alone: NaN in all others changes no bit, whatever computes it."""

import copy
from typing import Any

import pytest
import torch

from tests.memory.reference import reference_attention
from volley.memory.attention import Attention, AttentionOptions, GroupLimits, paged_attention
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_cache import BlockTable
from volley.memory.kv_store import DenseKVStore, KVStore, QuantisedKVStore, make_store
from volley.memory.native_attention import native_attention

PAGE, PAGES, HEADS, SHARED, DIM = 4, 64, 4, 2, 32
SHAPES: dict[str, list[dict[str, Any]]] = {
    "decoding": [{"start": start, "length": 1} for start in (3, 17, 30, 8)],
    "chains": [{"start": start, "length": length} for start, length in ((5, 3), (21, 4), (0, 1), (33, 2))],
    "blocks": [{"start": start, "length": length, "causal": False} for start, length in ((5, 3), (21, 4), (9, 4))],
    "trees": [
        {"start": start, "length": 4, "parents": parents} for start, parents in ((6, (0, 0, 1)), (19, (0, 1, 0)))
    ],
    "canvases": [{"start": start, "length": 6, "groups": groups} for start, groups in ((6, (1, 1, 4)), (17, (6,)))],
}


def segments_of(shape: str, *, ring: bool) -> list[Segment]:
    """Segments on scattered pages, of which none has the first of the pool."""
    order = (1 + torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(0))).tolist()
    segments = []
    for own in SHAPES[shape]:
        count = 5 if ring else -(-(own["start"] + own["length"]) // PAGE)
        table, order = BlockTable(PAGE, order[:count], is_ring=ring), order[count:]
        segments.append(Segment(table, **own))
    return segments


def spoil(store: KVStore, segments: list[Segment], window: int | None) -> None:
    """NaN wherever none of ``segments`` has a slot."""
    used = {
        slot
        for own in segments
        for slot in own.table.slot_array(max(0, own.end - len(own.table.pages) * PAGE), own.end)
    }
    others = torch.tensor([slot for slot in range(PAGE * PAGES) if slot not in used])
    if isinstance(store, QuantisedKVStore):
        for scales in store.scales:
            scales[others] = torch.nan
    else:
        assert isinstance(store, DenseKVStore)
        for cache in (*store.keys, *store.values):
            cache[others] = torch.nan


def grouped_attention(*given: Any) -> torch.Tensor:
    """All segments in one call where their shapes allow it."""
    return paged_attention(*given, limits=GroupLimits(0, 10**6, 10**6))


def triton_attention(*given: Any) -> torch.Tensor:
    kernels = pytest.importorskip("tests.memory.kernels")
    from volley.memory.kernels.attention import ragged_attention

    assert kernels.DEVICE
    return ragged_attention(*given, parted=len(given[0]) % 2 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", ["plain", "window", "ring", "symmetric", "softcap", "sinks", "int8", "int4", "bf16"])
@pytest.mark.parametrize(
    "attend", [reference_attention, paged_attention, grouped_attention, native_attention, triton_attention]
)
def test_nan_in_the_slots_of_others_changes_no_bit(attend: Attention, case: str, shape: str) -> None:
    is_half = case == "bf16" or attend is native_attention
    if attend is triton_attention and (is_half or torch.cuda.is_available()):
        pytest.skip("the interpreter multiplies bf16 wrongly; a GPU has tests of its own")
    window = 7 if case in ("window", "ring", "symmetric") else None
    options = AttentionOptions(
        0.3,
        window,
        5.0 if case == "softcap" else None,
        torch.linspace(-1, 1, HEADS) if case == "sinks" else None,
        symmetric=case == "symmetric",
    )
    dtype, segments = torch.bfloat16 if is_half else torch.float32, segments_of(shape, ring=case == "ring")
    torch.manual_seed(0)
    kind: Any = case if case.startswith("int") else "auto"
    store = make_store(kind, [(SHARED, DIM)] * 2, PAGE * PAGES, dtype, torch.device("cpu"))
    every = torch.arange(PAGE * PAGES)
    store.write(1, every, *torch.randn(2, len(every), SHARED, DIM).to(dtype))
    spoilt = copy.deepcopy(store)
    spoil(spoilt, segments, window)
    batch = [
        RaggedBatch(segments, torch.zeros(sum(own.length for own in segments), dtype=torch.long)) for _ in range(2)
    ]
    queries = torch.randn(len(batch[0]), HEADS, DIM).to(dtype)
    keys, values = torch.randn(2, len(batch[0]), SHARED, DIM).to(dtype)
    expected = attend(batch[0], store, 1, queries, keys, values, options)
    found = attend(batch[1], spoilt, 1, queries, keys, values, options)
    assert bool(found.isfinite().all())
    assert torch.equal(found, expected)
