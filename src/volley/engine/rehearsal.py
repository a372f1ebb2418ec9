"""Times passes of the target on made-up text, for cost tables."""

import torch

from volley.decode.sampling import best_tokens
from volley.models.draft_model import DraftModel
from volley.models.rehearsal import CONTEXT, fastest, made_up, spread
from volley.models.target import Target


class Rehearsal:
    def __init__(self, target: Target, model: DraftModel | None) -> None:
        self._target, self._model = target, model

    def target(self, tokens: int, requests: int) -> float:
        """Seconds of one target pass over ``tokens``, spread over ``requests``, all of them verified and one of each injected."""
        target, model, lengths = self._target, self._model, spread(tokens, requests)
        context = min(CONTEXT, max(0, target.context_length - max(lengths)))
        shapes, device = target.kv_shapes, target.device
        batch, store = made_up(lengths, shapes, target.dtype, device, causal=True, context=context)
        rows = torch.arange(len(batch), device=device)[-tokens:]
        width = 0 if model is None else model.drafter.fc.in_features
        features = torch.zeros(requests, width, dtype=target.dtype, device=device)

        def run() -> None:
            best_tokens(target.forward(batch, store, rows))
            if model is not None:
                model.drafter.context_kv(features, batch.positions[:requests])

        return fastest(run)
