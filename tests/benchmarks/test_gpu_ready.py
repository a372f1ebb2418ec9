"""What the benchmark counts and gates without a GPU."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from benchmarks import gpu_ready
from benchmarks.pretended_gpu import OnDevice, pretended_cuda
from volley.engine.ahead import Ahead, Works


def good() -> dict[str, Any]:
    step = {"policy": "fixed:16", "requests": 1, "waits": 1.0, "layer_operations": 12}
    kernel = {"kernel": "attention", "arch": 90, "spilled": 0, "shared": 1, "fits": True}
    waits = {"sent": "T = 1", "policy": "goodput", "requests": 8, "before_last": 0.0, "left": 0, "is_gated": True}
    plain = {**waits, "policy": "fixed:1", "left": 1}
    return {
        "steps": [step],
        "waits": [{**waits, "sent": "trees", "before_last": 5.0, "is_gated": False}, plain, waits],
        "kernels": [kernel],
        "pool_tokens": {"139": 500_000},
        "roofline": [{"ratio": 1.2}, {"ratio": 1.09}],
    }


def test_bars_that_are_reached_are_not_named() -> None:
    assert gpu_ready.missed(good()) == []


@pytest.mark.parametrize(
    ("part", "change", "named"),
    [
        ("steps", {"waits": 1.25}, "fixed:16, 1 requests: 1.25 waits a step, at most 1"),
        ("waits", {"before_last": 0.25}, "goodput, T = 1, 8 requests: 0.25 waits before the last read, at most 0"),
        (
            "waits",
            {"policy": "fixed:1"},
            "fixed:1, T = 1, 8 requests: no pass is launched before the last is read",
        ),
        (
            "waits",
            {"policy": "fixed:16", "sent": "top-p"},
            "fixed:16, top-p, 8 requests: no pass is launched",
        ),
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
    assert list(ratios.values()) == [1.225, 1.162, 1.082]
    assert gpu_ready.pool_tokens(139) > 500_000 > gpu_ready.pool_tokens(80) > 250_000


def test_operations_of_a_layer_and_waits_are_counted() -> None:
    found = gpu_ready.count_steps(*gpu_ready.models(), "fixed:1", 1, steps=2)
    assert 9 <= found.layer_operations <= 12
    assert found.operations > gpu_ready.LAYERS * found.layer_operations
    assert found.waits == sum(found.places.values()) >= 1
    assert found.launches <= 10, "five of them look whether the chosen logit is finite"
    assert found.captured > gpu_ready.LAYERS * found.layer_operations


@pytest.mark.parametrize("policy", gpu_ready.POLICIES)
@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("name", ["greedy", "T = 1", "T = 1, seed"])
def test_a_step_reads_once_and_the_gate_says_so(name: str, policy: str, requests: int) -> None:
    found = gpu_ready.count_waits(*gpu_ready.models(2, 1), name, policy, requests)
    assert (found.waits, found.before_last, found.drafted > 0) == (1, 0, policy != "fixed:1")
    assert (found.left > 0) == (policy != "goodput"), "the next passes"
    assert gpu_ready.missed(good() | {"waits": [asdict(found)]}) == []


def test_a_wait_before_the_next_passes_are_launched_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Ahead.launch

    def late(self: Ahead, works: Works, tokens: Tensor) -> None:
        torch.ones(1, device="cuda").item()
        launch(self, works, tokens)

    monkeypatch.setattr(Ahead, "launch", late)
    found = gpu_ready.count_waits(*gpu_ready.models(2, 1), "greedy", "fixed:16", 2)
    assert (found.waits, found.before_last) == (2, 1)
    assert any(where.startswith("a value is read, ") for where in found.places)
    assert "1 waits before the last read" in gpu_ready.missed(good() | {"waits": [asdict(found)]})[0]


def test_a_plain_pass_that_is_launched_behind_the_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old order, planted."""
    monkeypatch.setattr(Ahead, "launch", lambda *_: None)
    found = gpu_ready.count_waits(*gpu_ready.models(2, 1), "greedy", "fixed:1", 2)
    assert (found.waits, found.left) == (1, 0)
    assert "no pass is launched before" in gpu_ready.missed(good() | {"waits": [asdict(found)]})[0]


@pytest.mark.parametrize("name", [name for name in gpu_ready.SENT if name != "greedy"])
def test_all_that_users_send_is_counted(name: str) -> None:
    sent = gpu_ready.SENT[name]
    found = gpu_ready.count_waits(*gpu_ready.models(2, 1, sent.head), name, "fixed:16", 2, steps=2)
    assert found.drafted > 0
    assert found.waits == sum(found.places.values()) >= 1
    assert found.before_last == found.waits - 1


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
