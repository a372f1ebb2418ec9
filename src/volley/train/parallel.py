"""The processes of one run under torchrun: each takes a share of every step's documents."""

import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


class Ranks:
    """This process among ``world``; with one process every method is free."""

    def __init__(self, device: str) -> None:
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.world > 1:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
        self._owns_group = self.world > 1 and not dist.is_initialized()
        if self._owns_group:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """Every ``world``-th item, starting with this rank's."""
        return list(items[self.rank :: self.world])

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up gradients over all processes in one exchange."""
        if self.world == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def sum(self, values: Tensor) -> Tensor:
        """The sum of ``values`` over all processes."""
        if self.world > 1:
            values = values.to(self.device)
            dist.all_reduce(values)
        return values.cpu()

    def from_first(self, value: float) -> float:
        """The first process's ``value``: clocks differ, decisions must not."""
        if self.world == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, 0)
        return float(shared.item())

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()

    def close(self) -> None:
        if self._owns_group:
            dist.destroy_process_group()
