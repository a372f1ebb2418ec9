"""A drafter at work: its K/V, its adapters, and what it borrows from its target. One class serves volley's engine and others'."""

from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from volley.errors import MismatchError
from volley.memory.attention import Attention, AttentionOptions
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_store import KVStore
from volley.models.accelerate import accelerate
from volley.models.adapter import Adapter, adapted, drafter_fingerprint
from volley.models.drafter import Drafter, Projection
from volley.models.fused import FusedDecoder
from volley.models.heads import BoundHead
from volley.models.inject import Injection
from volley.models.target import Target


class DraftModel:
    def __init__(
        self,
        drafter: Drafter,
        store: KVStore,
        attention: Attention,
        embed: Projection,
        head: Projection,
        output: Callable[[], Tensor],
        window: int | None = None,
    ) -> None:
        """``embed`` gives the target's embeddings, ``head`` its logits, ``output()`` the head's matrix ``[V, H]``; with a
        ``window`` a block sees only so many tokens before it.
        """
        config = drafter.config
        self.drafter, self.store, self.embed, self.head = drafter, store, embed, head
        self.windows = drafter.windows(window)
        self._attention = attention
        self._decoders: WeakKeyDictionary[Drafter, FusedDecoder] = WeakKeyDictionary()
        self._injection = Injection(drafter, store)
        self.bound_head: BoundHead | None = None
        if drafter.head is not None and config.head is not None:
            vocabulary = torch.arange(config.vocab_size, device=self.device)
            embeddings = embed(vocabulary).detach()
            self.bound_head = BoundHead(drafter.head, config.head.candidates, embeddings, output(), drafter.drafted)

    @property
    def device(self) -> torch.device:
        return self.drafter.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.drafter.fc.weight.dtype

    def load_adapter(self, path: Path | str) -> Adapter:
        """The drafter with the adapter in folder ``path``; both keep their K/V in the same store."""
        drafter = adapted(self.drafter, path)
        digest = bytes.fromhex(drafter_fingerprint(drafter))
        accelerate(drafter)
        drafter.fuse()
        return Adapter(drafter, Injection(drafter, self.store), digest)

    def keep(self, features: Tensor, positions: Tensor, kv_slots: slice | Tensor, adapter: Adapter | None) -> None:
        """Project the target's features ``[T, taps · H]`` of tokens that stay into K/V at ``kv_slots [T]``."""
        injection = self._injection if adapter is None else adapter.injection
        injection(features, positions, kv_slots)

    def states(self, segments: list[Segment], token_ids: Tensor, adapter: Adapter | None = None) -> Tensor:
        """Final states ``[Σ k, H]`` of the draft positions of blocks ``token_ids [Σ 1 + k]``, each an anchor and masks.

        A drafter that samples from the anchor has a mask fewer in each block, and the anchor's state is the first position's.
        A block's own K/V are scratch behind those of its context.
        """
        batch = RaggedBatch(segments, token_ids.to(self.device))
        states = self.block_states(batch, self.store, adapter)
        if self.drafter.config.sample_from_anchor:
            return states
        if len(segments) == 1:
            return states[1:]
        keep = torch.ones(len(batch), dtype=torch.bool)
        keep[batch.offsets[:-1]] = False
        return states[keep.to(states.device)]

    def block_states(self, batch: RaggedBatch, store: KVStore, adapter: Adapter | None = None) -> Tensor:
        """Final states ``[T, H]`` of every token of ``batch``, whose contexts' K/V are in ``store``."""
        drafter = self.drafter if adapter is None else adapter.drafter
        scale = drafter.config.head_dim**-0.5

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._attention(batch, store, layer, q, k, v, AttentionOptions(scale, self.windows[layer]))

        embeddings, decoder = drafter.embed(batch.token_ids, self.embed), self._decoder(drafter)
        if decoder is not None and decoder.serves(store):
            cos, sin = drafter.rotary(batch.positions, embeddings.dtype)
            normed: Tensor = drafter.norm(decoder(embeddings, (cos[:, 0], sin[:, 0]), batch, store))
            return normed
        states: Tensor = drafter(embeddings, batch.positions, attend)
        return states

    def _decoder(self, drafter: Drafter) -> FusedDecoder | None:
        if drafter.fused is None:
            return None
        if drafter not in self._decoders:
            self._decoders[drafter] = FusedDecoder(*drafter.fused, self.windows)
        return self._decoders[drafter]

    def logits(self, states: Tensor) -> Tensor:
        """Logits ``[R, V]`` of final states ``[R, H]``."""
        return self.drafter.logits(states, self.head)


def check_pair(drafter: Drafter, target: Target) -> None:
    """Refuse a drafter that was trained for another target, or a target that no drafter can follow."""
    if not target.can_be_tapped:
        raise MismatchError(
            f"{type(target).__name__} denoises canvases and gives a drafter no states of its layers; leave the drafter out, and "
            "use DiffusionParams(mode='self') for drafts of its own"
        )
    drafter.config.check_target(
        hidden_size=target.hidden_size, vocab_size=target.vocab_size, num_layers=target.num_layers
    )
