"""The base class of proposers. A proposer drafts tokens behind each request's text; verification makes any draft lossless."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from volley.config import DecodingConfig
from volley.decode.work import Work
from volley.memory.batch import Segment
from volley.memory.graphs import StaticPasses

Works = Sequence[Work[Any]]


class Proposer(ABC):
    """Fills in the drafts of a step. An engine takes one instead of a drafter."""

    block_size = 1
    """The largest block that it can draft, anchor included."""
    drafts_late = False
    """Whether it leaves drafts on the device until they are verified, unless something needs them before."""
    passes: StaticPasses | None = None
    """Small passes of its model in fixed memory, CUDA graphs on a GPU; ``None``: all are launched operation by operation."""
    can_grow_trees = False
    """Whether it can draft trees, for works of shape ``TREE``."""

    @abstractmethod
    def propose(self, works: Works, *, with_confidence: bool) -> float:
        """Fill in ``proposal`` of every work, within its ``ask``; returns the seconds that a sequential head took.

        Any tokens are allowed. But ``request.noise`` may be used only for works whose rule is ``MATCH``. A ``SPECULATIVE`` work
        with ``draft_probs``, the distributions that its tokens were drawn from, is verified with these; without them its tokens
        are compared with those that the target draws. ``with_confidence`` asks for ``Proposal.confidence``.
        """

    def propose_unread(
        self, works: Works, segments: Sequence[Segment], anchors: Tensor, moved: Tensor, *, with_confidence: bool
    ) -> bool:
        """:meth:`propose` late chains of k tokens each, behind texts whose ends only the device knows; False if it cannot.

        Each text goes on by ``moved [n]`` tokens and then by ``anchors [n]``. ``segments`` are where the chains would be verified
        if ``moved`` were 0.
        """
        return False

    def see(self, token_ids: Sequence[int]) -> None:
        """Tokens of a prompt that it will draft for."""

    def configure(self, config: DecodingConfig) -> None:
        """Use other settings from now on."""

    def seconds(self, tokens: int, requests: int) -> float:
        """Seconds to draft ``tokens``, anchors included, for ``requests``; measured on made-up text."""
        return 0.0
