"""Self-speculation: a diffusion language model drafts a canvas and verifies it causally, with the same weights and the same K/V.

Lossless against the autoregressive mode of these weights, whatever the canvas holds: greedy requests compare with the best token,
sampled ones with the token that the model itself draws with the noise of the position. The canvas draws with that noise too.
"""

from torch import Tensor

from volley.decode.canvas import CanvasNoise, CoupledNoise
from volley.decode.work import Ask, Kind, Rule, Shape, Work
from volley.memory.batch import Segment
from volley.models.target import BlockDiffusion, Target
from volley.procedures.denoising import Denoising, Works, canvas_length, settings
from volley.procedures.request import Request
from volley.procedures.speculative import Speculative
from volley.types import Proposal, SamplingParams


class SelfSpeculative(Denoising):
    """A canvas begins at the anchor, which is given; its other slots are the draft."""

    def __init__(self, target: Target, family: BlockDiffusion, verifier: Speculative) -> None:
        super().__init__(target, family)
        self.verifier = verifier

    def check(self, request: Request) -> None:
        """The verifier follows the text token by token: everything that plain decoding takes will do."""

    def prefill_end(self, request: Request) -> int:
        return self.verifier.prefill_end(request)

    def matchable(self, request: Request) -> int:
        return self.verifier.matchable(request)

    def reach(self, num_prompt: int, max_length: int, params: SamplingParams) -> int:
        return max_length

    def most_tokens(self, num_prompt: int, context_length: int, params: SamplingParams) -> int:
        return context_length

    def prefix_root(self, params: SamplingParams, page_size: int) -> bytes:
        """Its K/V are made causally."""
        return b""

    def read(self, request: Request, num_tokens: int) -> Work[Request]:
        return Work(request, Ask(Shape.CHAIN, _rule(request)), Kind.PREFILL, num_tokens)

    def next_work(self, request: Request, ask: Ask) -> Work[Request]:
        size = min(canvas_length(request.params), request.remaining) - 1
        rule, canvas = _rule(request), request.canvas
        if canvas is None and size > 0:
            canvas = request.canvas = self.make_canvas(request, request.computed, [request.anchor])
        if canvas is None:
            return Work(request, Ask(Shape.CHAIN, rule), Kind.VERIFY)
        if not canvas.done:
            return Work(request, Ask(Shape.CHAIN, rule, len(canvas)), Kind.DENOISE, 0)
        draft = canvas.tokens[1 : 1 + size].tolist()
        return Work(request, Ask(Shape.CHAIN, rule, len(draft)), Kind.VERIFY, proposal=Proposal(draft))

    def noise(self, request: Request) -> CanvasNoise:
        return CoupledNoise(request.noise.seed)

    def segment(self, work: Work[Request]) -> tuple[list[int], Segment]:
        return super().segment(work) if work.kind is Kind.DENOISE else self.verifier.segment(work)

    def num_rows(self, work: Work[Request]) -> int:
        return work.ask.size if work.kind is Kind.DENOISE else self.verifier.num_rows(work)

    def absorb(self, works: Works, logits: Tensor) -> None:
        verified = [work for work in works if work.kind is not Kind.DENOISE]
        for work in works:
            request = work.request
            if work.kind is Kind.DENOISE:
                assert request.canvas is not None
                self.denoise(request, logits[work.rows].float())
                request.stats.denoising_steps += 1
                request.canvas.done |= request.canvas.step == settings(request).max_steps
            elif work.kind is Kind.VERIFY:
                request.canvas = None
                request.stats.commit_passes += 1
        self.verifier.absorb(verified, logits)


def _rule(request: Request) -> Rule:
    return Rule.MATCH if request.params.temperature > 0 else Rule.GREEDY
