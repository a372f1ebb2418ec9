"""A pretended GPU has its next plain pass before the host waits for the tokens of the last one; they are the CPU's."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.pretended_gpu import EVENT, pretended_cuda
from tests.gpu.test_engine import GREEDY, SEEDED, Both, both, pretended
from tests.tiny import random_prompts
from volley import Engine, SamplingParams

__all__ = ["both"]
LONG = SamplingParams(max_tokens=60, ignore_eos=True)
SAMPLED = replace(LONG, temperature=1.0)


def watched(both: Both, count: int, params: SamplingParams, *, is_ahead: bool = True) -> tuple[list[int], list[int]]:
    """Launches that the device has left: when the host has the tokens of a step, and when it commits them."""
    with pretended_cuda() as counts:
        engine = Engine(both.target, num_pages=64)
        if not is_ahead:
            engine.procedure.meanwhile = None  # the order before: a pass is launched when the last one has been read
        for prompt in random_prompts(count, longest=20, seed=1):
            engine.add_request(prompt, params)
        committing = list[int]()
        engine.on_verified.append(lambda *_: committing.append(counts.unfinished))
        for _ in range(2):
            engine.step()
        counts.clear()
        committing.clear()
        for _ in range(4):
            engine.step()
        assert counts.waits.total() == 4, "one a step"
        assert {kind for kind, _ in counts.waits} == {EVENT}
        assert counts.operations["a graph"] == 4
        return counts.left, committing


@pytest.mark.parametrize("params", [LONG, SAMPLED, replace(SAMPLED, seed=3)], ids=["greedy", "sampled", "seeded"])
@pytest.mark.parametrize("count", [1, 3])
def test_the_device_has_its_next_pass_when_the_host_has_its_tokens(
    both: Both, count: int, params: SamplingParams
) -> None:
    left, committing = watched(both, count, params)
    assert len(left) == 4
    assert min(left + committing) > 0


def test_the_order_before_leaves_the_device_idle(both: Both) -> None:
    """Planted: what the test above would see."""
    left, committing = watched(both, 3, LONG, is_ahead=False)
    assert set(left + committing) == {0}


def found(target: Any, each: list[SamplingParams], **options: Any) -> list[list[int]]:
    engine = Engine(target, **{"num_pages": 64, **options})
    results = list(engine.generate(random_prompts(len(each), longest=20, seed=1), each))
    engine.check_integrity()
    return [result.token_ids for result in results]


@pytest.mark.parametrize("options", [{}, {"num_pages": 12, "page_size": 4}, {"max_running": 2}], ids=str)
def test_tokens_are_the_cpus(both: Both, options: dict[str, Any]) -> None:
    """Of requests that end by length and unforeseen, greedy and sampled, some of which come when others have ended."""
    (long,) = found(both.here.target, [replace(GREEDY, max_tokens=9)])
    stopping = replace(GREEDY, max_tokens=9, stop_token_ids=(long[4],))
    each = [stopping, replace(SEEDED, max_tokens=7), GREEDY, SEEDED]
    expected = found(both.here.target, each, **options)
    with pretended() as counts:
        assert found(both.target, each, **options) == expected
    assert counts.replayed["_attention_kernel"] > 0


def test_tokens_that_are_read_before_they_came_are_seen(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the host does not wait for the event behind the copy."""
    expected = found(both.here.target, [GREEDY])
    recorded = SimpleNamespace(synchronize=lambda: None)
    with pretended():
        assert found(both.target, [GREEDY]) == expected
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(record_event=lambda: recorded))
        assert found(both.target, [GREEDY]) != expected
