"""Draft by a script, without a drafter: for tests and experiments."""

from collections.abc import Callable
from typing import Any

from volley.decode.work import Proposal, Work, Works
from volley.proposers.base import Proposer


class ScriptedProposer(Proposer):
    """Drafts scripted tokens. They have no known distribution, so sampled requests compare them with the target's."""

    def __init__(self, script: Callable[[Work[Any]], list[int]], block_size: int) -> None:
        """Draft with ``script``, which returns the next tokens of a request; those beyond its draft spec are dropped."""
        self.script, self.block_size = script, block_size

    def propose(self, works: Works, *, with_confidence: bool) -> float:
        for work in works:
            tokens = self.script(work)[: work.spec.positions]
            work.proposal = Proposal(tokens, confidence=[0.5] * len(tokens) if with_confidence else [])
        return 0.0
