"""EAGLE-3 drafter bound to its K/V store and to its target's embedding and head."""

import torch
from torch import Tensor

from volley.memory.attention import Attention, AttentionOptions
from volley.memory.batch import RaggedBatch
from volley.memory.kv_store import KVStore
from volley.models.checkpoints.eagle_format import usual_taps
from volley.models.drafters.draft_model import DraftModel, Inject
from volley.models.drafters.eagle import EagleDrafter
from volley.models.drafters.heads import Projection


class EagleModel(DraftModel):
    """Bound EAGLE-3 drafter. Its K/V at position t depend on token t and the next token."""

    reads_next = True

    def __init__(
        self,
        drafter: EagleDrafter,
        store: KVStore,
        attention: Attention,
        embed: Projection,
        head: Projection,
        window: int | None,
        num_layers: int,
    ) -> None:
        """Bind a drafter; the target's ``num_layers`` choose the taps if the checkpoint names none."""
        self.eagle = drafter
        super().__init__(drafter, store, attention, embed, head, window)
        self.taps = drafter.config.target_layer_ids or usual_taps(num_layers)

    def make_injection(self) -> Inject:
        width = self.eagle.fc.in_features

        def inject(features: Tensor, positions: Tensor, kv_slots: slice | Tensor) -> None:
            tapped, embeddings = features[:, :width], features[:, width:]
            states = self.eagle.fused_states(tapped)
            self.store.write(0, kv_slots, *self.eagle.keys_values(embeddings, states, positions))

        return inject

    def with_next(self, features: Tensor, token_ids: Tensor) -> Tensor:
        """Join features ``[T, 3 · H]`` of tokens and the embeddings of the next tokens ``token_ids [T]``: ``[T, 4 · H]``."""
        return torch.cat([features, self.eagle.embed(token_ids, self.embed)], dim=-1)

    def advance(
        self, batch: RaggedBatch, store: KVStore, states: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return logits ``[T, V]`` after the tokens of ``batch``, and the states ``[T, H]`` that the next step reads; with
        ``rows [R]``, of these tokens alone."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            options = AttentionOptions(self.eagle.config.head_dim**-0.5, self.windows[layer])
            return self._attention(batch, store, layer, q, k, v, options)

        embeddings = self.eagle.embed(batch.token_ids, self.embed)
        own = self.eagle.advance(embeddings, states, batch.positions, attend)
        own = own if rows is None else own[rows]
        normed = self.eagle.norm(own)
        return self.logits(normed), normed if self.eagle.switches.norm_output else own
