"""What the benchmark counts and gates without a GPU."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import gpu_ready
from benchmarks.pretended_gpu import OnDevice, pretended_cuda


def good() -> dict[str, Any]:
    step = {"policy": "fixed:16", "draft_weights": "fp8", "requests": 1, "waits": 1.0, "layer_operations": 12}
    kernel = {"kernel": "attention", "arch": 90, "spilled": 0, "shared": 1, "fits": True}
    return {
        "steps": [step],
        "kernels": [kernel],
        "pool_tokens": {"139": 500_000},
        "roofline": [{"ratio": 1.2}, {"ratio": 1.09}],
    }


def test_bars_that_are_reached_are_not_named() -> None:
    assert gpu_ready.missed(good()) == []


@pytest.mark.parametrize(
    ("part", "change", "named"),
    [
        ("steps", {"waits": 1.25}, "fixed:16, fp8, 1 requests: 1.25 waits a step, at most 1"),
        ("steps", {"layer_operations": 13}, "13 launches a layer"),
        ("kernels", {"fits": False, "spilled": 8}, "attention on sm_90: 8 bytes spilled"),
        ("roofline", {"ratio": 1.1}, "floor of the ratio 1.100"),
    ],
)
def test_a_bar_that_is_missed_is_named(part: str, change: dict[str, Any], named: str) -> None:
    report = good()
    report[part][-1] |= change
    assert named in gpu_ready.missed(report)[0]


def test_a_small_pool_is_named() -> None:
    assert "499999 tokens" in gpu_ready.missed(good() | {"pool_tokens": {"139": 499_999}})[0]


def test_a_drafter_of_volleys_own_options_reaches_the_floor() -> None:
    ratios = {row["drafter"]: round(row["ratio"], 3) for row in gpu_ready.roofline()}
    assert list(ratios.values()) == [1.225, 1.162, 1.082, 1.113, 1.081]
    assert gpu_ready.pool_tokens(139) > 500_000 > gpu_ready.pool_tokens(80) > 250_000


def test_codes_and_a_copy_of_the_head_take_less_than_bf16() -> None:
    assert 0.75 < gpu_ready.drafter_bytes("fp8") / gpu_ready.drafter_bytes("bf16") < 0.8
    assert gpu_ready.pool_tokens(80, "fp8") > gpu_ready.pool_tokens(80)


def test_operations_of_a_layer_and_waits_are_counted() -> None:
    found = gpu_ready.count_steps(*gpu_ready.models(), "fixed:1", 1, steps=2)
    assert 9 <= found.layer_operations <= 12
    assert found.operations > gpu_ready.LAYERS * found.layer_operations
    assert found.waits == sum(found.places.values()) >= 1
    assert found.launches <= 4
    assert found.captured > gpu_ready.LAYERS * found.layer_operations


def test_a_drafter_in_fp8_waits_no_more_and_adds_in_an_operation_of_its_own() -> None:
    pair = gpu_ready.models()
    plain, coded = (gpu_ready.count_steps(*pair, "fixed:16", 1, 2, weights) for weights in ("bf16", "fp8"))
    assert (coded.draft_weights, coded.waits, coded.copies) == ("fp8", plain.waits, plain.copies)
    assert coded.operations == plain.operations + gpu_ready.DRAFT_LAYERS


def test_mixed_devices_and_waits_are_seen() -> None:
    with pretended_cuda() as counts:
        x = torch.ones(3, device="cuda")
        assert isinstance(x, OnDevice)
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3)
        counts.clear()
        y = (x + 1).view(3)
        assert (counts.operations["add"], counts.waits.total()) == (1, 0)
        assert (y.tolist(), y.sum().item(), y[y > 1].shape) == ([2, 2, 2], 6, (3,))
        assert [kind for kind, _ in counts.waits] == ["a list is read", "a value is read", "a boolean index"]
        torch.ones(2).pin_memory().to("cuda:0", non_blocking=True)
        assert counts.copies.total() == 1
