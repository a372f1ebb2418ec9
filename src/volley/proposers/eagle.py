"""Draft with an EAGLE-3 drafter: one pass of its layer for each token of a chain, for all requests together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from volley.config import DraftingConfig
from volley.decode.sampling import best_tokens
from volley.decode.work import Drafted, Work, Works
from volley.errors import ConfigError
from volley.memory.batch import RaggedBatch, Segment
from volley.models.drafters.eagle_model import EagleModel
from volley.models.targets.rehearsal import context_of, fastest, made_up, spread
from volley.proposers.autoregressive import ChainProposer


@dataclass
class _Chain:
    """Position of the next token of a request's draft, and the state ``[H]`` that predicts it."""

    position: int
    state: Tensor


class EagleProposer(ChainProposer):
    def __init__(self, model: EagleModel, config: DraftingConfig) -> None:
        self.model, self.vocab_size, self.device = model, model.drafter.config.vocab_size, model.device
        self.block_size = model.block_size
        self.configure(config)
        self._chains: dict[int, _Chain] = {}
        self._seconds: dict[int, tuple[float, float]] = {}

    def configure(self, config: DraftingConfig) -> None:
        if config.denoising_steps > 1:
            raise ConfigError(
                f"denoising_steps is {config.denoising_steps}, and an EAGLE-3 drafter writes token by token; use 1"
            )

    def open(self, works: Works) -> list[Work[Any]]:
        states = self.model.eagle.fused_states(torch.stack([work.request.tapped for work in works]))
        self._chains = {
            work.request.request_id: _Chain(work.request.length - 2, state)
            for work, state in zip(works, states, strict=True)
        }
        return list(works)

    def read(self, requests: Sequence[Drafted], token_ids: list[int]) -> Tensor:
        chains = [self._chains[request.request_id] for request in requests]
        segments = [
            Segment(request.draft_table, chain.position, 1) for request, chain in zip(requests, chains, strict=True)
        ]
        batch, _ = RaggedBatch.on_device(segments, token_ids, [0], self.model.device)
        logits, states = self.model.advance(batch, self.model.store, torch.stack([chain.state for chain in chains]))
        for chain, state in zip(chains, states, strict=True):
            chain.position, chain.state = chain.position + 1, state
        return logits

    @torch.inference_mode()
    def seconds(self, tokens: int, requests: int) -> float:
        """Measure the seconds of all steps of the chains, and of the draft K/V of one token of each request."""
        if requests not in self._seconds:
            model, eagle = self.model, self.model.eagle
            lengths = spread(requests, requests)
            context = context_of(lengths, eagle.rotary.length)
            batch, store = made_up(lengths, eagle.kv_shapes, model.dtype, model.device, causal=True, context=context)
            tapped = torch.zeros(requests, eagle.fc.in_features, dtype=model.dtype, device=model.device)
            states = eagle.fused_states(tapped)
            embeddings = eagle.embed(batch.token_ids, model.embed)
            self._seconds[requests] = (
                fastest(lambda: best_tokens(model.advance(batch, store, states)[0]), model.device),
                fastest(
                    lambda: eagle.keys_values(embeddings, eagle.fused_states(tapped), batch.positions), model.device
                ),
            )
        step, making = self._seconds[requests]
        return (-(-tokens // requests) - 1) * step + making
