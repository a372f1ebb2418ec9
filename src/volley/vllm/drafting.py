"""The drafter on vLLM's slots: features go where vLLM keeps the same token's K/V, blocks are drafted for all requests at once.

Sharing vLLM's slots makes prefix caching, preemption and the end of a request right without any bookkeeping: the drafter's K/V of
a position are there exactly as long as the target's. A slot remembers the token it was written for; where another token stands,
or none, the drafter has not seen the position (vLLM may have loaded its K/V from elsewhere).
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from volley.decode.denoise import denoise
from volley.decode.propose import propose_greedy
from volley.decode.sampling import best_tokens, confidences
from volley.decode.walk import walk_greedy
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kernels import attention_for
from volley.memory.kv_cache import BlockTable
from volley.memory.kv_store import KVStore, make_store
from volley.models.blocks import block_states, without_anchors
from volley.models.drafter import Drafter
from volley.models.heads import BoundHead
from volley.models.inject import Injection
from volley.types import Proposal
from volley.vllm.options import PluginOptions
from volley.vllm.passes import IntArray, Tokens

_CONTEXT = 128  # tokens before each made-up block that is timed


class SlotTable(BlockTable):
    """Positions whose slots another engine chose: position p lives in slot ``where[p]``."""

    __slots__ = ("_where",)

    def __init__(self, where: IntArray) -> None:
        super().__init__(1)
        self.pages = where.tolist()
        self._runs = 2  # never read as one run: a block's own slots lie elsewhere
        self._where = where

    def slot_array(self, start: int, end: int) -> IntArray:
        return self._where[start:end]


class SlotDrafter:
    """A drafter, its K/V and the target's embedding and head."""

    def __init__(
        self,
        drafter: Drafter,
        options: PluginOptions,
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        max_requests: int,
    ) -> None:
        config, weight = drafter.config, drafter.fc.weight
        self.drafter, self.options, self.embed, self.head = drafter, options, embed, head
        self.dtype, self.device = weight.dtype, weight.device
        self._scratch = max_requests * config.block_size  # slots for the blocks themselves
        self._tokens = np.empty(0, dtype=np.int32)  # which token a slot's K/V are of
        self._attention = attention_for(self.device)
        self._windows = drafter.windows(options.draft_window)
        self.bound_head: BoundHead | None = None
        if drafter.head is not None and config.head is not None:
            vocabulary = torch.arange(config.vocab_size, device=self.device)
            identity = torch.eye(config.hidden_size, dtype=self.dtype, device=self.device)
            output = head(identity).T.contiguous()  # whatever way the engine keeps the head's weight
            self.bound_head = BoundHead(drafter.head, config.head.candidates, embed(vocabulary), output)

    def reserve(self, num_slots: int) -> None:
        """Make room for as many positions as vLLM has, once it has said how many."""
        if num_slots != len(self._tokens):
            self._tokens = np.full(num_slots, -1, dtype=np.int32)
            self._store = make_store("auto", self.drafter.kv_shapes, num_slots + self._scratch, self.dtype, self.device)
            self._injection = Injection(self.drafter, self._store)

    # -- context -------------------------------------------------------------------------------------------------------
    def inject(self, features: Tensor, positions: IntArray, slots: IntArray, token_ids: Tokens) -> None:
        """Features ``[T, taps · H]`` of tokens ``[T]`` become the drafter's K/V in ``slots [T]``."""
        where, at = (torch.from_numpy(x).to(self.device) for x in (slots, positions))
        self._injection(features, at, where)
        self._tokens[slots] = token_ids

    def has_seen(self, slots: IntArray, token_ids: Tokens) -> bool:
        """Whether all that a block after context ``token_ids [n]`` in ``slots [n]`` would look at has been injected."""
        first = 0
        if None not in self._windows:
            first = max(0, len(slots) - max(window for window in self._windows if window is not None))
        return bool((self._tokens[slots[first:]] == token_ids[first:]).all())

    # -- blocks --------------------------------------------------------------------------------------------------------
    def draft(
        self, contexts: Sequence[IntArray], anchors: Sequence[int], sizes: Sequence[int], with_confidence: bool
    ) -> list[Proposal]:
        """The most likely ``sizes`` tokens after each anchor; ``contexts`` are the slots of all positions before it."""
        config, steps = self.drafter.config, self.options.denoising_steps
        segments = []
        for row, (context, size) in enumerate(zip(contexts, sizes, strict=True)):
            first = len(self._tokens) + row * config.block_size
            table = SlotTable(np.concatenate((context, np.arange(first, first + 1 + size))))
            segments.append(Segment(table, len(context), 1 + size, causal=False))
        blocks = [
            torch.tensor([anchor] + [config.mask_token_id] * size) for anchor, size in zip(anchors, sizes, strict=True)
        ]
        if steps > 1:
            logits = denoise(
                blocks,
                steps,
                self.options.denoising_schedule,
                lambda blocks: self._slot_logits(segments, blocks)[0],
                lambda _, rows: rows.argmax(dim=-1),
            )
            proposals = [Proposal(block[1:].tolist()) for block in blocks]
        else:
            logits, hidden = self._slot_logits(segments, blocks)
            if self.bound_head is not None:
                return [walk_greedy(lattice) for lattice in self.bound_head.lattices(hidden, logits, anchors, sizes)]
            proposals = [propose_greedy(tokens) for tokens in _parts(best_tokens(logits), sizes)]
        sure = confidences(logits) if with_confidence else []
        for proposal, own in zip(proposals, _parts(sure, sizes), strict=True):
            proposal.confidence = own
        return proposals

    def _slot_logits(self, segments: list[Segment], blocks: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Logits ``[Σ k, V]`` of every slot after the anchors, and the states ``[Σ k, H]`` they are of."""
        batch = RaggedBatch(segments, torch.cat(blocks).to(self.device))
        hidden = without_anchors(batch, self._states(batch, self._store))
        return self.drafter.logits(hidden, self.head), hidden

    def _states(self, batch: RaggedBatch, store: KVStore) -> Tensor:
        return block_states(self.drafter, batch, store, self._attention, self.embed, self._windows)

    # -- costs ---------------------------------------------------------------------------------------------------------
    def seconds(self, tokens: int, requests: int) -> tuple[float, float]:
        """What the drafter's layers, and the target's head, take for ``tokens`` spread over ``requests``; K/V apart from all."""
        length = -(-tokens // requests)
        tables = [BlockTable(_CONTEXT + length, [index]) for index in range(requests)]
        segments = [Segment(table, _CONTEXT, length, causal=False) for table in tables]
        store = make_store("auto", self.drafter.kv_shapes, requests * (_CONTEXT + length), self.dtype, self.device)
        found = []
        for _ in range(2):  # the first one warms up
            batch = RaggedBatch(segments, torch.zeros(requests * length, dtype=torch.long, device=self.device))
            started = time.perf_counter()
            hidden = self._states(batch, store)
            between = time.perf_counter()
            best_tokens(self.head(hidden))
            found.append((between - started, time.perf_counter() - between))
        body, head = min(found)
        return body, head


def _parts(items: list[Any], sizes: Sequence[int]) -> list[list[Any]]:
    ends = np.cumsum(sizes).tolist()
    return [list(items[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
