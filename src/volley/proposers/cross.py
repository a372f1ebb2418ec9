"""Draft with a drafter that attends to the target's K/V, read from the pages of each request."""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from volley.config import DraftingConfig
from volley.decode.denoise import denoise
from volley.decode.sampling import confidences
from volley.decode.work import Proposal, Works
from volley.memory.batch import Segment
from volley.memory.kv_store import KVStore
from volley.models.drafters.cross import MASK, CrossDrafter
from volley.models.targets.rehearsal import context_of, fastest, made_up, spread
from volley.models.targets.target import Target
from volley.proposers.base import Proposer

Context = list[tuple[Tensor, Tensor]]
"""K and V ``[1, kv_heads, n, d]`` of the tokens before a block, for each layer of the drafter."""


class CrossProposer(Proposer):
    """Drafts chains. Sampled requests compare them with the target's own draws."""

    def __init__(self, drafter: CrossDrafter | str | Path, target: Target) -> None:
        """Draft for ``target`` with ``drafter``, or the one in that folder."""
        if not isinstance(drafter, CrossDrafter):
            drafter = CrossDrafter.from_pretrained(drafter, target.dtype)
        drafter.config.check_target(
            hidden_size=target.hidden_size, vocab_size=target.vocab_size, num_layers=target.num_layers
        )
        drafter.check_kv(target.kv_shapes, target.num_layers)
        self.drafter, self.target = drafter.to(target.device, target.dtype).eval(), target
        self.block_size = drafter.config.block_size
        self._config, self._store = DraftingConfig(), target.make_store("auto", 1)

    def configure(self, config: DraftingConfig) -> None:
        self._config = config

    def use_store(self, store: KVStore) -> None:
        self._store = store
        self.drafter.rotary.cover(self.target.context_length + self.block_size)

    def propose(self, works: Works, *, with_confidence: bool) -> float:
        blocks = [torch.tensor([work.request.anchor] + [MASK] * work.spec.positions) for work in works]
        segments = [
            Segment(work.request.draft_table, work.request.length - 1, len(block), causal=False)
            for work, block in zip(works, blocks, strict=True)
        ]
        contexts = [self._context(segment, self._store) for segment in segments]
        first = denoise(
            blocks,
            self._config.denoising_steps,
            self._config.denoising_schedule,
            lambda indices: torch.cat([self._logits(blocks[i], segments[i].start, contexts[i]) for i in indices]),
            lambda _, logits: logits.argmax(dim=-1),
            self._config.denoising_threshold,
        )
        sure = torch.split(confidences(first), [len(block) - 1 for block in blocks])
        for work, block, own in zip(works, blocks, sure, strict=True):
            work.proposal = Proposal(block[1:].tolist(), confidence=own.tolist() if with_confidence else [])
        return 0.0

    def _context(self, segment: Segment, store: KVStore) -> Context:
        """Read the target's K/V before a segment, decoded if the store is quantised."""
        window = self.drafter.config.window_for(self._config.draft_window) or segment.start
        first = max(segment.table.earliest, segment.start - window)
        both = [store.extract(i, segment.table, first, segment.start) for i in self.drafter.config.target_layer_ids]
        return [(keys.transpose(0, 1)[None], values.transpose(0, 1)[None]) for keys, values in both]

    def _logits(self, block: Tensor, start: int, context: Context) -> Tensor:
        """Return logits ``[k, V]`` of the draft positions of one block."""

        def attend(layer: int, queries: Tensor) -> Tensor:
            mixed = scaled_dot_product_attention(queries.transpose(1, 2), *context[layer], enable_gqa=True)
            return mixed.transpose(1, 2)

        token_ids = block.to(self.target.device)
        positions = torch.arange(start, start + len(block), device=token_ids.device)
        embeddings = self.target.embed(token_ids.clamp(min=0))
        states = self.drafter.denoise(embeddings[None], (token_ids == MASK)[None], positions[None], attend)
        return self.target.head(states[0, 1:])

    @torch.inference_mode()
    def seconds(self, tokens: int, requests: int) -> float:
        sizes = spread(max(tokens, 2 * requests), requests)
        context = context_of(sizes, self.drafter.rotary.length)
        target = self.target
        batch, store = made_up(sizes, target.kv_shapes, target.dtype, target.device, causal=False, context=context)

        def draft() -> None:
            for segment in batch.segments:
                block = torch.tensor([0] + [MASK] * (segment.length - 1))
                self._logits(block, segment.start, self._context(segment, store)).argmax(dim=-1)

        return self._config.denoising_steps * fastest(draft, target.device)
