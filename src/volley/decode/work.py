"""A ``Work`` is what one request does in one step: its ask, its draft and its verdict.

``Engine.step`` fills it in and drops it. Nothing that belongs to one step lives anywhere else.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Generic, Protocol, Self, TypeVar

from volley.decode.rules import TokenRule
from volley.decode.sampling import PositionNoise
from volley.memory.kv_cache import BlockTable
from volley.models.drafters.adapter import Adapter
from volley.types import Proposal, SamplingParams, Verdict


class Kind(Enum):
    """What a pass does for a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    DENOISE = "denoise"
    """A pass over a canvas; none of its K/V are kept."""
    COMMIT = "commit"
    """The K/V of a denoised block are computed, perhaps while the next canvas is denoised."""
    VERIFY = "verify"
    """A procedure's own draft is verified; no policy decides about it."""


class Shape(Enum):
    CHAIN = "chain"
    TREE = "tree"
    COPY = "copy"
    """Tokens that were found in the text (``decode/lookup.py``)."""


class Rule(Enum):
    """How a draft is verified (``decode/verify.py``)."""

    GREEDY = "greedy"
    MATCH = "match"
    """Draw the target's tokens with the noise of their positions, which drafts may use too; keep the draft while it agrees."""
    SPECULATIVE = "speculative"
    """Accept by the ratio of both distributions. A copy has no distribution: it is compared with what the target draws."""


@dataclass(frozen=True, slots=True)
class Ask:
    """How the draft of one request is made and verified in one step. A policy decides it once; a scheduler may cut it."""

    shape: Shape
    rule: Rule
    size: int = 0
    """Most tokens of the draft that are verified; 0 is plain decoding."""
    positions: int = 0
    """Draft positions that the drafter fills: the tokens of a chain, or the levels of a tree; a copy has none."""
    price: float = 0.0
    """A token with a lower chance to be kept is not verified; for the policy's own use."""

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
K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class Work(Generic[R]):
    """One request's part of a step."""

    request: R
    ask: Ask
    kind: Kind = Kind.DECODE
    num_known: int = 1
    """Tokens of the request itself that the target computes: a part of the prompt, or the anchor."""
    found: list[int] = field(default_factory=list)
    """Tokens that a grammar forces, then tokens that followed the same text earlier; only if the policy asks for copies."""
    found_confidence: list[float] = field(default_factory=list)
    riding: int = 0
    """Of the ask's tokens, those of a canvas. Behind a draft they are left out where a pass has no room for them."""
    may_be_late: bool = False
    """Whether the host need not read the draft before it is verified, because nothing cuts it by its confidences."""
    proposal: Proposal = field(default_factory=lambda: Proposal([]))
    rows: slice = field(default_factory=lambda: slice(0, 0))
    """The rows of the step's logits that choose this request's tokens."""
    verdict: Verdict = field(default_factory=lambda: Verdict(0, []))
    choices: int | None = None
    """Where the target's own tokens of its rows begin among what the host reads of this pass, if the device chooses them."""
    kept: int | None = None
    """Where the number of its kept tokens is among these, if the device counts them; then only the token behind them is there."""
    is_broken: bool = False
    """Whether the target's logits, or what is made of them, are not finite though nothing uncertain was in the pass."""
    is_cut: bool = False
    """Whether its verdict keeps less than was accepted, because the row behind is not finite (:meth:`Speculative.absorb`)."""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Most tokens that it has in the target's pass."""
        return self.num_known + self.ask.size

    @property
    def num_kept(self) -> int:
        """Tokens of the target's pass whose K/V are kept."""
        return self.num_known + self.verdict.accepted

    @property
    def kept_rows(self) -> Sequence[int]:
        """The rows of its segment whose K/V are kept, by position."""
        path = self.verdict.path
        return range(self.num_kept) if path is None else (0, *path)


def group_by(works: Sequence[Work[R]], key: Callable[[Work[R]], K]) -> dict[K, list[int]]:
    """Indices of the works that have the same ``key``, by key, in the order of ``works``."""
    groups: dict[K, list[int]] = {}
    for index, work in enumerate(works):
        groups.setdefault(key(work), []).append(index)
    return groups
