"""Define the base class of proposers. A proposer drafts tokens for each request; verification makes any draft lossless."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from volley.config import DecodingConfig
from volley.decode.work import Works
from volley.memory.batch import Segment
from volley.memory.graphs import StaticPasses
from volley.memory.kv_store import KVStore


class Proposer(ABC):
    """Fills in the drafts of a step. An engine can take a proposer instead of a drafter."""

    block_size = 1
    """Largest block that it can draft, anchor included."""
    drafts_on_device = False
    """True if drafts stay on the device until they are verified, unless the host needs them earlier."""
    passes: StaticPasses | None = None
    """Small passes of its model in static buffers, CUDA graphs on a GPU; ``None``: all are launched operation by operation."""
    can_grow_trees = False
    """True if it can draft trees, for works of shape ``TREE``."""

    @abstractmethod
    def propose(self, works: Works, *, with_confidence: bool) -> float:
        """Fill in ``proposal`` of every work, within its ``spec``; return the seconds that a sequential head took.

        Any tokens are allowed, but ``request.noise`` may be used only for works whose rule is ``COUPLED``. A ``REJECTION`` work
        is verified with ``draft_probs``, the distributions that its tokens were drawn from. Without them its tokens are
        compared with those that the target draws. ``with_confidence`` asks for ``Proposal.confidence``.
        """

    def propose_unread(
        self, works: Works, segments: Sequence[Segment], anchors: Tensor, moved: Tensor, *, with_confidence: bool
    ) -> bool:
        """Draft chains of k tokens each on the device, after texts whose ends only the device knows; return False if it
        cannot.

        Each text is extended by ``moved [n]`` tokens and then by ``anchors [n]``. ``segments`` are where the chains would be
        verified if ``moved`` were 0.
        """
        return False

    def see(self, token_ids: Sequence[int]) -> None:
        """Take the tokens of a prompt that it will draft for."""

    def use_store(self, store: KVStore) -> None:
        """Take the store of the target's K/V: those of a request lie on the pages of its ``draft_table``."""

    def configure(self, config: DecodingConfig) -> None:
        """Use these settings from now on. An engine gives its own before the first draft."""

    def seconds(self, tokens: int, requests: int) -> float:
        """Measure the seconds to draft ``tokens``, anchors included, for ``requests``, on made-up text."""
        return 0.0
