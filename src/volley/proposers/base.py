"""What a proposer is: it fills in what may follow each request's text. Verification makes any proposal lossless."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from volley.config import DecodingConfig
from volley.decode.work import Work
from volley.memory.graphs import StaticPasses

Works = Sequence[Work[Any]]


class Proposer(ABC):
    """What fills in the drafts of a step; an engine takes one in its drafter's place."""

    block_size = 1
    """The largest block it can draft, anchor included."""
    drafts_late = False
    """Whether it leaves drafts on the device until they are verified, where nothing needs them before."""
    passes: StaticPasses | None = None
    """Small passes of its model in fixed memory, as CUDA graphs on a GPU; ``None``: all are launched operation by operation."""
    can_grow_trees = False
    """Whether it fills a work of shape ``TREE`` with a tree."""

    @abstractmethod
    def propose(self, works: Works, *, with_confidence: bool) -> float:
        """Fill in ``proposal`` of every work, up to what its ``ask`` says; returns the seconds that a sequential head took.

        Any tokens will do as long as they are chosen without ``request.noise``, which only works whose rule is ``MATCH`` may
        use. Where ``draft_probs`` says which distribution each token was drawn from, a ``SPECULATIVE`` work is verified with
        it; else its tokens are compared with what the target draws. ``with_confidence`` asks for ``Proposal.confidence``.
        """

    def see(self, token_ids: Sequence[int]) -> None:
        """Tokens of a prompt that it will draft for."""

    def configure(self, config: DecodingConfig) -> None:
        """The engine decodes by other settings from now on."""

    def seconds(self, tokens: int, requests: int) -> float:
        """What it takes to draft ``tokens``, anchors included, for ``requests``; measured on made-up text."""
        return 0.0
