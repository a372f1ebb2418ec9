"""What a policy is: it decides how much each request drafts and how much of that is verified, cycle by cycle.

Every policy is lossless as long as it decides from what it is given here: never from *sampled* draft tokens. A rule that verified
a token because of what it turned out to be would bias the output (see ``decode/verify.py``).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from volley.decode.work import Ask, Rule, Shape
from volley.errors import ConfigError
from volley.policies.cost import Costs


@dataclass(slots=True)
class View:
    """One request that decodes, as a policy sees it before anything is drafted."""

    request_id: int
    rule: Rule
    """How a chain would be verified."""
    limit: int
    """Draft positions there are: what is left of its answer, at most the largest block."""
    chain_limit: int
    """The same for a chain, which may have fewer."""
    max_nodes: int | None = None
    """Tokens of the tree that replaces each chain; 0: no trees, ``None``: as the policy likes."""
    found: list[float] = field(default_factory=list)
    """A number for each token that was found in its text: n / (n + 1) where n tokens before it agree."""

    def draft(self, positions: int, nodes: int = 0, price: float = 0.0) -> Ask:
        """Draft so many positions, 0 for plain decoding: as a chain, or as a tree of up to ``nodes`` tokens."""
        nodes = nodes if self.max_nodes is None else self.max_nodes
        if nodes and (positions := min(positions, self.limit)):
            return Ask(Shape.TREE, Rule.GREEDY if self.rule is Rule.GREEDY else Rule.MATCH, nodes, positions, price)
        positions = min(positions, self.chain_limit)
        return Ask(Shape.CHAIN, self.rule, positions, positions, price)

    def copy(self, size: int) -> Ask:
        """Verify so many of the tokens that were found in the text."""
        return Ask(Shape.COPY, self.rule, min(size, len(self.found)))


@dataclass(slots=True)
class Cycle:
    """What became of one ask; a policy sees no token."""

    request_id: int
    ask: Ask
    confidence: list[float]
    """The drafter's largest probability for each position in its first pass, before anything was drawn: nothing in it depends on
    the tokens that were sampled. Of a tree, whose verification is lossless whatever was drafted: each node's probability, the
    largest first. Empty unless :attr:`Policy.uses_confidence` or a tree; in
    :meth:`Policy.trim` also where :meth:`Policy.cuts` was false."""
    found: list[float] = field(default_factory=list)
    """As in :class:`View`."""
    verified: int = 0
    accepted: int = 0
    right: list[bool] = field(default_factory=list)
    """For each token that was verified whether it was accepted, in the order of ``confidence``."""
    found_right: list[bool] = field(default_factory=list)
    """For each token that was found in the text whether it was right, as far as is known now, used or not."""


class Policy(ABC):
    """One engine's policy. In each step it is called three times: :meth:`decide`, :meth:`trim`, :meth:`observe`.

    The last two are left out where drafts are dropped because a prompt came.
    """

    uses_confidence = False
    """Whether the drafter's confidences are wanted, which cost a little to compute."""
    uses_lookup = False
    """Whether it decides about copies, for which each text is searched."""
    uses_costs = False
    """Whether it weighs what passes cost, so that these are learnt from every step."""
    uses_prefill = False
    """Whether :meth:`prefilled` is wanted."""
    block_size = 0
    """The largest block the policy will ask for, anchor included; until :meth:`attach`, a wish or 0 for the drafter's own."""
    costs: Costs | None = None

    def attach(self, largest: int, costs: Costs) -> None:
        """Called once by the engine: its drafter's block size and the times of its passes on this machine."""
        if self.costs is not None and self.costs is not costs:
            raise ConfigError("this policy object already serves another engine; give each engine its own")
        size = self.block_size or largest
        if size < 1 or (largest == 1 and size != 1):
            raise ConfigError(f"block_size {size} cannot be used; it is 1 (plain decoding) or more, with a drafter")
        if size > largest:
            raise ConfigError(
                f"block_size {size} is beyond the {largest} the drafter was trained for; give that or less"
            )
        self.block_size, self.costs = size, costs

    def rehearse(self) -> None:
        """Time the passes of a single request, so that the first one need not wait for it; called where nothing runs yet."""

    def prefilled(self, request_id: int, temperature: float, logits: Tensor, hidden: Tensor) -> None:
        """A prompt was read: the target's ``logits [V]`` after its last token, and that token's ``hidden [taps · H]`` states."""

    @abstractmethod
    def decide(self, views: Sequence[View], under_way: int) -> list[Ask]:
        """What each request drafts, while ``under_way`` requests are running or waiting."""

    def cuts(self, ask: Ask) -> bool:
        """Whether :meth:`trim` may cut such a draft, which the host must then read before it is verified."""
        return self.uses_confidence

    def trim(self, cycles: Sequence[Cycle]) -> list[int]:
        """How many tokens of each draft to verify, from the first on; of a tree, from the likeliest on."""
        return [cycle.ask.size for cycle in cycles]

    def observe(self, cycles: Sequence[Cycle]) -> None:
        """What the target made of it."""

    def end(self, request_id: int) -> None:
        """The request is over."""
