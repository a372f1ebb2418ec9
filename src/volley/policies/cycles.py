"""Connect works to a policy: show it each draft, cut the draft, and report the accepted tokens."""

from collections.abc import Sequence
from typing import Any

from volley.decode.lookup import right_so_far
from volley.decode.tree import likeliest_first, prune
from volley.decode.work import Proposal, Work
from volley.policies.base import Cycle, Policy


def trim(policy: Policy, works: Sequence[Work[Any]]) -> list[Cycle]:
    """Cut drafts to what the policy wants to verify. Return a cycle for each work."""
    cycles = []
    for work in works:
        sure = work.proposal.confidence
        sure = sorted(sure, reverse=True) if work.proposal.parents is not None else sure
        cycles.append(Cycle(work.request.request_id, work.spec, sure, work.lookup_confidence))
    if any(work.spec.positions for work in works):
        for work, size in zip(works, policy.trim(cycles), strict=True):
            if work.spec.positions:
                work.proposal = _cut(work.proposal, size)
    return cycles


def conclude(work: Work[Any], cycle: Cycle) -> None:
    """Fill in the outcome of a cycle from the verdict of its work."""
    proposal, verdict = work.proposal, work.verdict
    cycle.confidence = cycle.confidence or proposal.confidence  # for a draft on the device it was not known before
    cycle.verified, cycle.accepted = len(proposal.token_ids), max(0, verdict.accepted)
    if proposal.parents is None:
        cycle.right = [place < verdict.accepted for place in range(cycle.verified)]
    else:
        cycle.right = [node + 1 in (verdict.path or ()) for node in likeliest_first(proposal)]
    cycle.lookup_right = right_so_far(work.lookup_tokens, verdict.token_ids)


def _cut(proposal: Proposal, size: int) -> Proposal:
    assert size >= 0, "a policy verifies no fewer than no tokens"
    if size >= len(proposal.token_ids):
        return proposal
    return proposal.first(size) if proposal.parents is None else prune(proposal, size)
