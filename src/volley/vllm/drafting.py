"""Drafter that stores its K/V in the same slots as vLLM stores the target's.

Shared slots make prefix caching, preemption and the end of a request correct without bookkeeping: the drafter's K/V of a position
exist exactly as long as the target's. Each slot records the token it was written for. If a slot records another token or none,
the drafter has not seen the position; vLLM may have loaded its K/V from elsewhere.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from volley.config import DraftingConfig
from volley.decode.rules import TokenRule
from volley.decode.sampling import PositionNoise
from volley.memory.kernels import attention_for
from volley.memory.kv_cache import BlockTable
from volley.memory.kv_store import make_store
from volley.models.drafters.draft_model import DraftModel
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.heads import Projection
from volley.models.drafters.pilot import largest_block
from volley.params import SamplingParams
from volley.proposers.block import BlockProposer
from volley.vllm.passes import IntArray, Tokens

GREEDY = SamplingParams()
UNUSED = PositionNoise(0)


class SlotTable(BlockTable):
    """Block table with slots chosen by another engine: position p is in slot ``where[p]``."""

    __slots__ = ("_where",)

    def __init__(self, where: IntArray) -> None:
        super().__init__(1)
        self.pages = where.tolist()
        self._where = where

    @property
    def is_consecutive(self) -> bool:
        """Return False: the slots of a block are separate from those of its context."""
        return False

    def slot_array(self, start: int, end: int) -> IntArray:
        return self._where[start:end]


@dataclass(slots=True)
class SlotRequest:
    """Request in one pass, for drafting. vLLM does not report which requests are sampled, so all count as greedy."""

    request_id: int
    anchor: int
    length: int
    draft_table: BlockTable
    params: SamplingParams = GREEDY
    noise: PositionNoise = UNUSED
    rules: tuple[TokenRule, ...] = ()


class SlotDrafter:
    """Drafter that stores a token's K/V in the slot of the target's. Only blocks being drafted have slots of their own."""

    def __init__(
        self, drafter: Drafter, config: DraftingConfig, embed: Projection, head: Projection, max_requests: int
    ) -> None:
        self.drafter, self.config, self.embed, self.head = drafter, config, embed, head
        self.block_size = largest_block(config, drafter.config.block_size, drafter.folder)
        self._num_scratch = max_requests * self.block_size
        self.token_ids = np.empty(0, dtype=np.int32)
        """Token whose K/V are in each slot; -1: none."""

    def reserve(self, num_slots: int) -> None:
        """Allocate K/V for ``num_slots`` positions, as many as vLLM has; its first pass reports the number."""
        if num_slots == len(self.token_ids):
            return
        drafter, weight = self.drafter, self.drafter.fc.weight
        store = make_store("auto", drafter.kv_shapes, num_slots + self._num_scratch, weight.dtype, weight.device)
        attention, window = attention_for(weight.device), drafter.config.window_for(self.config.draft_window)
        self.token_ids = np.full(num_slots, -1, dtype=np.int32)
        self.model = DraftModel(drafter, store, attention, self.embed, self.head, window)
        self.model.block_size = self.block_size
        self.proposer = BlockProposer(self.model, self.config)

    def inject(self, features: Tensor, positions: IntArray, slots: IntArray, token_ids: Tokens) -> None:
        """Compute the drafter's K/V in ``slots [T]`` from the features ``[T, taps · H]`` of ``token_ids [T]``."""
        where, at = (torch.from_numpy(indices).to(self.model.device) for indices in (slots, positions))
        self.model.keep(features, at, where)
        self.token_ids[slots] = token_ids

    def has_seen(self, slots: IntArray, token_ids: Tokens) -> bool:
        """Return whether the whole context that a block after ``token_ids [n]`` in ``slots [n]`` attends to has been injected."""
        windows = [len(slots) if window is None else window for window in self.model.windows]
        first = max(0, len(slots) - max(windows))
        return bool((self.token_ids[slots[first:]] == token_ids[first:]).all())

    def request(self, index: int, request_id: int, context: IntArray, anchor: int) -> SlotRequest:
        """Return the ``index``-th drafting request of a pass; its tokens before ``anchor`` are in slots ``context [n]``."""
        scratch = len(self.token_ids) + index * self.block_size + np.arange(self.block_size)
        return SlotRequest(request_id, anchor, len(context) + 1, SlotTable(np.concatenate((context, scratch))))
