"""Injection of all layers in one step against the drafter's own loop over layers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import random_drafter
from volley.memory.kv_store import KVDtype, make_store
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.inject import Injection
from volley.models.layers.accelerate import accelerate

CPU = torch.device("cpu")
TAPS = 2 * 32
SLOTS = 650


def by_layers(drafter: Drafter, kind: KVDtype, features: torch.Tensor, positions: torch.Tensor, slots):  # type: ignore[no-untyped-def]
    store = make_store(kind, drafter.kv_shapes, SLOTS, features.dtype, CPU)
    for layer, (keys, values) in enumerate(drafter.context_kv(features, positions)):
        store.write(layer, slots, keys, values)
    return store


@pytest.mark.slow
@given(
    count=st.integers(1, 9) | st.sampled_from([256, 257, 600]),
    layers=st.integers(1, 3),
    kind=st.sampled_from(["auto", "int8", "int4"]),
    seed=st.integers(0, 1000),
    scattered=st.booleans(),
)
def test_random_features(count: int, layers: int, kind: KVDtype, seed: int, scattered: bool) -> None:
    drafter = random_drafter(seed, num_hidden_layers=layers)
    features, positions = torch.randn(count, TAPS), torch.randint(500, (count,))
    slots = torch.randperm(SLOTS)[:count] if scattered else slice(7, 7 + count)
    store = make_store(kind, drafter.kv_shapes, SLOTS, torch.float32, CPU)
    Injection(drafter, store)(features, positions, slots)
    expected = by_layers(drafter, kind, features, positions, slots)
    for layer in range(layers):
        for mine, theirs in zip(store.read(layer, slots), expected.read(layer, slots), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        assert float(store.read(layer, slice(0, SLOTS))[0].abs().sum()) > 0


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_half_precision(packed: bool, biased: bool) -> None:
    drafter = random_drafter(attention_bias=biased).to(torch.bfloat16)
    if packed:
        accelerate(drafter)
    features, positions = torch.randn(12, TAPS).bfloat16(), torch.arange(12)
    store = make_store("auto", drafter.kv_shapes, SLOTS, torch.bfloat16, CPU)
    Injection(drafter, store)(features, positions, slice(0, 12))
    expected = by_layers(drafter, "auto", features, positions, slice(0, 12))
    for layer in range(2):
        for mine, theirs in zip(store.read(layer, slice(0, 12)), expected.read(layer, slice(0, 12)), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2**-5, atol=2**-5)


@pytest.mark.parametrize("name", ["k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias", "k_norm.weight"])
@pytest.mark.parametrize("replaced", [False, True])
@torch.no_grad()
def test_it_follows_the_weights(name: str, replaced: bool) -> None:
    """An optimizer changes weights in place, or others replace them."""
    drafter = random_drafter(attention_bias=True)
    injection = Injection(drafter, make_store("auto", drafter.kv_shapes, 9, torch.float32, CPU))
    features, positions = torch.randn(5, TAPS), torch.arange(5)
    before = injection.keys_values(features, positions)
    weight = drafter.get_parameter(f"layers.1.self_attn.{name}")
    if replaced:
        weight.data = torch.randn_like(weight)
    else:
        weight.mul_(1.5)
    after = injection.keys_values(features, positions)
    changed = 1 if name.startswith("v_proj") else 0
    assert torch.equal(before[changed][0], after[changed][0])
    assert not torch.allclose(before[changed][1], after[changed][1])
    for layer, (keys, values) in enumerate(drafter.context_kv(features, positions)):
        torch.testing.assert_close((after[0][layer], after[1][layer]), (keys, values))
