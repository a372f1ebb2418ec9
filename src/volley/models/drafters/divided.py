"""Drafter divided over the processes of a divided target (tensor parallelism): every rank drafts with its heads and its share
of the MLP.

Projections to heads and to the MLP's inner width are divided by rows, those back by columns, and their outputs are summed over
the ranks. Norms, the projection of features and a sequential head are whole everywhere. Rank 0 tells the others of each pass
(:class:`Order`), and sends them the target's features of accepted tokens.
"""

from dataclasses import dataclass, replace
from itertools import count
from typing import Any, cast
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn

from volley.config import KVDtype
from volley.memory.attention import Attention
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_store import KVStore, make_store
from volley.models.checkpoints.checkpoint import DrafterConfig
from volley.models.drafters.draft_model import DraftModel
from volley.models.drafters.drafter import Drafter, DraftLayer
from volley.models.layers.empty_weights import empty_weights
from volley.models.targets.sharded import Order, ShardedTarget

_ROWS = ("q_proj.", "k_proj.", "v_proj.", "gate_proj.", "up_proj.")
_COLUMNS = ("o_proj.", "down_proj.")
_numbers = count()


def divides(config: DrafterConfig, world: int) -> bool:
    """Return whether ``world`` ranks can divide a drafter of this shape."""
    sizes = (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size)
    return config.eagle is None and not any(size % world for size in sizes)


class DrafterPart(Drafter):
    """One rank's part of a drafter. Its passes add up over all ranks."""

    whole: DrafterConfig
    weights: dict[str, Tensor]
    """Config and weights of the whole drafter, on the CPU; rank 0 has them until the others do."""


def part_of(config: DrafterConfig, state: dict[str, Tensor], rank: int, world: int) -> DrafterPart:
    """Return a rank's part of the drafter with the weights ``state``."""
    own = replace(
        config,
        num_attention_heads=config.num_attention_heads // world,
        num_key_value_heads=config.num_key_value_heads // world,
        intermediate_size=config.intermediate_size // world,
    )
    with empty_weights():
        drafter = DrafterPart(own)
    drafter.load_state_dict({name: _share(name, x, rank, world) for name, x in state.items()}, assign=True)
    for layer in cast(list[DraftLayer], list(drafter.layers)):
        layer.self_attn.o_proj.register_forward_hook(sum_over_ranks)
        layer.mlp.down_proj.register_forward_hook(sum_over_ranks)
    return drafter.eval().requires_grad_(False)


def part_for(drafter: Drafter, target: object) -> Drafter:
    """Return rank 0's part of ``drafter`` for a divided target; ``drafter`` itself if it is not to be or cannot be divided."""
    if not isinstance(target, ShardedTarget) or not divides(drafter.config, target.world):
        return drafter
    state = {name: x.detach() for name, x in drafter.state_dict().items()}
    part = part_of(drafter.config, state, target.rank, target.world)
    part.folder, part.whole = drafter.folder, drafter.config
    part.weights = {name: x.cpu() for name, x in state.items()}
    return part


def _share(name: str, weight: Tensor, rank: int, world: int) -> Tensor:
    if any(part in name for part in _ROWS):
        return weight.chunk(world)[rank].clone()
    if any(part in name for part in _COLUMNS):
        return weight.chunk(world, dim=1)[rank].clone() if weight.dim() == 2 else weight / world
    return weight


def sum_over_ranks(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    dist.all_reduce(output)
    return output


@dataclass(frozen=True, slots=True)
class Take(Order):
    """Order to take a part of a drafter, and K/V for it."""

    number: int
    config: DrafterConfig
    state: dict[str, Tensor]
    kv_dtype: KVDtype
    num_slots: int
    num_positions: int
    window: int | None

    def obey(self, target: ShardedTarget, held: dict[int, Any]) -> None:
        with torch.inference_mode(False):  # weights that came in inference mode have no version, which caches look at
            state = {name: x.clone().to(target.device) for name, x in self.state.items()}
            drafter = part_of(self.config, state, target.rank, target.world)
        drafter.head = drafter.confidence_head = None  # rank 0 chooses the tokens
        drafter.rotary.cover(self.num_positions)
        store = make_store(self.kv_dtype, drafter.kv_shapes, self.num_slots, target.dtype, target.device)
        held[self.number] = DraftModel(drafter, store, target.attention, target.embed, target.head, self.window)


@dataclass(frozen=True, slots=True)
class Keep(Order):
    """Order to make K/V from features ``[T, taps · H]``, which rank 0 sends next."""

    number: int
    positions: list[int]
    kv_slots: list[int]

    def obey(self, target: ShardedTarget, held: dict[int, Any]) -> None:
        model: DraftModel = held[self.number]
        features = torch.empty(
            len(self.positions), model.drafter.fc.in_features, dtype=model.dtype, device=target.device
        )
        dist.broadcast(features, 0)
        positions, kv_slots = torch.tensor([self.positions, self.kv_slots], device=target.device)
        model.keep(features, positions, kv_slots)


@dataclass(frozen=True, slots=True)
class Draft(Order):
    """Order to run blocks with the K/V of a drafter, or with temporary ones of ``num_slots``."""

    number: int
    segments: list[Segment]
    token_ids: list[int]
    num_slots: int | None

    def obey(self, target: ShardedTarget, held: dict[int, Any]) -> None:
        model: DraftModel = held[self.number]
        store = model.store
        if self.num_slots is not None:
            store = make_store("auto", model.drafter.kv_shapes, self.num_slots, target.dtype, target.device)
        batch = RaggedBatch(self.segments, torch.tensor(self.token_ids, device=target.device))
        model.block_states(batch, store)


@dataclass(frozen=True, slots=True)
class Forget(Order):
    """Order to drop a drafter."""

    number: int

    def obey(self, target: ShardedTarget, held: dict[int, Any]) -> None:
        del held[self.number]


class DividedModel(DraftModel):
    """Rank 0's part of a divided drafter, which also gives the orders."""

    is_regular = False

    def __init__(
        self,
        part: DrafterPart,
        store: KVStore,
        attention: Attention,
        target: ShardedTarget,
        kv_dtype: KVDtype,
        window: int | None,
    ) -> None:
        """Bind rank 0's part, with K/V of ``kv_dtype`` in ``store``, and give the others theirs."""
        super().__init__(part, store, attention, target.embed, target.head, window)
        self._target, self._number = target, next(_numbers)
        shape, weights = part.whole, part.weights
        part.weights = {}
        with target.ordered(Take(self._number, shape, weights, kv_dtype, store.num_slots, part.rotary.length, window)):
            pass
        finalize(self, target.order_later, Forget(self._number))

    def keep(self, features: Tensor, positions: Tensor, kv_slots: slice | Tensor) -> None:
        slots = range(kv_slots.start, kv_slots.stop) if isinstance(kv_slots, slice) else kv_slots.tolist()
        with self._target.ordered(Keep(self._number, positions.tolist(), list(slots))):
            features = features.to(self.dtype).contiguous()
            dist.broadcast(features, 0)
            super().keep(features, positions, kv_slots)

    def block_states(self, batch: RaggedBatch, store: KVStore) -> Tensor:
        num_slots = None if store is self.store else store.num_slots
        with self._target.ordered(Draft(self._number, batch.segments, batch.token_ids.tolist(), num_slots)):
            return super().block_states(batch, store)
