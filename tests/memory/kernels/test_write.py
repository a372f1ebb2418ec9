"""Keys and values into their pools: the kernel against the store's own writing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.memory.kernels import DEVICE
from volley.memory.kernels.write import write
from volley.memory.kv_store import DenseKVStore


@given(
    count=st.integers(1, 9),
    heads=st.integers(1, 3),
    dim=st.sampled_from([4, 8, 24]),
    between=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_pools_are_the_references(count: int, heads: int, dim: int, between: int, seed: int) -> None:
    """Keys and values of a token are parts of a longer row, as they come from a joined product."""
    torch.manual_seed(seed)
    stores = [DenseKVStore([(heads, dim)] * 2, 20, torch.float32, DEVICE) for _ in range(2)]
    rows = torch.randn(count, between + 2 * heads, dim, device=DEVICE)
    keys, values = rows[:, between:].split(heads, dim=1)
    slots = torch.randperm(20)[:count].to(DEVICE)
    write(stores[0], 1, slots, keys, values)
    stores[1].write(1, slots, keys, values)
    for mine, theirs in zip(stores[0].keys + stores[0].values, stores[1].keys + stores[1].values, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("layout", ["transposed", "another size of values"])
def test_other_layouts_are_left_to_the_store(layout: str) -> None:
    store = DenseKVStore([(2, 4)], 8, torch.float32, DEVICE)
    keys, values = torch.randn(2, 3, 2, 4, device=DEVICE)
    if layout == "transposed":
        keys = keys.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        values = values[..., :1].expand(3, 2, 4)
    write(store, 0, torch.arange(2, 5, device=DEVICE), keys, values)
    assert torch.equal(store.keys[0][2:5], keys)
    assert torch.equal(store.values[0][2:5], values)
