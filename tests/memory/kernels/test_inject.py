"""The Triton injection kernel against the injection in PyTorch: on a GPU compiled, elsewhere in the interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory.kernels import DEVICE
from tests.tiny import random_drafter
from volley.memory import kernels
from volley.memory.kv_store import DenseKVStore
from volley.models.drafters.inject import Injection


@pytest.mark.slow
@given(
    count=st.integers(1, 6),
    layers=st.integers(1, 3),
    kv_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([8, 12]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scattered=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30)
def test_random_features(  # type: ignore[no-untyped-def]
    count, layers, kv_heads, head_dim, dtype, scattered, seed
) -> None:
    shape = {"num_hidden_layers": layers, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    drafter = random_drafter(seed, **shape).to(DEVICE, dtype)
    stores = [DenseKVStore(drafter.kv_shapes, 20, dtype, DEVICE) for _ in range(2)]
    features = torch.randn(count, 64).to(DEVICE, dtype)
    positions = torch.randint(500, (count,)).to(DEVICE)
    slots = torch.randperm(20)[:count].to(DEVICE) if scattered else slice(3, 3 + count)
    slow, fast = (Injection(drafter, store) for store in stores)
    stores[0].write_layers(slots, *slow.keys_values(features, positions))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "usable", lambda _: True)
        fast(features, positions, slots)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-5
    for layer in range(layers):
        torch.testing.assert_close(stores[1].keys[layer], stores[0].keys[layer], rtol=tolerance, atol=tolerance)
        assert torch.equal(stores[1].values[layer], stores[0].values[layer])
