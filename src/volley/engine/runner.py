"""Run the target pass of a step: one ragged pass over known and drafted tokens. The runner also times passes."""

import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from volley.decode.sampling import best_tokens
from volley.decode.work import Phase
from volley.engine.recurrent import RecurrentStates
from volley.engine.step import Step
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.graphs import MOST_ROWS, StaticPasses, static_passes
from volley.memory.kv_store import KVStore
from volley.memory.upload import upload_indices
from volley.models.drafters.draft_model import DraftModel
from volley.models.layers.host_memory import trimmed
from volley.models.targets.rehearsal import context_of, fastest, made_up, spread
from volley.models.targets.taps import Taps
from volley.models.targets.target import Target
from volley.models.targets.traits import has_experts


class PassOutputs(NamedTuple):
    """Output of a target pass over T tokens."""

    batch: RaggedBatch
    logits: Tensor
    """Logits ``[R, V]`` of the rows that were asked for."""
    features: Tensor | None
    """Tapped hidden states ``[T, taps · H]``, if there is a drafter."""

    def give(self, step: Step) -> None:
        """Store the outputs in ``step``, with features only if some request of it drafts."""
        step.batch, step.logits, features = self
        step.features = features if step.unsuspended else None

    def only(self, rows: Sequence[int], segments: list[Segment]) -> "PassOutputs":
        """Return the outputs of ``rows``, all of which have logits, as the outputs of ``segments``."""
        batch, features = self.batch, self.features
        given = [batch.token_ids, batch.positions, self.logits, *([] if features is None else [features])]
        if list(rows) != list(range(len(batch))):
            indices = upload_indices(rows, self.logits.device)
            given = [own.index_select(0, indices) for own in given]
        token_ids, positions, logits, *kept = given
        return PassOutputs(RaggedBatch(segments, token_ids, positions), logits, kept[0] if kept else None)


class Runner:
    def __init__(
        self,
        target: Target,
        store: KVStore,
        model: DraftModel | None = None,
        recurrent: RecurrentStates | None = None,
        spare: int = 0,
    ) -> None:
        """Run passes of ``target``. ``model`` is the drafter in use, whose taps read the target's layers.

        ``spare`` is the number of scratch slots at the end of ``store``: one page, or 0. With a scratch page, small passes use
        CUDA graphs if the model allows it. Each request then has at least as many rows as a block, in plain decoding too.
        """
        self.target, self.store, self.recurrent = target, store, recurrent
        self._denoised: RaggedBatch | None = None  # last pass over canvases
        self._taps = taps = None if model is None else Taps(target.model, model.taps)
        if taps is not None:
            weakref.finalize(self, taps.close)  # the target outlives its engines

        def forward(batch: RaggedBatch, rows: Tensor) -> list[Tensor]:
            logits = target.forward(batch, store, rows, taps)
            return [logits] if taps is None else [logits, taps.take()[0]]

        self.passes: StaticPasses | None = None
        """Small passes, as CUDA graphs on a GPU; ``None``: every pass is launched operation by operation."""
        if spare and target.is_regular:
            # Padding rows would load experts that no real row needs.
            least = 1 if model is None or has_experts(target.model.config) else model.drafter.config.block_size
            width, place = target.hidden_size, {"dtype": target.dtype, "device": target.device}
            feedback = torch.zeros(MOST_ROWS, width, **place) if target.takes_feedback else None
            self.passes = static_passes(forward, store, spare, target.device, least, feedback)

    def close(self) -> None:
        """Remove the taps. No step can run afterwards."""
        if self._taps is not None:
            self._taps.close()

    def forward(self, step: Step) -> None:
        """Fill in the step's batch, logits and features, and the logit rows of each work."""
        segments, tokens, rows, on_device = list[Segment](), list[int](), list[int](), dict[int, Tensor]()
        with step.timings.count("verify"):
            for work in step.works:
                procedure = work.request.procedure
                own, segment = procedure.segment(work)
                segments.append(segment)
                tokens += own
                if (draft := work.proposal.on_device) is not None:
                    on_device[len(tokens) - len(draft.token_ids)] = draft.token_ids
                first, wanted = len(rows), procedure.num_rows(work)
                rows += range(len(tokens) - wanted, len(tokens))
                work.rows = slice(first, len(rows))
            step.is_on_device = bool(on_device)
            # Prompt lengths vary too much for a captured graph to be reused.
            may_capture = all(work.phase is not Phase.PREFILL for work in step.works)
            outputs = self.replay(segments, tokens, rows, on_device, may_capture=may_capture)
            if outputs is not None:
                outputs.give(step)
                return
            step.batch, choosing = RaggedBatch.on_device(segments, tokens, rows or [0], self.target.device, on_device)
            if any(work.phase is Phase.DENOISE for work in step.works):
                step.batch.follow(self._denoised)
                self._denoised = step.batch
            if self.recurrent is not None:
                step.recurrent = self.recurrent.start(step.batch, step.works)
            taps = self._taps if step.unsuspended else None
            logits = self.target.forward(step.batch, self.store, choosing, taps, step.recurrent)
            step.logits = logits[: len(rows)]
            if taps is not None:
                step.features = taps.take()[0]
            elif self._taps is not None:
                self._taps.clear()

    def replay(
        self,
        segments: list[Segment],
        tokens: list[int],
        rows: Sequence[int],
        on_device: Mapping[int, Tensor],
        moved: Tensor | None = None,
        *,
        may_capture: bool = True,
    ) -> PassOutputs | None:
        """Run a small pass in static buffers, with the arguments of :class:`StaticPasses`; return ``None`` if it does not fit.

        The logits are valid until the next pass.
        """
        found = None
        if self.passes is not None:
            found = self.passes(segments, tokens, rows, on_device, moved, may_capture=may_capture)
        if found is None:
            return None
        batch, (logits, *features) = found
        # Features may be read after the next pass, so they are copied.
        return PassOutputs(batch, logits[: len(rows)], features[0][: len(tokens)].clone() if features else None)

    @trimmed()
    def seconds(self, tokens: int, requests: int) -> float:
        """Measure the seconds of a pass that verifies ``tokens`` of made-up text, spread over ``requests``."""
        target, lengths = self.target, spread(tokens, requests)
        context = context_of(lengths, target.context_length)
        replay = None if self.passes is None else self.passes.made_up(lengths, context, causal=True)
        if replay is not None:
            return fastest(lambda: best_tokens(replay()), target.device)
        batch, store = made_up(lengths, target.kv_shapes, target.dtype, target.device, causal=True, context=context)
        rows = torch.arange(len(batch), device=target.device)[-tokens:]
        return fastest(lambda: best_tokens(target.forward(batch, store, rows)), target.device)
