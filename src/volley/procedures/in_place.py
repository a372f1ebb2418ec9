"""Decode token by token with a model whose row i predicts token i: a mask in the next position asks for the next token.

A pass over the last known token and a mask after it chooses one token, like a canvas of one token. A draft is verified in one
pass, as a tree (S2D2, arXiv 2603.25702). The last known token and the draft are a chain, and each of them is followed by a
mask, which sees what is before it and itself. So a draft of k tokens takes 2 (k + 1) rows. The masks come last, so their K/V
are behind those of the chain and are overwritten by the next pass.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from volley.config import DecodingConfig
from volley.decode.sampling import without
from volley.decode.work import DraftSpec, Phase, Shape, Work
from volley.errors import ConfigError
from volley.memory.batch import Segment
from volley.policies.base import View
from volley.procedures.request import Request
from volley.procedures.speculative import Speculative, coupled_rule


class InPlace(Speculative):
    reads_on_device = False

    def __init__(self, config: DecodingConfig, mask_token_id: int) -> None:
        super().__init__(config)
        self.mask_token_id = mask_token_id

    def check(self, request: Request) -> None:
        if request.params.prompt_logprobs is not None:
            raise ConfigError(
                "prompt_logprobs: a row of this model's logits predicts its own token, which a prompt shows it; leave them out "
                "(and logprobs with echo)",
                field="prompt_logprobs",
            )

    def view(self, request: Request, largest: int) -> View | None:
        """Return ``None``: no drafter works with such a model."""
        return None

    def num_beside(self, num_drafted: int) -> int:
        return 2 * num_drafted + 1

    def most_drafted(self, request: Request) -> int:
        """Return the longest draft. The masks need slots of the pool, too."""
        return min(super().most_drafted(request), (request.pool_slots - request.computed) // 2 - 1)

    def read(self, request: Request, num_tokens: int) -> Work[Request]:
        """Make the work that reads a prompt chunk. The pass that reads the end of the prompt also asks for the first token."""
        emits = request.computed + num_tokens == request.length and request.remaining > 0
        return Work(request, self._spec(request, self.num_beside(0) if emits else 0), Phase.PREFILL, num_tokens)

    def next_work(self, request: Request, spec: DraftSpec) -> Work[Request]:
        return Work(request, self._spec(request, self.num_beside(0)), Phase.VERIFY)

    @staticmethod
    def _spec(request: Request, size: int) -> DraftSpec:
        return DraftSpec(Shape.CHAIN, coupled_rule(request), size)

    def segment(self, work: Work[Request]) -> tuple[list[int], Segment]:
        tokens, segment = super().segment(work)
        if not work.spec.size:
            return tokens, segment
        count, drafted = len(tokens), len(work.proposal.token_ids)
        masks = [self.mask_token_id] * (1 + drafted)
        parents = (*range(count - 1), *range(count - 1 - drafted, count)) if drafted else None
        return tokens + masks, Segment(segment.table, segment.start, count + len(masks), parents=parents)

    def carry(self, segment: Segment, canvas: int) -> Segment:
        """Append a canvas to the end of the chain. It sees no mask but its own."""
        assert segment.parents is not None, "a canvas rides behind a draft"
        parents = (*segment.parents, segment.parents[-1], *range(segment.length, segment.length + canvas - 1))
        return replace(segment, length=segment.length + canvas, parents=parents, canvas=canvas)

    def ask_next(self, token_ids: Sequence[int]) -> Sequence[int]:
        return [*token_ids, self.mask_token_id]

    def choosable(self, logits: Tensor) -> Tensor:
        """Return ``logits`` in which the mask has no chance."""
        return without(logits, self.mask_token_id)
