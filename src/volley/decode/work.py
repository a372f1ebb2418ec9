"""Define ``Work``: what one request does in one step, with its draft specification (``spec``), draft and verdict.

``Engine.step`` fills it in and drops it. All data of one step is in it.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Generic, Protocol, Self, TypeVar

from torch import Tensor

from volley.decode.rules import TokenRule
from volley.decode.sampling import PositionNoise, Score
from volley.memory.kv_cache import BlockTable
from volley.params import SamplingParams


class Phase(Enum):
    """Phase of a request in a pass."""

    PREFILL = "prefill"
    DECODE = "decode"
    DENOISE = "denoise"
    """Denoise a canvas. No K/V are kept."""
    COMMIT = "commit"
    """Compute the K/V of a denoised block, perhaps while the next canvas is denoised."""
    VERIFY = "verify"
    """Verify a draft that a decoding method made itself. The policy does not decide about it."""


class Shape(Enum):
    CHAIN = "chain"
    TREE = "tree"
    LOOKUP = "lookup"
    """Tokens from prompt lookup (``decode/lookup.py``)."""


class Rule(Enum):
    """Verification rule of a draft (``decode/verify.py``)."""

    GREEDY = "greedy"
    COUPLED = "coupled"
    """Coupled sampling: draw the target's tokens with the noise of their positions, which drafts may use too, and accept the
    draft while it agrees."""
    REJECTION = "rejection"
    """Rejection sampling: accept by the ratio of target and draft distributions. Prompt-lookup tokens have no distribution and
    are compared with the target's draws."""


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """Draft specification of one request for one step. The policy decides it once; the scheduler may cut it."""

    shape: Shape
    rule: Rule
    size: int = 0
    """Most draft tokens that are verified; 0 is plain decoding."""
    positions: int = 0
    """Draft positions that the drafter fills: the tokens of a chain or the levels of a tree; 0 for prompt lookup."""
    threshold: float = 0.0
    """Threshold, for the policy's own use: a token that is less likely to be accepted is not verified."""

    def cut(self, size: int) -> Self:
        """Return this specification with at most ``size`` tokens."""
        size = max(0, min(size, self.size))
        return replace(self, size=size, positions=size if self.shape is Shape.CHAIN else self.positions)


NO_DRAFT = DraftSpec(Shape.CHAIN, Rule.GREEDY)


@dataclass(slots=True)
class DeviceDraft:
    """Draft that is still on the device (``decode/on_device.py``)."""

    token_ids: Tensor
    """Token ids ``[k]``."""
    confidence: Tensor | None = None
    """Probabilities ``[k]`` in double precision, or ``None`` if not requested."""

    def first(self, size: int) -> "DeviceDraft":
        return DeviceDraft(self.token_ids[:size], None if self.confidence is None else self.confidence[:size])


@dataclass(slots=True)
class Proposal:
    """Draft of the tokens that follow one request's anchor.

    ``token_ids`` ``[k]`` are the draft tokens. ``draft_probs`` ``[k, n]`` is the distribution that each token was drawn from
    given the ones before it, after temperature and truncation, over the tokens ``drafted [n]`` or the whole vocabulary. It is
    ``None`` when no such distribution is known (multi-step denoising, trees) or needed (greedy). ``parents [k]`` makes the tokens
    a tree: ``parents[i]`` is the parent of token i, 0 for the anchor and ``j + 1`` for token ``j < i``. ``None``: every token
    follows the one before it.
    """

    token_ids: list[int]
    draft_probs: Tensor | None = None
    parents: tuple[int, ...] | None = None
    confidence: list[float] = field(default_factory=list)
    """Largest probability of the drafter at each draft position, in its first pass, if requested. In a greedy walk it is the
    probability given the previous token, among the candidates. In a tree it is each node's probability, ancestors included."""
    on_device: DeviceDraft | None = None
    """Tokens on the device until the host has read them; ``token_ids`` are zeros until then."""
    drafted: Tensor | None = None

    @property
    def has_confidence(self) -> bool:
        return bool(self.confidence) or (self.on_device is not None and self.on_device.confidence is not None)

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """Draft tokens that lead to each row, along the chain or the tree: none to the anchor's, then those of each draft
        token, itself included."""
        paths: list[tuple[int, ...]] = [()]
        for index, token in enumerate(self.token_ids):
            paths.append((*paths[index if self.parents is None else self.parents[index]], token))
        return paths

    def first(self, size: int) -> "Proposal":
        """Return the first tokens of a chain. The confidences of all tokens are kept."""
        known, draft = self.draft_probs, self.on_device
        probs = None if known is None else known[:size]
        return replace(self, token_ids=self.token_ids[:size], draft_probs=probs, on_device=draft and draft.first(size))


