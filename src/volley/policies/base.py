"""Define the base class of policies. A policy decides in each cycle how much each request drafts and how much of it is
verified.

Every policy is lossless as long as it decides from the data given here, and never from *sampled* draft tokens. Verifying a
token because of its value would bias the output (see ``decode/verify.py``).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from torch import Tensor

from volley.decode.work import DraftSpec, Rule, Shape
from volley.errors import ConfigError
from volley.policies.cost import Costs


@dataclass(slots=True)
class View:
    """Data of a decoding request that a policy sees before drafting."""

    request_id: int
    rule: Rule
    """Verification rule of a chain."""
    limit: int
    """Most draft positions: the largest block, or the tokens left in the answer."""
    chain_limit: int
    """Most draft positions of a chain; not above ``limit``."""
    max_nodes: int | None = None
    """Number of tree nodes. ``None``: the policy chooses between chains and trees. 0: chains only. n: a tree of n nodes
    replaces each chain."""
    lookup_confidence: list[float] = field(default_factory=list)
    """Confidence of each prompt-lookup token: n / (n + 1) if the n tokens before it match."""

    def draft(self, positions: int, nodes: int = 0, threshold: float = 0.0) -> DraftSpec:
        """Return the spec for a draft of ``positions``, 0 for plain decoding: a chain, or a tree of up to ``nodes`` tokens."""
        nodes = nodes if self.max_nodes is None else self.max_nodes
        if nodes and (positions := min(positions, self.limit)):
            return DraftSpec(
                Shape.TREE, Rule.GREEDY if self.rule is Rule.GREEDY else Rule.COUPLED, nodes, positions, threshold
            )
        positions = min(positions, self.chain_limit)
        return DraftSpec(Shape.CHAIN, self.rule, positions, positions, threshold)

    def lookup(self, size: int) -> DraftSpec:
        """Return the spec that verifies the first ``size`` prompt-lookup tokens."""
        return DraftSpec(Shape.LOOKUP, self.rule, min(size, len(self.lookup_confidence)))


@dataclass(slots=True)
class Cycle:
    """Outcome of one draft spec. A policy sees no token."""

    request_id: int
    spec: DraftSpec
    confidence: list[float]
    """Drafter confidences. For a chain: the largest probability at each position in the drafter's first pass, before anything
    was drawn, so it does not depend on sampled tokens. For a tree, whose verification is lossless in any case: each node's
    probability, largest first. Empty for chains unless :attr:`Policy.uses_confidence`, and in :meth:`Policy.trim` if
    :meth:`Policy.cuts` was false."""
    lookup_confidence: list[float] = field(default_factory=list)
    """Confidences of prompt-lookup tokens, as in :class:`View`."""
    verified: int = 0
    accepted: int = 0
    right: list[bool] = field(default_factory=list)
    """Acceptance of each verified token, in the order of ``confidence``."""
    lookup_right: list[bool] = field(default_factory=list)
    """Correctness of each prompt-lookup token, used or not, up to the first wrong one."""


class Policy(ABC):
    """Policy of one engine. Each step calls :meth:`decide`, :meth:`trim` and :meth:`observe`.

    If a step's drafts are dropped because a prompt came, :meth:`trim` and :meth:`observe` are not called.
    """

    uses_confidence = False
    """True if it needs the drafter's confidences, which take a little time to compute."""
    uses_lookup = False
    """True if it uses prompt lookup, for which each text is searched."""
    uses_costs = False
    """True if it uses :attr:`costs`, which are then learnt from every step."""
    uses_prefill = False
    """True if it needs :meth:`prefilled`."""
    is_steady = False
    """True if it asks the same of every cycle."""
    block_size = 0
    """Largest block that it asks for, anchor included. Before :meth:`attach`, 0 stands for the drafter's block size."""
    costs: Costs | None = None

    def attach(self, largest: int, costs: Costs) -> None:
        """Connect the policy to an engine: the drafter's block size, and the costs of passes on this machine. The engine calls
        this once."""
        if self.costs is not None and self.costs is not costs:
            raise ConfigError(
                "this policy object already serves an engine and its drafter; give each engine its own, and each drafter"
            )
        size = self.block_size or largest
        if size < 1 or (largest == 1 and size != 1):
            raise ConfigError(f"block_size {size} cannot be used; it is 1 (plain decoding) or more, with a drafter")
        if size > largest:
            raise ConfigError(
                f"block_size {size} is beyond the {largest} that this engine drafts at most; give that or less, or make "
                f"the engine with block_size={size}"
            )
        self.block_size, self.costs = size, costs

    def rehearse(self) -> None:
        """Time the passes of a single request in advance, so that the first request need not wait for that."""

    def prefilled(self, request_id: int, temperature: float, logits: Tensor, hidden: Tensor) -> None:
        """Take the logits ``[V]`` after a prompt that was read, and its last token's tapped states ``[taps · H]``."""

    @abstractmethod
    def decide(self, views: Sequence[View], under_way: int) -> list[DraftSpec]:
        """Return the draft spec of each view. ``under_way`` is the number of running and waiting requests, at most as many as may
        run."""

    def draft_kv_every(self, sampled: Set[bool], under_way: int) -> int:
        """Return k: draft K/V are maintained for every k-th request (0: for none), while ``under_way`` requests are running or
        waiting.

        ``sampled`` holds True if any running request is sampled, and False if any is greedy. Drafting is suspended for the
        other requests, and for a while after.
        """
        return 1

    def cuts(self, spec: DraftSpec) -> bool:
        """Return True if :meth:`trim` may cut this draft. The host must then read it before it is verified."""
        return self.uses_confidence

    def trim(self, cycles: Sequence[Cycle]) -> list[int]:
        """Return how many tokens of each draft to verify: the first ones of a chain, the most likely ones of a tree."""
        return [cycle.spec.size for cycle in cycles]

    def observe(self, cycles: Sequence[Cycle]) -> None:
        """Learn from accepted tokens."""

    def end(self, request_id: int) -> None:
        """Forget a request that ended. This may be called twice."""
