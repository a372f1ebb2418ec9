"""Kernels are started where their tensors are."""

import torch

from volley.memory.kernels.launching import launch, num_processors


class Recorded:
    def __init__(self) -> None:
        self.calls: list[object] = []

    def __getitem__(self, grid: tuple[int, ...]):  # type: ignore[no-untyped-def]
        return lambda *arguments, **constants: self.calls.append((grid, arguments, constants))


def test_a_kernel_gets_its_grid_and_arguments() -> None:
    kernel = Recorded()
    launch(kernel, (2, 3), torch.device("cpu"), "x", SIZE=4)
    assert kernel.calls == [((2, 3), ("x",), {"SIZE": 4})]
    assert num_processors(torch.device("cpu")) == 1
