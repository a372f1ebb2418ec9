"""What one request does in one step: how its draft is asked for, what is proposed, what is kept.

A ``Work`` is filled forward through ``Engine.step`` and dropped: nothing that belongs to one step lives anywhere else.
"""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Generic, Protocol, Self, TypeVar

from volley.decode.rules import TokenRule
from volley.decode.sampling import PositionNoise
from volley.memory.kv_cache import BlockTable
from volley.models.adapter import Adapter
from volley.types import Proposal, SamplingParams, Verdict


class Kind(Enum):
    """What a pass does for a request. A procedure of another kind (``procedures/request.py``) may add its own."""

    PREFILL = "prefill"
    DECODE = "decode"
    DENOISE = "denoise"
    """A pass over a canvas: nothing of it is kept."""
    COMMIT = "commit"
    """The K/V of a denoised block are computed, perhaps while the next canvas is denoised."""
    VERIFY = "verify"
    """A draft of the procedure's own, which no policy decides about."""


class Shape(Enum):
    CHAIN = "chain"
    TREE = "tree"
    COPY = "copy"
    """Tokens that were found in the text (``decode/lookup.py``)."""


class Rule(Enum):
    """How a draft is verified (``decode/verify.py``)."""

    GREEDY = "greedy"
    MATCH = "match"
    """Draw the target's own tokens with the noise of their positions; keep the draft while it agrees. It may know the noise."""
    SPECULATIVE = "speculative"
    """Accept by the ratio of both distributions. A copy knows nothing of either: it is compared with what the target draws."""


@dataclass(frozen=True, slots=True)
class Ask:
    """How the draft of one request is made and verified in one step. A policy decides it once; a scheduler may cut it."""

    shape: Shape
    rule: Rule
    size: int = 0
    """Tokens of the draft that are verified, at most; 0 is plain decoding."""
    positions: int = 0
    """Draft positions that the drafter fills: as many as a chain has tokens, the levels of a tree; a copy has none."""
    price: float = 0.0
    """The chance of being kept below which a token is not verified; for the policy's own use."""

    def cut(self, size: int) -> Self:
        """The same draft with at most ``size`` tokens."""
        size = max(0, min(size, self.size))
        return replace(self, size=size, positions=size if self.shape is Shape.CHAIN else self.positions)


NO_DRAFT = Ask(Shape.CHAIN, Rule.GREEDY)


class Drafted(Protocol):
    """What drafting and verification need to know of a request."""

    request_id: int
    params: SamplingParams
    noise: PositionNoise
    draft_table: BlockTable
    """Where the drafter's K/V of the tokens before the anchor are."""
    adapter: Adapter | None
    rules: tuple[TokenRule, ...]

    @property
    def anchor(self) -> int:
        """The last token, which the target has not seen yet."""

    @property
    def length(self) -> int:
        """Tokens so far, the anchor included: the position of the first draft token."""


R = TypeVar("R", bound=Drafted)


@dataclass(slots=True)
class Work(Generic[R]):
    """One request's part of a step."""

    request: R
    ask: Ask
    kind: Kind = Kind.DECODE
    num_known: int = 1
    """Tokens of the request itself that the target computes: a part of the prompt, or the anchor."""
    found: list[int] = field(default_factory=list)
    """What a grammar forces, and what followed where the text last read as it does now, if the policy wants to know."""
    found_confidence: list[float] = field(default_factory=list)
    may_be_late: bool = False
    """Whether nothing cuts the draft by its confidences, so that the host need not read it before it is verified."""
    proposal: Proposal = field(default_factory=lambda: Proposal([]))
    rows: slice = field(default_factory=lambda: slice(0, 0))
    """The rows of the step's logits that choose this request's tokens."""
    verdict: Verdict = field(default_factory=lambda: Verdict(0, []))
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of the target's pass, at most."""
        return self.num_known + self.ask.size

    @property
    def num_kept(self) -> int:
        """Tokens of the target's pass that stay."""
        return self.num_known + self.verdict.accepted
