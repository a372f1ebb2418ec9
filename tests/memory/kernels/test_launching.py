"""Kernels are started where their tensors are, and graphs captured in order."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.memory.kernels import DEVICE
from volley.memory.kernels.launching import capture, launch, leaves_idle, num_processors


class Recorded:
    def __init__(self) -> None:
        self.calls: list[object] = []

    def __getitem__(self, grid: tuple[int, ...]):  # type: ignore[no-untyped-def]
        return lambda *arguments, **constants: self.calls.append((grid, arguments, constants))


def test_a_cpu_is_one_processor() -> None:
    assert num_processors(torch.device("cpu")) == 1
    assert leaves_idle(1, torch.device("cpu"))
    assert not leaves_idle(2, torch.device("cpu"))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of PyTorch, whose parts for a GPU only note them."""
    seen: list[str] = []

    class Stream:
        device_index = 7

        def __init__(self, name: Any = "beside") -> None:
            self.name = name if isinstance(name, str) else "beside"

        def wait_stream(self, other: "Stream") -> None:
            seen.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def entered(*given: Any, **settings: Any) -> Any:
        names = [str(own.name if isinstance(own, Stream | Graph) else own) for own in given]
        seen.append(f"in {' '.join(names)} {settings.get('pool', '')}".strip())
        yield

    class Graph:
        name = "graph"

        def replay(self) -> None:
            seen.append("replay")

    for name, fake in {
        "device": entered,
        "stream": entered,
        "graph": entered,
        "Stream": Stream,
        "current_stream": lambda _: Stream("current"),
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: "pool",
        "set_stream": lambda stream: seen.append(f"back to {stream.name}"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    left = {"_cuda_endAllocateToPool": lambda device, pool: seen.append(f"out of {pool} of {device}")}
    for name, fake in left.items():
        monkeypatch.setattr(torch._C, name, fake, raising=False)
    return seen


def test_a_kernel_gets_its_grid_and_arguments_on_the_device_of_its_tensors(seen: list[str]) -> None:
    kernel = Recorded()
    launch(kernel, (2, 3), torch.device("cpu"), "x", SIZE=4)
    assert seen == []
    launch(kernel, (3,), torch.device("cuda:1"))
    assert seen == ["in cuda:1"]
    assert kernel.calls == [((2, 3), ("x",), {"SIZE": 4}), ((3,), (), {})]


def test_a_graph_is_captured_after_two_runs_beside(seen: list[str]) -> None:
    """The calls that PyTorch's documentation asks for, in their order; what they do is seen on a GPU alone."""
    replay = capture(lambda: seen.append("run"), torch.device("cuda", 7))
    assert replay is not None
    replay()
    assert seen == [
        "in cuda:7",
        "beside waits for current",
        "in beside",
        "run",
        "run",
        "current waits for beside",
        "in graph pool",
        "run",
        "replay",
    ]


@pytest.mark.parametrize("captures", [True, False])
def test_a_pass_that_is_not_captured_leaves_the_stream_and_the_memory_of_graphs(
    seen: list[str], captures: bool
) -> None:
    """A library may refuse the capture, or there may be no memory for the runs before it."""

    def run() -> None:
        if not captures or "in graph pool" in seen:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.warns(UserWarning, match="operation by operation: operation not permitted"):
        assert capture(run, torch.device("cuda", 8 + captures)) is None  # a device keeps its stream
    assert seen[-3:] == ["back to current", "out of pool of 7", "current waits for beside"]


def test_a_cpu_runs_what_it_would_capture() -> None:
    def run() -> None: ...

    assert capture(run, torch.device("cpu")) is run


@pytest.mark.skipif(DEVICE.type != "cuda", reason="captures for real")
def test_a_replay_reads_memory_as_it_is_now() -> None:
    source, target = torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE)
    replay = capture(lambda: target.copy_(source * 2), DEVICE)
    assert replay is not None
    source.fill_(5)
    replay()
    assert target.tolist() == [10, 10, 10, 10]
