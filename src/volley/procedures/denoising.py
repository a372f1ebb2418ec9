"""Decode with diffusion language models: denoise a canvas in several passes, then compute its tokens' K/V as text.

The tokens of a finished canvas are emitted together. Their K/V are still missing, so the request reads them: committing a
block, reading a prompt and reading again after a preemption are one operation. The next canvas is denoised in the pass that
reads the last known token, so s denoising steps cost s passes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from volley.decode.canvas import Canvas, CanvasOutput, CoupledNoise, Denoiser, Reveal, grouped
from volley.decode.renoise import Renoise
from volley.decode.rules import LogitBias, Penalties, apply_rules
from volley.decode.sampling import PositionNoise, Score, best_tokens, scores_of, without
from volley.decode.work import NO_DRAFT, DraftSpec, Phase, Rule, Shape, Verdict, Work
from volley.errors import ConfigError, InputError
from volley.memory.batch import Segment
from volley.memory.device import most_together
from volley.memory.upload import upload_indices
from volley.models.targets.block_diffusion import BlockDiffusion
from volley.models.targets.target import Target
from volley.params import DiffusionMode, DiffusionParams, SamplingParams
from volley.procedures.request import Procedure, Request, Works


def diffusion_of(request: Request) -> DiffusionParams:
    """Return the diffusion settings of a request; every field that its model needs is filled in."""
    assert request.params.diffusion is not None
    return request.params.diffusion


def canvas_length(params: SamplingParams) -> int:
    assert params.diffusion is not None
    assert params.diffusion.canvas_length is not None
    return params.diffusion.canvas_length


class Denoising(Procedure):
    def __init__(self, target: Target, family: BlockDiffusion) -> None:
        self.target, self.family = target, family

    # -- limits of a request -------------------------------------------------------------------------------------------
    def check(self, request: Request) -> None:
        if request.params.max_tokens == 0:
            raise ConfigError(
                f"max_tokens is 0, and a canvas has at least one token; give more{self._or('autoregressive')}",
                field="max_tokens",
            )
        if request.remaining == 0:
            length = canvas_length(request.params)
            raise InputError(
                f"no canvas of {length} fits after the prompt of {request.num_prompt} tokens, in the context "
                "or the pages; shorten the prompt, use a smaller canvas_length, or raise kv_mib or num_pages",
                field="diffusion.canvas_length",
            )
        if request.params.prompt_logprobs is not None:
            raise ConfigError(
                "prompt_logprobs: a prompt before a canvas is not read token by token; leave them out (and logprobs with echo)"
                f"{self._or('autoregressive') if self.family.writes_causally else ''}",
                field="prompt_logprobs",
            )
        others = [rule for rule in request.rules if not isinstance(rule, Penalties | LogitBias)]
        if others:
            what = others[0].title or type(others[0]).__name__
            raise ConfigError(
                f"{what} follows a text token by token, and a canvas is denoised all at once; leave it out"
                f"{self._or('self', 'autoregressive')}",
                field="diffusion.mode",
            )

    def _or(self, *modes: DiffusionMode) -> str:
        """Return the end of a remedy: other modes, which every model of a family has."""
        named = " or ".join(f"mode={mode!r}" for mode in modes)
        return f", or use {named} among the diffusion settings"

    def prefill_end(self, request: Request) -> int:
        """Return the number of positions to compute before the canvas. Aligned models read whole blocks; the rest of the
        prompt is given on the canvas."""
        length = canvas_length(request.params) if self.family.is_aligned else 1
        return request.length // length * length

    def matchable(self, request: Request) -> int:
        """Return how many tokens may come from the prefix cache. The last one must be computed if its logits predict the
        canvas's first slot."""
        return self.prefill_end(request) - self._awaits_first(request)

    def reach(self, num_prompt: int, max_length: int, params: SamplingParams) -> int:
        """Return the end of the canvas that holds the last token; the answer may end inside it."""
        length = canvas_length(params)
        first = num_prompt // length * length if self.family.is_aligned else num_prompt
        return first + -(-(max_length - first) // length) * length

    def most_tokens(self, num_prompt: int, context_length: int, params: SamplingParams) -> int:
        length = canvas_length(params)
        first = 0 if self.family.is_aligned else num_prompt
        return max(num_prompt, first + (context_length - first) // length * length)

    def _is_causal(self, params: SamplingParams) -> bool:
        """Return True if the K/V of finished text equal those of a causal pass."""
        return self.family.has_causal_context or canvas_length(params) == 1

    def is_followed(self, params: SamplingParams) -> bool:
        """Return True if the K/V are causal, because requests with a drafter may share them. No drafter drafts for a canvas."""
        return self._is_causal(params)

    def prefix_root(self, params: SamplingParams, page_size: int) -> bytes | None:
        """Return the root of page hashes. Bidirectional K/V depend on the block length, and pages can be shared only if they
        end where blocks do."""
        if self._is_causal(params):
            return b""
        length = canvas_length(params)
        return b"blocks of %d" % length if page_size % length == 0 else None

    # -- passes --------------------------------------------------------------------------------------------------------
    def read(self, request: Request, num_tokens: int) -> Work[Request]:
        """Make the work that reads more text. Bidirectional blocks are never divided. The canvas follows the last token, in
        the same pass."""
        left = self.prefill_end(request) - request.computed
        if not self.family.has_causal_context:
            length = canvas_length(request.params)
            num_tokens = max(1, num_tokens // length) * length
        size = min(num_tokens, left)
        is_block = request.num_output > 0 and left <= canvas_length(request.params)  # else a preemption dropped more
        phase = Phase.COMMIT if is_block else Phase.PREFILL
        if size < left or self._awaits_first(request):
            return Work(request, NO_DRAFT, phase, size)
        return Work(request, self._open(request), phase, size)

    def next_work(self, request: Request, spec: DraftSpec) -> Work[Request]:
        return Work(request, self._open(request), Phase.DENOISE, 0)

    def _awaits_first(self, request: Request) -> bool:
        """Return True if the block before the canvas still has to predict the token of the canvas's first slot."""
        is_given = request.length > self.prefill_end(request)
        return self.family.is_shifted and request.canvas is None and not is_given

    def _open(self, request: Request) -> DraftSpec:
        if request.canvas is None:
            start = self.prefill_end(request)
            request.canvas = self.make_canvas(request, start, request.token_ids[start:])
        return DraftSpec(Shape.CHAIN, Rule.GREEDY, len(request.canvas))

    def make_canvas(self, request: Request, start: int, given: Sequence[int]) -> Canvas:
        return self.denoiser(request).open(start, given, diffusion_of(request), self.noise(request))

    def denoiser(self, request: Request) -> Denoiser:
        if self.family.mask_token_id is None:
            return Renoise(self.target.vocab_size)
        return Reveal(self.family.mask_token_id)

    def settings(self, request: Request) -> DiffusionParams:
        """Return the settings of the passes over the request's canvas."""
        return diffusion_of(request)

    def noise(self, request: Request) -> PositionNoise:
        """Return the noise of the request's canvas. A canvas of one mask uses the noise of its position, like any single
        token."""
        if self.family.mask_token_id is not None and canvas_length(request.params) == 1:
            return CoupledNoise(request.noise.seed)
        return request.noise

    def segment(self, work: Work[Request]) -> tuple[list[int], Segment]:
        request, size, canvas = work.request, work.num_known, work.spec.size
        tokens = request.token_ids[request.computed : request.computed + size]
        if self.family.has_causal_context:
            groups = (1,) * size
        else:
            length = canvas_length(request.params)
            groups = (length,) * (size // length)
        feedback = None
        if canvas:
            assert request.canvas is not None
            tokens, groups = tokens + request.canvas.tokens.tolist(), (*groups, canvas)
            feedback = self.feedback(request.canvas)
        return tokens, Segment(request.table, request.computed, size + canvas, groups=groups, feedback=feedback)

    def feedback(self, canvas: Canvas) -> Tensor | None:
        """Return the self-conditioning input ``[L, H]``, zeros in the first pass; ``None`` for a model without it."""
        if not self.target.takes_feedback:
            return None
        if canvas.feedback is None:
            return torch.zeros(len(canvas), self.target.hidden_size, device=self.target.device)
        return canvas.feedback

    def num_rows(self, work: Work[Request]) -> int:
        request = work.request
        if work.spec.size:
            return work.spec.size
        is_last = request.computed + work.num_known == self.prefill_end(request)
        return int(is_last and self._awaits_first(request))

    # -- results -------------------------------------------------------------------------------------------------------
    def verify(self, works: Works, logits: Tensor) -> None:
        self.denoise([(work.request, logits[work.rows]) for work in works if work.spec.size])
        for work in works:
            request = work.request
            if work.spec.size:
                request.stats.denoising_steps += 1
                work.is_broken = request.canvas is None
                if not work.is_broken:
                    self._finish(work)
            else:
                request.stats.commit_passes += work.phase is Phase.COMMIT
                if len(rows := logits[work.rows]):
                    work.is_broken = not are_finite([rows])[0]
                    if not work.is_broken:
                        self._predict_first(request, rows.float())

    def denoise(self, canvases: Sequence[tuple[Request, Tensor]]) -> None:
        """Apply one pass to the canvases of requests, whose logits are ``[L, V]``.

        A canvas is dropped if its logits are not finite.
        """
        for some in grouped(canvases, lambda own: own[1]):
            finite = list(zip(some, are_finite([rows for _, rows in some]), strict=True))
            for (request, _), is_finite in finite:
                request.canvas = request.canvas if is_finite else None
            if whole := [own for own, is_finite in finite if is_finite]:
                self._denoise_together([request for request, _ in whole], [rows.float() for _, rows in whole])

    def _denoise_together(self, requests: list[Request], rows: list[Tensor]) -> None:
        outputs: dict[Denoiser, list[tuple[Request, Tensor, CanvasOutput]]] = {}
        for request, raw in zip(requests, rows, strict=True):
            canvas = request.canvas
            assert canvas is not None
            seen = raw.roll(1, dims=0) if self.family.is_shifted else raw  # slot 0 is always given
            own = apply_rules(request.rules, seen, [()] * len(seen)) if request.rules else seen
            output = CanvasOutput(canvas, own, request.params, self.settings(request), self.noise(request))
            outputs.setdefault(self.denoiser(request), []).append((request, seen, output))
        for denoiser, members in outputs.items():
            each = denoiser.step_together([output for _, _, output in members])
            for (request, seen, output), decided in zip(members, each, strict=True):
                if request.params.logprobs and bool(decided.any()):
                    _note_scores(output.canvas, decided, seen, request.params)
        self._predict_feedback([output.canvas for members in outputs.values() for _, _, output in members])

    def _predict_feedback(self, canvases: Sequence[Canvas]) -> None:
        """Turn predicted logits into the self-conditioning input of the next pass."""
        predicted = [(canvas, canvas.predicted) for canvas in canvases if canvas.predicted is not None]
        if not predicted:
            return
        logits = [own for _, own in predicted]
        feedback = self.target.feedback(torch.cat(logits) if len(logits) > 1 else logits[0])
        lengths = [len(canvas) for canvas, _ in predicted]
        parts = [None] * len(lengths) if feedback is None else torch.split(feedback, lengths)
        for (canvas, _), part in zip(predicted, parts, strict=True):
            canvas.feedback, canvas.predicted = part, None

    def _predict_first(self, request: Request, rows: Tensor) -> None:
        assert self.family.mask_token_id is not None, "of masked models alone the rows are shifted"
        ruled = apply_rules(request.rules, rows, [()]) if request.rules else rows
        first = best_tokens(without(ruled, self.family.mask_token_id))
        request.canvas = self.make_canvas(request, request.length, first)
        if request.params.logprobs:
            slots = torch.arange(len(request.canvas)) == 0
            _note_scores(request.canvas, slots, rows.expand(len(request.canvas), -1), request.params)

    def _finish(self, work: Work[Request]) -> None:
        """Emit the tokens of a canvas that is done or holds the rest of the answer. None of its K/V are kept."""
        request, canvas = work.request, work.request.canvas
        assert canvas is not None
        known = request.length - canvas.start
        if end := len(canvas) if canvas.done else self._settled_end(request, known):
            work.verdict = Verdict(0, canvas.tokens[known:end].tolist())
            work.scores = canvas.scores[known:end]
            request.stats.canvas_steps.append(canvas.step)
            request.canvas = None

    def _settled_end(self, request: Request, known: int) -> int:
        """Return the number of slots of a masked canvas up to the answer's end, if all of them are revealed and so final; else
        0."""
        canvas = request.canvas
        assert canvas is not None
        if self.family.mask_token_id is None:
            return 0
        needed = canvas.tokens[known : known + request.remaining].tolist()
        stops = (slot for slot, token in enumerate(needed, 1) if token in request.stop_token_ids)
        end = known + next(stops, len(needed))
        return end if bool(canvas.revealed[:end].all()) else 0


def are_finite(each: Sequence[Tensor]) -> list[bool]:
    """Return for each of the logits ``[L, V]`` if every row has a finite maximum. The maximum of a row with a NaN is NaN."""
    found: list[bool] = torch.stack([logits.amax(dim=-1).isfinite().all() for logits in each]).tolist()
    return found


def _note_scores(canvas: Canvas, slots: Tensor, rows: Tensor, params: SamplingParams) -> None:
    """Record log-probabilities of the tokens in ``slots``, under the model's unmodified logits ``rows [L, V]`` of that pass."""
    canvas.scores = canvas.scores or [Score(0.0, 0, [])] * len(canvas)
    at_once = max(1, most_together(rows.device) // rows.shape[-1])
    for where in torch.split(slots.nonzero()[:, 0], at_once):
        seen = rows.index_select(0, upload_indices(where.tolist(), rows.device))
        found = scores_of(seen, canvas.tokens[where].tolist(), params.top_logprobs)
        for place, score in zip(where.tolist(), found, strict=True):
            canvas.scores[place] = score
