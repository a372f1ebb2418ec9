"""The defaults of a proposer that defines only what it proposes."""

from volley.config import DecodingConfig
from volley.decode.work import Works
from volley.proposers.base import Proposer


class Silent(Proposer):
    def propose(self, works: Works, *, with_confidence: bool) -> float:
        return 0.0


def test_by_default_drafting_is_free_and_grows_no_trees() -> None:
    proposer = Silent()
    assert proposer.seconds(16, 2) == 0
    assert (proposer.block_size, proposer.can_grow_trees) == (1, False)
    proposer.configure(DecodingConfig())
