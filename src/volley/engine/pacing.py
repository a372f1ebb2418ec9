"""Between the engine and its block-size policy: asks it before and after drafting, carries out what it says, reports back."""

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from volley.decode.block_size import BlockSizePolicy, Cycle, Decoding, Feedback, Fixed
from volley.decode.cost import Costs
from volley.decode.goodput import Goodput
from volley.decode.lookup import MOST_AGREED, MOST_FOUND
from volley.decode.pilot import load_pilot
from volley.decode.tree import likeliest_first, prune
from volley.engine.rehearsal import Rehearsal
from volley.engine.request import Request
from volley.engine.runner import Runner
from volley.engine.scheduler import Scheduled
from volley.errors import ConfigError, unknown_key
from volley.models.drafter import Drafter
from volley.types import Proposal, Verdict

_SURE = [n / (n + 1) for n in range(MOST_AGREED + MOST_FOUND)]  # of a token of which n before it agree

POLICIES: dict[str, Callable[[], BlockSizePolicy]] = {"feedback": Feedback, "fixed": Fixed, "goodput": Goodput}


def make_policy(spec: str | BlockSizePolicy, drafter: Drafter | None) -> BlockSizePolicy:
    """A policy from its name: ``goodput``, ``feedback``, ``fixed`` (the drafter's block), ``fixed:8``, or ``pilot``, which
    ``volley pilot`` left beside the drafter; ``pilot:FOLDER`` is one kept elsewhere. ``goodput:drafts`` copies nothing from the
    text.
    """
    if isinstance(spec, BlockSizePolicy):
        return spec
    name, colon, argument = spec.partition(":")
    if name == "fixed" and colon:
        if not argument.isdecimal() or int(argument) < 1:
            raise ConfigError(f"policy {spec!r} has no usable block size; give one such as fixed:8")
        return Fixed(int(argument))
    if name == "pilot":
        if drafter is None:
            raise ConfigError("policy 'pilot' decides how much a drafter drafts, and there is none; name a drafter")
        return load_pilot(drafter, argument or None)
    if spec == "goodput:drafts":
        return Goodput(uses_lookup=False)
    if name not in POLICIES:
        raise unknown_key("policy", name, [*POLICIES, "pilot"])
    if colon:
        known = " but 'drafts'" if name == "goodput" else ""
        raise ConfigError(f"policy {name!r} takes nothing after a colon{known}; {argument!r} was given")
    return POLICIES[name]()


