"""Block-size policies: how many tokens each request drafts and how many of them are verified, cycle by cycle.

Every policy is lossless as long as it decides from what it is given here: never from the *sampled* draft tokens. A rule that
verified a token because of what it turned out to be would bias what is emitted (see ``decode/verify.py``).
"""

from dataclasses import dataclass, field

from torch import Tensor

from volley.decode.cost import Costs
from volley.errors import ConfigError


@dataclass(slots=True)
class Decoding:
    """The R requests that decode in one step."""

    request_ids: list[int]
    limits: list[int]
    """Slots that each may draft: what is left of its answer, at most the largest block."""
    sampled: list[bool]
    """Whether the request's temperature is above 0."""
    trees: list[bool]
    """Whether its slots are the levels of a tree; else the block is a chain."""
    nodes: int = 0
    """Of each tree, at most, anchor not counted."""

    def __len__(self) -> int:
        return len(self.request_ids)


@dataclass(slots=True)
class Cycle:
    """What became of one step; R numbers each."""

    requests: Decoding
    drafted: list[int]
    """Slots drafted; 0 where tokens found in the text took their place."""
    verified: list[int]
    """Tokens of these, nodes of a tree or slots of a chain, or tokens found, that went to the target."""
    accepted: list[int]
    """Of these, tokens that the target agreed with."""
    right: list[list[bool]]
    """For each token that went to the target whether it was accepted, in the order of ``confidence``."""
    found: list[list[bool]] = field(default_factory=list)
    """For each token that was found in the text whether it was right, as far as is known now, used or not."""


class BlockSizePolicy:
    """One engine's policy; subclass it and override :meth:`draft`, the rest where wanted."""

    uses_confidence = False
    """Whether :meth:`verify` reads the drafter's confidences, which cost a little to compute."""
    uses_lookup = False
    """Whether :meth:`look_up` is asked, for which each text is searched."""
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

    def prefilled(self, request_id: int, temperature: float, logits: Tensor, hidden: Tensor) -> None:
        """A prompt was read, and none of its answer is known: the target's ``logits [V]`` after its last token, and that
        token's ``hidden [taps · H]`` states in the layers that the drafter reads.
        """

    def rehearse(self) -> None:
        """Time the passes of a single request, so that the first one need not wait for it; called where nothing runs yet."""

    def tree_nodes(self, num_requests: int, *, speculative: bool) -> int:
        """Nodes to verify as a tree for each request while so many are under way, anchor not counted; 0: chains.

        Asked where the engine's options leave it open, for sampled requests whose chains would be verified by ``speculative``
        sampling, and for all others. Trees are matched.
        """
        return 0

    def draft(self, requests: Decoding) -> list[int]:
        """Slots to draft for each request, at most its limit; 0 is plain decoding."""
        raise NotImplementedError

    def look_up(self, requests: Decoding, drafting: list[int], confidence: list[list[float]]) -> list[int]:
        """How many of the tokens found in the text to verify for each request, instead of ``drafting`` slots; 0: draft these.

        ``confidence`` holds a number for each token that was found: n / (n + 1) where n tokens before it agree.
        """
        return [0] * len(requests)

    def verify(self, requests: Decoding, drafted: list[int], confidence: list[list[float]]) -> list[int]:
        """How many of the drafted slots to verify, from the first on; of a tree, how many nodes, from the likeliest on.

        ``confidence`` holds, for each request and drafted slot, the drafter's largest probability in its first pass, before
        anything was drawn: nothing in it depends on the tokens that were sampled. For a tree, whose verification is lossless
        whatever was drafted, each node's probability, the largest first. Empty unless :attr:`uses_confidence` or a tree.
        """
        return [
            len(row) if is_tree else size
            for size, row, is_tree in zip(drafted, confidence, requests.trees, strict=True)
        ]

    def observe(self, cycle: Cycle) -> None:
        """What the target made of it."""

    def end(self, request_id: int) -> None:
        """The request is over."""


class Fixed(BlockSizePolicy):
    """The same block for everyone; 1 is plain decoding."""

    def __init__(self, block_size: int = 0) -> None:
        """``block_size`` 0 is the drafter's own."""
        self.block_size = block_size

    def draft(self, requests: Decoding) -> list[int]:
        return [min(limit, self.block_size - 1) for limit in requests.limits]


class Feedback(BlockSizePolicy):
    """Shrink a request's block after a cycle with too few accepted, grow it after one with nearly all (AitherOS DFlash)."""

    def __init__(
        self, smallest: int = 2, largest: int = 0, *, shrink_below: float = 0.6, grow_above: float = 0.9
    ) -> None:
        """Blocks stay in ``[smallest, largest]``, anchor included; ``largest`` 0 is the drafter's own."""
        if smallest < 2 or 0 < largest < smallest:
            raise ConfigError(f"feedback between blocks of {smallest} and {largest}; give 2 <= smallest <= largest")
        if not 0 <= shrink_below < grow_above <= 1:
            raise ConfigError(
                f"feedback shrinks below {shrink_below} and grows above {grow_above}; give 0 <= a < b <= 1"
            )
        self.smallest, self.block_size = smallest, largest
        self.shrink_below, self.grow_above = shrink_below, grow_above
        self.slots: dict[int, int] = {}

    def draft(self, requests: Decoding) -> list[int]:
        wanted = [self.slots.setdefault(i, self.block_size - 1) for i in requests.request_ids]
        return [min(limit, slots) for limit, slots in zip(requests.limits, wanted, strict=True)]

    def observe(self, cycle: Cycle) -> None:
        for request_id, drafted, verified, accepted in zip(
            cycle.requests.request_ids, cycle.drafted, cycle.verified, cycle.accepted, strict=True
        ):
            if verified:
                rate = accepted / min(verified, drafted)  # a tree has more nodes than levels
                step = (rate > self.grow_above) - (rate < self.shrink_below)
                size = min(max(self.slots[request_id] + step, self.smallest - 1), self.block_size - 1)
                self.slots[request_id] = size

    def end(self, request_id: int) -> None:
        self.slots.pop(request_id, None)
