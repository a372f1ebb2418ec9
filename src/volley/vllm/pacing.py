"""Connection of vLLM's passes to a policy: drafts made after one pass are verified in the next."""

from collections.abc import Mapping, Sequence
from statistics import median

from volley.decode.work import Rule, Work
from volley.policies.base import Cycle, Policy, View
from volley.policies.cost import Costs, Measure
from volley.policies.cycles import trim
from volley.vllm.drafting import SlotRequest

_LESSON = 8  # passes timed before a cost-weighing policy decides


class PassPacing:
    """Ask the policy how much to draft and verify, and report the result to it.

    A policy that weighs costs needs pass times. vLLM's passes cannot be measured in advance, so the first few draft whole blocks.
    The time above the estimate of ``measure_target`` is vLLM's overhead, assumed equal for every pass.
    """

    def __init__(self, policy: Policy, largest: int, measure_draft: Measure, measure_target: Measure) -> None:
        self.policy, self._estimate = policy, measure_target
        self.costs = Costs(measure_draft, lambda *sizes: max(0.0, median(self._overheads)) + measure_target(*sizes))
        policy.attach(largest, self.costs)
        self._overheads: list[float] = []
        self._asked: list[tuple[Work[SlotRequest], Cycle]] = []
        self.known: set[int] = set()
        """Requests known to the policy that have not ended."""

    @property
    def is_learning(self) -> bool:
        return self.policy.uses_costs and len(self._overheads) < _LESSON

    def timed(self, tokens: int, requests: int, seconds: float) -> None:
        """Record that a pass over ``tokens`` of ``requests``, all decoding, took ``seconds`` without drafting."""
        if self.is_learning:
            self._overheads.append(seconds - self._estimate(tokens, requests))
        else:
            self.costs.target.observe(tokens, requests, seconds)

    def decide(self, requests: Sequence[SlotRequest], limits: Sequence[int]) -> list[Work[SlotRequest]]:
        """Return what each request drafts, within its limit."""
        most = self.policy.block_size - 1
        views = [
            View(request.request_id, Rule.GREEDY, min(limit, most), min(limit, most), max_nodes=0)
            for request, limit in zip(requests, limits, strict=True)
        ]
        self.known.update(request.request_id for request in requests)
        specs = [view.draft(most) for view in views] if self.is_learning else self.policy.decide(views, len(views))
        return [Work(request, spec) for request, spec in zip(requests, specs, strict=True)]

    def trim(self, works: Sequence[Work[SlotRequest]]) -> None:
        """Cut the proposals to the length that the policy wants verified."""
        if not self.is_learning:
            self._asked = list(zip(works, trim(self.policy, works), strict=True))

    def judge(self, judged: Mapping[int, tuple[int, int]]) -> None:
        """Report to the policy the numbers of verified and accepted draft tokens of each continuing request."""
        asked, self._asked = self._asked, []
        for work, cycle in asked:
            verified, accepted = judged.get(cycle.request_id, (0, 0))
            # Near the model's last position vLLM verifies tokens of its own.
            if verified <= len(work.proposal.token_ids):
                cycle.verified, cycle.accepted = verified, accepted
                cycle.right = [place < accepted for place in range(verified)]
        if asked:
            self.policy.observe([cycle for _, cycle in asked])
        for request_id in self.known - judged.keys():
            self.policy.end(request_id)
        self.known &= judged.keys()
