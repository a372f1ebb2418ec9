"""Coordinate the processes of one run under torchrun. Each takes a share of every step's documents."""

import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from volley.memory.device import usable_device

T = TypeVar("T")


class Ranks:
    """This process among ``world`` processes. With one process, methods exchange nothing."""

    def __init__(self, device: str) -> None:
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.device = usable_device(device)
        if self.device.type == "cuda" and self.world > 1:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if self.device.type == "cuda" and self.world > 1:
            torch.cuda.set_device(self.device)
        self._owns_group = self.world > 1 and not dist.is_initialized()
        if self._owns_group:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T], rank: int | None = None) -> list[T]:
        """Return every ``world``-th item, starting at this rank (or at ``rank``)."""
        return list(items[self.rank if rank is None else rank :: self.world])

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients over all processes in one exchange."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.world > 1:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def sum(self, value: float) -> float:
        """Return the sum of ``value`` over all processes."""
        return self._exchange(value, dist.all_reduce) if self.world > 1 else value

    def from_first(self, value: float) -> float:
        """Return the first process's ``value``, so that all processes decide by one clock."""
        return self._exchange(value, lambda shared: dist.broadcast(shared, 0)) if self.world > 1 else value

    def any(self, wanted: bool) -> bool:
        """Return True if ``wanted`` is true in any process."""
        return self.sum(float(wanted)) > 0

    def all_see(self, value: float) -> bool:
        """Return True if ``value`` is equal in all processes."""
        return self.sum(abs(value - self.from_first(value))) == 0

    def _exchange(self, value: float, collective: Any) -> float:
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        collective(shared)
        return float(shared.item())

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()

    def close(self) -> None:
        if self._owns_group:
            dist.destroy_process_group()
