"""Sizes follow the device: a CPU's are modest, a GPU's fill it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.tiny import make_pair
from volley import DecodingConfig, Engine
from volley.config import CapacityConfig
from volley.engine.capacity import Capacity, beside_others, fit, fit_engine
from volley.engine.kv_manager import num_rings, ring_pages
from volley.errors import ConfigError
from volley.memory.device import Device

GIB = 2**30
CPU = Device("cpu")
QWEN3_8B = 2 * 36 * 2 * 8 * 128  # bytes of a token's K/V in bf16
DRAFTER = 2 * 5 * 2 * 8 * 128
WEIGHTS = 16.4e9 + 2.1e9


def sizes(config: CapacityConfig, device: Device, **changes: Any) -> Capacity:
    asked: list[int] = []

    def pass_bytes(tokens: int) -> int:
        asked.append(tokens)
        return 6 * GIB

    values = {"per_token": QWEN3_8B + DRAFTER, "per_ring": 0, "context_length": 40960, "pass_bytes": pass_bytes}
    found = fit(config, device, **{**values, **changes})
    wanted = [found.max_batch_tokens] if device.free_bytes is not None and config.num_pages is None else []
    assert asked == wanted  # one pass of the largest size, and none where nobody needs to know
    return found


def gpu(gib: int, held: float = 0) -> Device:
    return Device("cuda", int(gib * GIB - held))


def test_a_gpu_is_filled() -> None:
    large, small = (sizes(CapacityConfig(), gpu(gib, WEIGHTS)) for gib in (139, 80))
    assert (large.max_running, large.max_batch_tokens) == (256, 4096)
    assert large.num_pages * large.page_size >= 500_000 > small.num_pages * small.page_size >= 250_000
    held = large.num_pages * large.page_size * (QWEN3_8B + DRAFTER) + 6 * GIB
    assert 0.85 < held / (139 * GIB - WEIGHTS) < 0.95


def test_rings_and_passes_are_left_room_for() -> None:
    plain, ringed = (sizes(CapacityConfig(), gpu(139), per_ring=size) for size in (0, 100 * 2**20))
    assert (plain.num_pages - ringed.num_pages) * 16 * (QWEN3_8B + DRAFTER) == pytest.approx(0.9 * 25.4 * GIB, rel=0.01)


def test_wide_rings_take_a_quarter_at_most_unless_requests_at_once_are_given() -> None:
    own = {"per_ring": 80 * 2**20}
    narrow = sizes(CapacityConfig(), gpu(30), **own)
    assert num_rings(narrow.max_running) * own["per_ring"] <= 0.25 * 24 * GIB < num_rings(256) * own["per_ring"]
    assert narrow.max_running > 60
    assert sizes(CapacityConfig(max_running=200), gpu(30), **own).max_running == 200
    assert sizes(CapacityConfig(), gpu(7), **own).max_running == 1


def test_what_is_given_stays() -> None:
    given = CapacityConfig(max_running=3, max_batch_tokens=70, num_pages=9, page_size=4, prefix_caching=False)
    for device in (CPU, gpu(139)):
        found = sizes(given, device)
        expected = Capacity(max_running=3, max_batch_tokens=70, num_pages=9, page_size=4, prefix_caching=False)
        assert found == replace(expected, cuda_graphs=device.type == "cuda")
    assert not sizes(CapacityConfig(cuda_graphs=False), gpu(139)).cuda_graphs


def test_memory_may_be_given_instead_of_pages() -> None:
    config = CapacityConfig(kv_mib=100, page_size=4, max_running=2)
    assert sizes(config, CPU, per_token=2**10).num_pages == 100 * 2**20 // 2**12
    assert sizes(config, CPU, per_token=2**10, per_ring=2**20).num_pages == (100 - num_rings(2)) * 2**20 // 2**12
    for wrong in ({"kv_mib": 0}, {"kv_mib": 1, "num_pages": 1}):
        with pytest.raises(ConfigError, match="kv_mib"):
            CapacityConfig(**wrong)


def test_rings_leave_half_of_the_memory_that_is_given(caplog: pytest.LogCaptureFixture) -> None:
    config, ring = CapacityConfig(kv_mib=4096, max_running=32), 168 * 2**20  # 8,192 tokens of an 8B model's drafter
    found = sizes(config, CPU, per_ring=ring)
    assert 1 < found.max_running < 32
    assert found.num_pages * 16 * (QWEN3_8B + DRAFTER) == pytest.approx(2 * GIB, rel=0.1)
    assert f"{found.max_running} requests run at once" in caplog.text
    assert sizes(config, CPU, per_ring=2**20).max_running == 32


def test_a_full_device_still_has_a_context() -> None:
    assert sizes(CapacityConfig(), gpu(2), context_length=512).num_pages == 32


@pytest.mark.parametrize(
    ("memory", "per_token", "context", "tokens"),
    [
        (8 * GIB, 2**10, 4096, 2**16),
        (8 * GIB, 2**20, 512, 1024),
        (8 * GIB, 2**20, 2**20, 4096),
        (4 * GIB, 2**20, 512, 1024),
        (64 * GIB, 2**20, 512, 8192),
        (2**10 * GIB, 2**20, 512, 2**16),
    ],
)
def test_the_pool_on_a_cpu_is_bounded_and_holds_a_context(
    monkeypatch: pytest.MonkeyPatch, memory: int, per_token: int, context: int, tokens: int
) -> None:
    monkeypatch.setattr("volley.engine.capacity.memory_bytes", lambda _: memory)
    found = sizes(CapacityConfig(page_size=16), CPU, per_token=per_token, context_length=context)
    assert (found.max_running, found.max_batch_tokens, found.num_pages) == (64, 512, tokens // 16)


def test_an_engine_counts_both_models_and_the_ring_apart() -> None:
    pair = make_pair()
    shared = fit_engine(CapacityConfig(), DecodingConfig(), pair.target, pair.drafter)
    ringed = fit_engine(CapacityConfig(), DecodingConfig(draft_window=8), pair.target, pair.drafter)
    alone = fit_engine(CapacityConfig(), DecodingConfig(), pair.target, None)
    assert shared.num_pages <= ringed.num_pages == alone.num_pages
    assert ring_pages(pair.drafter.config.block_size, 8, 16) == 2
    engine = Engine(pair.target, pair.drafter, page_size=4)
    assert engine.snapshot().num_pages == engine.capacity.num_pages == 4 * shared.num_pages


def test_an_engine_beside_others_leaves_most_of_a_gpu() -> None:
    here, there = (beside_others(torch.device(kind)) for kind in ("cpu", "cuda"))
    assert here == CapacityConfig()
    alone = sizes(CapacityConfig(), gpu(141, WEIGHTS)).num_pages
    beside = fit(there, gpu(141, WEIGHTS), per_token=QWEN3_8B, per_ring=0, context_length=40960, pass_bytes=lambda _: 0)
    assert 0 < beside.num_pages * 16 * QWEN3_8B <= 4 * GIB
    assert beside.num_pages < alone / 20
    assert beside.max_running == 32