@dataclass(slots=True)
class Verdict:
    """Result of verifying one proposal: ``accepted`` draft tokens, then the target's own next token."""

    accepted: int
    token_ids: list[int]
    """Accepted draft tokens and the bonus token: ``accepted + 1`` tokens."""
    path: tuple[int, ...] | None = None
    """Accepted nodes of a tree, numbered as in ``Proposal.parents``; ``None`` for a chain, which keeps its first tokens."""


class Drafted(Protocol):
    """Data of a request that drafting and verification need."""

    request_id: int
    params: SamplingParams
    noise: PositionNoise
    draft_table: BlockTable
    """Block table of the drafter's K/V for the tokens before the anchor."""
    rules: tuple[TokenRule, ...]

    @property
    def anchor(self) -> int:
        """The last token, which the target has not processed yet."""

    @property
    def length(self) -> int:
        """Number of tokens so far, anchor included: the position of the first draft token."""


R = TypeVar("R", bound=Drafted)
K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class Work(Generic[R]):
    """One request's part of a step.

    It counts these tokens: ``num_known`` are certain; ``spec.size`` are drafted at most; the drafter fills ``spec.positions`` of
    them, and ``num_fused`` belong to a fused canvas. ``num_tokens`` is the sum of known and drafted tokens. After verification,
    ``verdict.accepted`` draft tokens stay, and ``num_kept`` tokens keep their K/V.
    """

    request: R
    spec: DraftSpec
    phase: Phase = Phase.DECODE
    num_known: int = 1
    """Number of certain tokens that the target computes: a chunk of the prompt, or the anchor."""
    lookup_tokens: list[int] = field(default_factory=list)
    """Prompt-lookup tokens: those that a grammar forces, then those that followed the same text earlier. Empty if the policy
    does not use lookup."""
    lookup_confidence: list[float] = field(default_factory=list)
    num_fused: int = 0
    """Number of the spec's tokens that belong to a fused canvas. Behind a draft they are dropped if the pass has no budget for
    them."""
    may_stay_on_device: bool = False
    """True if the draft may stay on the device until it is verified, because no policy cuts it by confidence."""
    proposal: Proposal = field(default_factory=lambda: Proposal([]))
    rows: slice = field(default_factory=lambda: slice(0, 0))
    """Rows of the step's logits that belong to this request."""
    verdict: Verdict = field(default_factory=lambda: Verdict(0, []))
    choices: int | None = None
    """Index of this request's first target token in the values read back from the GPU; ``None`` if the host chooses tokens."""
    kept: int | None = None
    """Index of this request's accepted count in the values read back from the GPU, or ``None`` if the host counts. With it,
    ``choices`` points at the bonus token only."""
    is_broken: bool = False
    """True if the target's logits, or what the rules made of them, are not finite although the pass held only certain tokens."""
    is_cut: bool = False
    """True if the verdict keeps fewer tokens than were accepted, because the next row is not finite
    (:meth:`Speculative.verify`)."""
    scores: list[Score] = field(default_factory=list)
    """Scores of the verdict's tokens, if requested."""

    @property
    def num_tokens(self) -> int:
        """Most tokens of this request in the target's pass."""
        return self.num_known + self.spec.size

    @property
    def num_kept(self) -> int:
        """Number of tokens in the target's pass whose K/V are kept."""
        return self.num_known + self.verdict.accepted

    @property
    def kept_rows(self) -> Sequence[int]:
        """Rows of its segment whose K/V are kept, by position."""
        path = self.verdict.path
        return range(self.num_kept) if path is None else (0, *path)


Works = Sequence[Work[Any]]


def group_by(works: Sequence[Work[R]], key: Callable[[Work[R]], K]) -> dict[K, list[int]]:
    """Return the indices of works with the same ``key``, by key, in the order of ``works``."""
    groups: dict[K, list[int]] = {}
    for index, work in enumerate(works):
        groups.setdefault(key(work), []).append(index)
    return groups
