"""Define two simple policies: one block size for all requests, and one that follows each request's acceptance rate."""

from collections.abc import Sequence, Set

from volley.decode.work import DraftSpec
from volley.errors import ConfigError
from volley.policies.base import Cycle, Policy, View


class Fixed(Policy):
    """Uses one block size for all requests; 1 is plain decoding."""

    is_steady = True

    def __init__(self, block_size: int = 0) -> None:
        """Fix the block size; 0 is the drafter's own."""
        self.block_size = block_size

    def decide(self, views: Sequence[View], under_way: int) -> list[DraftSpec]:
        return [view.draft(self.block_size - 1) for view in views]

    def draft_kv_every(self, sampled: Set[bool], under_way: int) -> int:
        return int(self.block_size > 1)


class Feedback(Policy):
    """Shrinks a request's block after less than 60 % of it was accepted, grows it after more than 90 % (AitherOS DFlash)."""

    def __init__(self, smallest: int = 2, largest: int = 0) -> None:
        """Keep blocks in ``[smallest, largest]``, anchor included; ``largest`` 0 is the drafter's own."""
        if smallest < 2 or 0 < largest < smallest:
            raise ConfigError(f"feedback between blocks of {smallest} and {largest}; give 2 <= smallest <= largest")
        self.smallest, self.block_size = smallest, largest
        self.positions: dict[int, int] = {}

    def decide(self, views: Sequence[View], under_way: int) -> list[DraftSpec]:
        return [view.draft(self.positions.setdefault(view.request_id, self.block_size - 1)) for view in views]

    def observe(self, cycles: Sequence[Cycle]) -> None:
        for cycle in cycles:
            if cycle.verified:
                rate = cycle.accepted / min(cycle.verified, cycle.spec.positions)  # a tree has more nodes than levels
                step = (rate > 0.9) - (rate < 0.6)
                size = min(max(self.positions[cycle.request_id] + step, self.smallest - 1), self.block_size - 1)
                self.positions[cycle.request_id] = size

    def end(self, request_id: int) -> None:
        self.positions.pop(request_id, None)
