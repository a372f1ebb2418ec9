"""Runs the target for one step: one ragged pass over known and drafted tokens."""

import weakref
from collections.abc import Sequence

import torch

from volley.engine.recurrent import RecurrentStates
from volley.engine.step import Step
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_store import KVStore
from volley.models.taps import Taps
from volley.models.target import Target


class Runner:
    def __init__(
        self,
        target: Target,
        store: KVStore,
        tapped_layers: Sequence[int] = (),
        recurrent: RecurrentStates | None = None,
    ) -> None:
        """The hidden states of ``tapped_layers`` are kept for the drafter."""
        self.target, self.store, self.recurrent = target, store, recurrent
        self._taps = Taps(target.model, tapped_layers) if tapped_layers else None
        if self._taps is not None:
            weakref.finalize(self, self._taps.close)  # a target outlives the engines made on it

    def forward(self, step: Step) -> None:
        """The pass of a step: fills in its batch, its logits, each work's rows and the tapped features."""
        segments: list[Segment] = []
        tokens: list[int] = []
        rows: list[int] = []
        with step.timings.count("verify"):
            for work in step.works:
                procedure = work.request.procedure
                own, segment = procedure.segment(work)
                segments.append(segment)
                tokens += own
                first, wanted = len(rows), procedure.num_rows(work)
                rows += range(len(tokens) - wanted, len(tokens))
                work.rows = slice(first, len(rows))
            device = self.target.device
            step.batch = RaggedBatch(segments, torch.tensor(tokens, device=device))
            if self.recurrent is not None:
                step.recurrent = self.recurrent.start(step.batch, step.works)
            choosing = torch.tensor(rows or [0], device=device)
            logits = self.target.forward(step.batch, self.store, choosing, step.recurrent)
            step.logits = logits[: len(rows)]
            if self._taps is not None:
                step.features = self._taps.take()[0]