class Pacer:
    """Decides nothing itself: it turns requests into arrays and the policy's answers into block sizes."""

    def __init__(self, runner: Runner, largest: int) -> None:
        self._runner = runner
        self._largest = largest
        rehearsal = Rehearsal(runner)
        self._costs = Costs(rehearsal.draft, rehearsal.target, rehearsal.rows)
        self._asked: tuple[list[Request], Decoding] | None = None
        self._members: list[int] = []  # places in the plan of those that decode
        self._cycle: Cycle | None = None
        self._proposals: list[Proposal] = []
        self._drafted_at = self._drafting = 0.0  # when drafting ended and how long it took, in seconds
        self._policy: BlockSizePolicy = Fixed(1)

    @property
    def policy(self) -> BlockSizePolicy:
        return self._policy

    @policy.setter
    def policy(self, policy: BlockSizePolicy) -> None:
        policy.attach(self._largest, self._costs)
        policy.rehearse()
        self._policy = policy
        self._runner.measures_confidence = policy.uses_confidence

    def _decoding(self, requests: list[Request]) -> Decoding:
        if self._asked is not None and self._asked[0] == requests:
            return self._asked[1]
        most = self._policy.block_size - 1
        return Decoding(
            [request.request_id for request in requests],
            [min(most, self._most_slots(request)) for request in requests],
            [request.params.temperature > 0 for request in requests],
            [request.draft_nodes > 0 for request in requests],
            max((request.draft_nodes for request in requests), default=0),
        )

    def _most_slots(self, request: Request) -> int:
        most = request.remaining - 1
        if request.is_coupled and not request.draft_nodes and not self._runner.options.matches(request.params):
            return min(most, request.foreseen - len(request.token_ids))  # it is to foresee no more
        return most

    def _choose_shapes(self, requests: list[Request], num_requests: int) -> None:
        """Chains or trees, and which sampled requests are matched in this step."""
        options, nodes = self._runner.options, dict[bool, int]()  # where chains would be speculative, and where not
        for request in requests:
            is_sampled, is_bound = request.params.temperature > 0, len(request.token_ids) < request.foreseen
            is_speculative = is_sampled and not options.matches(request.params)
            if is_speculative not in nodes:
                nodes[is_speculative] = self._tree_nodes(num_requests, is_speculative)
            request.draft_nodes = nodes[is_speculative]
            request.is_coupled = is_sampled and (is_bound or request.draft_nodes > 0 or not is_speculative)

    def _tree_nodes(self, num_requests: int, is_speculative: bool) -> int:
        options = self._runner.options
        if options.tree_nodes is not None:
            return options.tree_nodes - 1
        return self._policy.tree_nodes(num_requests, speculative=is_speculative) if options.may_grow_trees else 0

    @property
    def _acts(self) -> bool:
        return self._largest > 1 or self._policy.uses_lookup

    def before_drafting(self, running: Sequence[Request], num_waiting: int) -> None:
        """Set how many slots each decoding request drafts in this step, or how many tokens it takes from its text."""
        self._asked = None
        decoding = [request for request in running if request.is_decoding]
        for request in decoding:
            request.found, request.copied = [], 0
        if not decoding or not self._acts:
            return
        self._choose_shapes(decoding, len(running) + num_waiting)
        requests = self._decoding(decoding)
        self._asked = (decoding, requests)
        slots = self._policy.draft(requests)
        for request, size, limit in zip(decoding, slots, requests.limits, strict=True):
            assert 0 <= size <= limit, "a policy drafts within the limits it was given"
            request.draft_slots = size
        if self._policy.uses_lookup:
            self._look_up(decoding, requests, slots)

    def _look_up(self, decoding: list[Request], requests: Decoding, slots: list[int]) -> None:
        confidence: list[list[float]] = []
        for request in decoding:
            request.found, agreed = request.lookup.find(request.token_ids, min(MOST_FOUND, request.remaining - 1))
            confidence.append(_SURE[agreed : agreed + len(request.found)])
        counts = self._policy.look_up(requests, slots, confidence)
        for request, count in zip(decoding, counts, strict=True):
            assert 0 <= count <= len(request.found), "a policy verifies no more than was found"
            if count:
                request.draft_slots, request.copied = 0, count

    def after_prefill(self, plan: Sequence[Scheduled], proposals: Sequence[Proposal], logits: Tensor) -> None:
        """Show the policy the prompts that were read to their end; ``logits`` are those of :meth:`Runner.verify`."""
        if not self._policy.uses_prefill or self._largest == 1:
            return
        row = 0
        for place, (scheduled, proposal) in enumerate(zip(plan, proposals, strict=True)):
            request = scheduled.request
            if scheduled.emits and not request.num_output:
                hidden = self._runner.last_hidden(place)
                self._policy.prefilled(request.request_id, request.params.temperature, logits[row], hidden)
            row += scheduled.emits * (1 + len(proposal.token_ids))

    def after_drafting(self, plan: list[Scheduled], proposals: list[Proposal]) -> list[Proposal]:
        """Cut the proposals to what the policy wants verified."""
        self._members = [place for place, scheduled in enumerate(plan) if scheduled.request.is_decoding]
        for scheduled, proposal in zip(plan, proposals, strict=True):
            request = scheduled.request
            if scheduled.max_draft and request.params.temperature > 0 and proposal.draft_probs is None:
                request.foreseen = max(request.foreseen, len(request.token_ids) + scheduled.max_draft)
        requests = self._decoding([plan[place].request for place in self._members])
        drafted = [plan[place].max_draft for place in self._members]
        if any(drafted):
            own = [proposals[place] for place in self._members]
            wanted = self._policy.verify(requests, drafted, [_likeliest_first(proposal) for proposal in own])
            for place, slots, size in zip(self._members, drafted, wanted, strict=True):
                assert 0 <= size <= len(proposals[place].token_ids), "a policy verifies no more than was drafted"
                if slots:
                    proposals[place] = _cut(proposals[place], size)
        verified = [len(proposals[place].token_ids) for place in self._members]
        self._cycle = Cycle(requests, drafted, verified, [], [])
        self._proposals = proposals
        self._drafted_at, self._drafting = time.perf_counter(), self._runner.timings.draft
        return proposals

    def after_judging(self, plan: Sequence[Scheduled], verdicts: Sequence[Verdict]) -> None:
        """Tell the policy how it went, and the cost tables what it took."""
        cycle, proposals = self._cycle, self._proposals
        self._proposals = []  # laws are large
        if cycle is None or not self._members or not self._acts:
            return
        cycle.accepted = [verdicts[place].accepted for place in self._members]
        cycle.right = [_right(proposals[place], verdicts[place]) for place in self._members]
        cycle.found = [_agreement(plan[place].request.found, verdicts[place].token_ids) for place in self._members]
        seconds, requests = time.perf_counter() - self._drafted_at, len(self._members)
        tokens = requests + sum(cycle.verified)
        read, padding = len(self._runner.batch) - tokens, requests * (1 + max(cycle.verified)) - tokens
        self._costs.target.observe(tokens, requests, seconds, read, padding)
        if drafting := sum(size > 0 for size in cycle.drafted):
            self._costs.draft.observe(drafting + sum(cycle.drafted), drafting, self._drafting)
        self._policy.observe(cycle)


def _agreement(found: list[int], token_ids: list[int]) -> list[bool]:
    """Of tokens found, up to the first that is wrong, which were right."""
    marks: list[bool] = []
    for one, other in zip(found, token_ids, strict=False):
        marks.append(one == other)
        if one != other:
            break
    return marks


def _likeliest_first(proposal: Proposal) -> list[float]:
    """Confidences in the order in which a policy verifies them."""
    return sorted(proposal.confidence, reverse=True) if proposal.parents is not None else proposal.confidence


def _cut(proposal: Proposal, size: int) -> Proposal:
    if size == len(proposal.token_ids):
        return proposal
    if proposal.parents is not None:
        return prune(proposal, size)
    law = None if proposal.draft_probs is None else proposal.draft_probs[:size]
    return Proposal(proposal.token_ids[:size], law, confidence=proposal.confidence)


def _right(proposal: Proposal, verdict: Verdict) -> list[bool]:
    """For each token that was verified whether it was accepted, in the order of :func:`_likeliest_first`."""
    if proposal.parents is None:
        return [place < verdict.accepted for place in range(len(proposal.token_ids))]
    return [node + 1 in (verdict.path or ()) for node in likeliest_first(proposal)]
