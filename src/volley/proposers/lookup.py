"""Proposes what was found in the text (``decode/lookup.py``)."""

from volley.proposers.base import Proposer, Works
from volley.types import Proposal


class TextLookup(Proposer):
    """Copies: the search came before the policy, which had to know what there is."""

    def propose(self, works: Works, *, with_confidence: bool) -> float:
        for work in works:
            work.proposal = Proposal(work.found[: work.ask.size])
        return 0.0
