"""Between vLLM's passes and a block-size policy: what was drafted in one pass is judged in the next."""

from collections.abc import Mapping
from statistics import median

from volley.decode.block_size import BlockSizePolicy, Cycle, Decoding
from volley.decode.cost import Costs, Measure

_LESSON = 8  # passes whose times are taken before a policy that weighs costs is asked


class Pacing:
    """Asks the policy how much to draft and to verify, and tells it what became of that.

    A policy that weighs costs needs to know what a pass takes. vLLM's cannot be rehearsed, so whole blocks are drafted for the
    first few passes; what these take beyond the estimate ``measure_target`` is vLLM's own time, the same for every pass.
    """

    def __init__(self, policy: BlockSizePolicy, largest: int, measure_draft: Measure, measure_target: Measure) -> None:
        self._estimate = measure_target
        self._costs = Costs(measure_draft, self._measure_target)
        policy.attach(largest, self._costs)
        self.policy = policy
        self._overheads: list[float] = []
        self._cycle: Cycle | None = None
        self._known: set[int] = set()

    @property
    def is_learning(self) -> bool:
        return self.policy.uses_confidence and len(self._overheads) < _LESSON

    def _measure_target(self, tokens: int, requests: int) -> float:
        return max(0.0, median(self._overheads)) + self._estimate(tokens, requests)

    def after_pass(self, judged: Mapping[int, tuple[int, int]]) -> None:
        """Of each request that goes on, how many draft tokens were verified and how many accepted."""
        cycle, self._cycle = self._cycle, None
        if cycle is not None:
            for index, request_id in enumerate(cycle.requests.request_ids):
                verified, accepted = judged.get(request_id, (0, 0))
                known = (
                    verified <= cycle.verified[index]
                )  # near the model's last position vLLM verifies tokens of its own
                cycle.verified[index] = verified if known else 0
                cycle.accepted.append(accepted if known else 0)
                cycle.right.append([slot < cycle.accepted[-1] for slot in range(cycle.verified[index])])
            self.policy.observe(cycle)
        for request_id in self._known - judged.keys():
            self.policy.end(request_id)
        self._known &= judged.keys()

    def timed(self, tokens: int, requests: int, seconds: float) -> None:
        """A pass over ``tokens`` of ``requests`` that all decode took ``seconds``, drafting aside."""
        if self.is_learning:
            self._overheads.append(seconds - self._estimate(tokens, requests))
        elif self.policy.uses_confidence:
            self._costs.target.observe(tokens, requests, seconds)

    def drafted(self, tokens: int, requests: int, seconds: float) -> None:
        if not self.is_learning and self.policy.uses_confidence:
            self._costs.draft.observe(tokens, requests, seconds)

    def draft(self, request_ids: list[int], limits: list[int]) -> list[int]:
        """Slots to draft for each request, within its limit. vLLM does not tell which requests are sampled."""
        most = self.policy.block_size - 1
        no = [False] * len(request_ids)
        requests = Decoding(request_ids, [min(limit, most) for limit in limits], no, no)
        self._known.update(request_ids)
        if self.is_learning:
            return requests.limits
        slots = self.policy.draft(requests)
        self._cycle = Cycle(requests, slots, list(slots), [], [])
        return slots

    def verify(self, confidence: list[list[float]]) -> list[int]:
        """How many of the drafted slots to have verified."""
        cycle = self._cycle
        assert cycle is not None, "a learning policy is not asked"
        cycle.verified = list(self.policy.verify(cycle.requests, cycle.drafted, confidence))
        return list(cycle.verified)
