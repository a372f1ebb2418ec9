"""The processes of one run under torchrun: each takes a share of every step's documents."""

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from volley.errors import ConfigError
from volley.memory.device import usable_device

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

T = TypeVar("T")


class Ranks:
    """This process among ``world``; with one process every method is free."""

    def __init__(self, device: str, sharded: bool = False) -> None:
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.sharded = sharded
        self.device = usable_device(device)
        if self.device.type == "cuda" and self.world > 1:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if sharded and "WORLD_SIZE" not in os.environ:
            raise ConfigError("fsdp shards over the processes of torchrun; start with `torchrun -m volley.cli train …`")
        if self.device.type == "cuda" and self.world > 1:
            torch.cuda.set_device(self.device)
        self._owns_group = (self.world > 1 or sharded) and not dist.is_initialized()
        if self._owns_group:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T], rank: int | None = None) -> list[T]:
        """Every ``world``-th item, starting with this rank's (or with ``rank``'s)."""
        return list(items[self.rank if rank is None else rank :: self.world])

    def shard(self, model: nn.Module) -> None:
        """Spread the weights of ``model`` over all processes (FSDP2), if the run asks for it."""
        if self.sharded:
            from torch.distributed.fsdp import fully_shard

            fully_shard(model)

    def reshard(self, model: nn.Module) -> None:
        """Give each process its part of the weights again, which a pass without gradients leaves whole."""
        if self.sharded:
            cast("FSDPModule", model).reshard()

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up gradients over all processes in one exchange; sharded ones already come averaged."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.sharded:
            for gradient in gradients:
                gradient.mul_(self.world)
        elif self.world > 1:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def sum(self, value: float) -> float:
        """The sum of ``value`` over all processes."""
        return self._exchange(value, dist.all_reduce) if self.world > 1 else value

    def from_first(self, value: float) -> float:
        """The first process's ``value``, so that all processes decide by one clock."""
        return self._exchange(value, lambda shared: dist.broadcast(shared, 0)) if self.world > 1 else value

    def any(self, wanted: bool) -> bool:
        """Return whether any process wants it."""
        return self.sum(float(wanted)) > 0

    def all_see(self, value: float) -> bool:
        """Return whether every process has the first one's ``value``."""
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
