"""The base class of policies. A policy decides, cycle by cycle, how much each request drafts and how much of it is verified.

Every policy is lossless as long as it decides from what it is given here, and never from *sampled* draft tokens. To verify a
token because of what it turned out to be would bias the output (see ``decode/verify.py``).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from torch import Tensor

from volley.decode.work import Ask, Rule, Shape
from volley.errors import ConfigError
from volley.policies.cost import Costs


@dataclass(slots=True)
class View:
    """What a policy sees of a decoding request before anything is drafted."""

    request_id: int
    rule: Rule
    """How a chain would be verified."""
    limit: int
    """Most draft positions: the largest block allows no more, or the answer has no room for more."""
    chain_limit: int
    """Most draft positions of a chain; not above ``limit``."""
    max_nodes: int | None = None
    """Tokens of the tree that replaces each chain; 0: no trees, ``None``: as the policy likes."""
    found: list[float] = field(default_factory=list)
    """The confidence of each token that was found in the text: n / (n + 1) where the n tokens before it agree."""

    def draft(self, positions: int, nodes: int = 0, price: float = 0.0) -> Ask:
        """Ask for a draft of ``positions``, 0 for plain decoding: a chain, or a tree of up to ``nodes`` tokens."""
        nodes = nodes if self.max_nodes is None else self.max_nodes
        if nodes and (positions := min(positions, self.limit)):
            return Ask(Shape.TREE, Rule.GREEDY if self.rule is Rule.GREEDY else Rule.MATCH, nodes, positions, price)
        positions = min(positions, self.chain_limit)
        return Ask(Shape.CHAIN, self.rule, positions, positions, price)

    def copy(self, size: int) -> Ask:
        """Ask to verify the first ``size`` tokens that were found in the text."""
        return Ask(Shape.COPY, self.rule, min(size, len(self.found)))


@dataclass(slots=True)
class Cycle:
    """What became of one ask; a policy sees no token."""

    request_id: int
    ask: Ask
    confidence: list[float]
    """For a chain, the drafter's largest probability at each position in its first pass, before anything was drawn: it does not
    depend on sampled tokens. For a tree, whose verification is lossless in any case, each node's probability, the largest first.
    Empty for chains unless :attr:`Policy.uses_confidence`, and in :meth:`Policy.trim` where :meth:`Policy.cuts` was false."""
    found: list[float] = field(default_factory=list)
    """As in :class:`View`."""
    verified: int = 0
    accepted: int = 0
    right: list[bool] = field(default_factory=list)
    """For each token that was verified whether it was accepted, in the order of ``confidence``."""
    found_right: list[bool] = field(default_factory=list)
    """Whether each token that was found in the text was right, used or not, up to the first wrong one."""


class Policy(ABC):
    """The policy of one engine. Each step calls :meth:`decide`, :meth:`trim` and :meth:`observe`.

    If the drafts of a step are dropped because a prompt came, :meth:`trim` and :meth:`observe` are not called.
    """

    uses_confidence = False
    """Whether it needs the drafter's confidences, which take a little time to compute."""
    uses_lookup = False
    """Whether it asks for copies, for which each text is searched."""
    uses_costs = False
    """Whether it uses :attr:`costs`, which are then learnt from every step."""
    uses_prefill = False
    """Whether it needs :meth:`prefilled`."""
    is_steady = False
    """Whether it asks the same of every cycle."""
    block_size = 0
    """The largest block it asks for, anchor included. Before :meth:`attach`, 0 stands for the drafter's own."""
    costs: Costs | None = None

    def attach(self, largest: int, costs: Costs) -> None:
        """Called once by the engine, with the drafter's block size and the costs of passes on this machine."""
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
        """Time the passes of a single request before anything runs, so that the first request need not wait for that."""

    def prefilled(self, request_id: int, temperature: float, logits: Tensor, hidden: Tensor) -> None:
        """Called when a prompt was read: ``logits [V]`` after its last token, and that token's tapped states ``[taps · H]``."""

    @abstractmethod
    def decide(self, views: Sequence[View], under_way: int) -> list[Ask]:
        """The ask of each view. ``under_way`` requests are running or waiting; of these, as many as may run at once count."""

    def keeps_up(self, sampled: Set[bool], under_way: int) -> int:
        """The drafter's context is kept up of each k-th request, of none for 0, while so many are ``under_way``.

        ``sampled`` says of those that run whether any is sampled, and whether any is not. The others rest: they are not drafted
        for, and for a while after.
        """
        return 1

    def cuts(self, ask: Ask) -> bool:
        """Whether :meth:`trim` may cut this draft. Then the host must read it before it is verified."""
        return self.uses_confidence

    def trim(self, cycles: Sequence[Cycle]) -> list[int]:
        """How many tokens of each draft to verify, from the first on; of a tree, from the likeliest on."""
        return [cycle.ask.size for cycle in cycles]

    def observe(self, cycles: Sequence[Cycle]) -> None:
        """Learn what the target accepted."""

    def end(self, request_id: int) -> None:
        """The request is over. It may be said twice."""
