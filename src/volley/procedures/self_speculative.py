"""Decode by self-speculation: a diffusion language model drafts a canvas and verifies it causally, with the same weights and
K/V.

Output is that of the autoregressive mode of these weights, whatever the canvas holds. Greedy requests compare the draft with
the most likely token, sampled ones with the token that the model draws with the noise of the position. The canvas is drawn
with that noise, too.

The number of denoising passes over a draft is chosen by measurement (``policies/draft_steps.py``), unless a request sets it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from volley.decode.canvas import Canvas, CoupledNoise
from volley.decode.sampling import PositionNoise
from volley.decode.work import DraftSpec, Phase, Proposal, Rule, Shape, Work
from volley.memory.batch import Segment
from volley.models.targets.block_diffusion import BlockDiffusion
from volley.models.targets.target import Target
from volley.params import DiffusionParams, SamplingParams
from volley.policies.draft_steps import DraftSteps
from volley.procedures.denoising import Denoising, canvas_length, diffusion_of
from volley.procedures.request import Request, Works
from volley.procedures.speculative import Speculative, coupled_rule


@dataclass(slots=True)
class SelfCheck(Work[Request]):
    """A work that verifies a draft of self-speculation."""

    steps: int = 0
    """Number of passes over the draft, if :class:`DraftSteps` chose it; 0: nothing is learnt from this work."""
    alone: int = 0
    """Number of these passes that only denoised this draft."""
    confidence: list[float] = field(default_factory=list)
    """Probability of each token of the draft."""


class SelfSpeculative(Denoising):
    """Decoding method whose canvas begins at the anchor, which is given; the other slots are the draft."""

    def __init__(
        self, target: Target, family: BlockDiffusion, verifier: Speculative, steps: DraftSteps | None = None
    ) -> None:
        """Decode with ``verifier``. ``steps`` chooses the passes over a draft; without it there is one."""
        super().__init__(target, family)
        self.verifier, self.steps = verifier, steps
        self._at_once = 1  # requests in the last pass

    def check(self, request: Request) -> None:
        """Accept everything that plain decoding accepts, because the verifier decodes token by token."""
        self.verifier.check(request)

    def prefill_end(self, request: Request) -> int:
        return self.verifier.prefill_end(request)

    def matchable(self, request: Request) -> int:
        return self.verifier.matchable(request)

    def reach(self, num_prompt: int, max_length: int, params: SamplingParams) -> int:
        return max_length

    def most_tokens(self, num_prompt: int, context_length: int, params: SamplingParams) -> int:
        return context_length

    def _is_causal(self, params: SamplingParams) -> bool:
        return True

    def read(self, request: Request, num_tokens: int) -> Work[Request]:
        work = self.verifier.read(request, num_tokens)
        work.spec = replace(work.spec, rule=coupled_rule(request))
        return work

    def next_work(self, request: Request, spec: DraftSpec) -> Work[Request]:
        size = min(canvas_length(request.params) - 1, self.verifier.most_drafted(request))
        rule, canvas = coupled_rule(request), request.canvas
        is_plain = request.length == request.plain_at
        if is_plain or (canvas is not None and canvas.start != request.computed):  # its draft was not verified
            canvas = request.canvas = None
        if canvas is None and size > 0 and not is_plain:
            canvas = request.canvas = self._begin(request, request.computed, [request.anchor])
        if canvas is None:
            return Work(request, DraftSpec(Shape.CHAIN, rule, self.verifier.num_beside(0)), Phase.VERIFY)
        if not canvas.done:
            return Work(request, DraftSpec(Shape.CHAIN, rule, len(canvas)), Phase.DENOISE, 0, num_fused=len(canvas))
        draft, confidence = canvas.tokens[1 : 1 + size].tolist(), canvas.confidence[1 : 1 + size].tolist()
        beside, request.canvas = self.verifier.num_beside(len(draft)), None
        if self._should_fuse(request, confidence, beside + 1):
            request.canvas = self._next_canvas(request, canvas.start + 1 + len(draft))
        num_fused = 0 if request.canvas is None else len(request.canvas)
        if request.computed + 1 + beside + num_fused > request.pool_slots:
            request.canvas, num_fused = None, 0
        spec = DraftSpec(Shape.CHAIN, rule, beside + num_fused)
        work = SelfCheck(
            request, spec, Phase.VERIFY, proposal=Proposal(draft), num_fused=num_fused, confidence=confidence
        )
        if diffusion_of(request).max_steps is None and len(draft) + 1 == canvas_length(request.params):
            work.steps, work.alone = canvas.max_steps or 0, canvas.step - canvas.is_fused
        return work

    def _begin(self, request: Request, start: int, given: Sequence[int]) -> Canvas | None:
        """Make a canvas and choose its number of passes; return ``None`` if drafting does not pay."""
        steps, length = diffusion_of(request).max_steps, canvas_length(request.params)
        if steps is None:
            is_greedy = coupled_rule(request) is Rule.GREEDY
            steps = 1 if self.steps is None else self.steps.choose(length, self._at_once, is_greedy=is_greedy)
        if steps == 0:
            return None
        canvas = self.make_canvas(request, start, given)
        canvas.max_steps = steps
        return canvas

    def _should_fuse(self, request: Request, confidence: list[float], verified: int) -> bool:
        if self.steps is None:
            return True
        length, is_greedy = canvas_length(request.params), coupled_rule(request) is Rule.GREEDY
        return self.steps.should_fuse(confidence, verified, length, self._at_once, is_greedy=is_greedy)

    def _next_canvas(self, request: Request, start: int) -> Canvas | None:
        """Make the canvas after a draft that is being verified."""
        if request.max_length - start < 3:
            return None
        canvas = self._begin(request, start, [])
        if canvas is not None:
            canvas.is_fused = True
        return canvas

    def make_canvas(self, request: Request, start: int, given: Sequence[int]) -> Canvas:
        """Make a canvas that ends where the answer must end."""
        own = replace(
            diffusion_of(request), canvas_length=min(canvas_length(request.params), request.max_length - start)
        )
        return self.denoiser(request).open(start, given, own, self.noise(request))

    def settings(self, request: Request) -> DiffusionParams:
        assert request.canvas is not None
        return replace(diffusion_of(request), max_steps=request.canvas.max_steps)

    def noise(self, request: Request) -> PositionNoise:
        return CoupledNoise(request.noise.seed)

    def segment(self, work: Work[Request]) -> tuple[list[int], Segment]:
        if work.phase is Phase.DENOISE:
            return super().segment(work)
        tokens, segment = self.verifier.segment(work)
        if not work.num_fused:
            return tokens, segment
        canvas = work.request.canvas
        assert canvas is not None
        whole = replace(self.verifier.carry(segment, len(canvas)), feedback=self.feedback(canvas))
        return tokens + canvas.tokens.tolist(), whole

    def num_rows(self, work: Work[Request]) -> int:
        own = 0 if work.phase is Phase.DENOISE else self.verifier.num_rows(work)
        return own + work.num_fused

    def verify(self, works: Works, logits: Tensor) -> None:
        verified = [work for work in works if work.phase is not Phase.DENOISE]
        self._at_once = sum(work.phase is not Phase.PREFILL for work in works) or 1
        canvases = list[tuple[Request, Tensor]]()
        for work in works:
            if work.num_fused:
                middle = work.rows.stop - work.num_fused
                canvases.append((work.request, logits[middle : work.rows.stop]))
                work.rows = slice(work.rows.start, middle)
            elif work.phase is Phase.VERIFY:
                work.request.canvas = None
                work.request.stats.commit_passes += 1
        self.verifier.verify(verified, logits).read()
        self.denoise(canvases)
        for request, _ in canvases:
            request.stats.denoising_steps += 1
            if request.canvas is None:  # a draft is not final, so the next token is computed without one
                request.plain_at = max(request.plain_at, request.length)
            else:
                request.canvas.done |= request.canvas.step == request.canvas.max_steps
        for work in verified:
            self._put_anchor(work)
            self._learn(work)

    def _learn(self, work: Work[Request]) -> None:
        if self.steps is None or not isinstance(work, SelfCheck):
            return
        is_greedy = work.spec.rule is Rule.GREEDY
        self.steps.note_right(work.confidence, work.verdict.accepted, is_greedy=is_greedy)
        if not work.steps:
            return
        self.steps.observe(
            canvas_length(work.request.params),
            work.steps,
            is_greedy=is_greedy,
            tokens=len(work.verdict.token_ids),
            alone=work.alone,
            verified=work.num_tokens,
        )

    def _put_anchor(self, work: Work[Request]) -> None:
        """Let a fused canvas begin with the bonus token if the whole draft was accepted; otherwise drop it."""
        canvas, verdict = work.request.canvas, work.verdict
        if canvas is None or work.phase is not Phase.VERIFY:
            return
        if verdict.accepted < len(work.proposal.token_ids):
            work.request.canvas = None
            return
        canvas.tokens[0], canvas.revealed[0], canvas.num_given = verdict.token_ids[-1], True, 1
