"""Proposes what a script says: drafts without a drafter, for tests and experiments."""

from collections.abc import Callable
from typing import Any

from volley.decode.work import Work
from volley.proposers.base import Proposer, Works
from volley.types import Proposal


class ScriptedProposer(Proposer):
    """Give an engine a policy that verifies by matching, or requests that are greedy: a script draws from no distribution."""

    def __init__(self, script: Callable[[Work[Any]], list[int]], block_size: int) -> None:
        """``script`` gives the tokens that may follow a request's text; those beyond what was asked for are left out."""
        self.script, self.block_size = script, block_size

    def propose(self, works: Works, *, with_confidence: bool) -> float:
        for work in works:
            tokens = self.script(work)[: work.ask.positions]
            work.proposal = Proposal(tokens, confidence=[0.5] * len(tokens) if with_confidence else [])
        return 0.0
