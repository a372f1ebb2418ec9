"""Connect the engine to its policy: ask it before and after drafting, and report results to it and to the cost tables."""

import time
from collections.abc import Sequence

from volley.decode.lookup import MOST_LOOKUP_TOKENS
from volley.decode.work import NO_DRAFT, Phase, Work
from volley.engine.step import Step
from volley.policies.base import Policy
from volley.policies.cost import Costs
from volley.policies.cycles import conclude, trim
from volley.procedures.request import Request


class Pacing:
    def __init__(self, policy: Policy, costs: Costs, *, can_grow_trees: bool, can_suspend: bool = False) -> None:
        """Connect ``policy`` to ``costs``. ``can_suspend`` is True if drafting can resume after tokens without
        draft K/V."""
        self.policy, self.costs, self.can_grow_trees, self.can_suspend = policy, costs, can_grow_trees, can_suspend
        self._may_give_way = True
        self._num_timed = 0

    def decide(self, requests: Sequence[Request], under_way: int) -> list[Work[Request]]:
        """Make the work of each of ``requests``, all of which decode."""
        views = [request.procedure.view(request, self.policy.block_size) for request in requests]
        found: list[tuple[list[int], list[float]]] = []
        for request, view in zip(requests, views, strict=True):
            found.append(([], []))
            if view is not None:
                view.max_nodes = view.max_nodes if self.can_grow_trees else 0
                if self.policy.uses_lookup and request.length != request.plain_at:
                    found[-1] = request.find(min(MOST_LOOKUP_TOKENS, request.remaining - 1))
                    view.lookup_confidence = found[-1][1]
        asked = [view for view in views if view is not None]
        specs = iter(self.policy.decide(asked, under_way) if asked else [])
        works = []
        for request, view, (tokens, sure) in zip(requests, views, found, strict=True):
            work = request.procedure.next_work(request, NO_DRAFT if view is None else next(specs))
            work.lookup_tokens, work.lookup_confidence = tokens, sure
            work.may_stay_on_device = request.procedure.reads_on_device and not self.policy.cuts(work.spec)
            works.append(work)
        return works

    def suspend_drafting(self, works: Sequence[Work[Request]], running: Sequence[Request], under_way: int) -> None:
        """Set which requests of ``works`` suspend drafting: no draft K/V are made for their tokens."""
        if self.can_suspend:
            every = self.policy.draft_kv_every({request.params.temperature > 0 for request in running}, under_way)
            for work in works:
                is_kept = every == 1 or (every > 0 and work.request.request_id % every == 0)
                is_followed = work.request.procedure.is_followed(work.request.params)
                work.request.drafting_suspended = not (is_followed and (is_kept or work.spec.positions))

    def gives_way(self, step: Step) -> bool:
        """Return True if the step is dropped because a prompt arrived before its target pass. Drafts are made again after the
        prompt.

        Output does not change: the dropped draft tokens were not read, and the new ones are drawn with the same noise. The
        step after a dropped one always runs to its end.
        """
        newcomers, works = self.costs.arrivals.newcomers, step.works
        only_drafts = len(step.decoding) == len(works) and any(work.spec.positions for work in works)
        if not (self._may_give_way and only_drafts and newcomers is not None and newcomers()):
            return False
        self._may_give_way = False
        return True

    def trim(self, step: Step) -> None:
        """Cut each draft to the tokens that the policy wants to verify."""
        step.cycles = trim(self.policy, step.decoding)

    def observe(self, step: Step) -> None:
        """Report accepted tokens to the policy, and pass it each prompt that was read to its end."""
        self._read_prompts(step)
        for work, cycle in zip(step.decoding, step.cycles, strict=True):
            conclude(work, cycle)
        if step.cycles:
            self.policy.observe(step.cycles)

    def time(self, step: Step) -> None:
        """Report the seconds of a finished step to the cost tables. Host work outside the passes counts as the target's."""
        seconds, costs = time.perf_counter() - step.started, self.costs
        self._may_give_way = True
        passing = seconds - step.settling - step.drafting
        assert step.batch is not None
        if not step.cycles:
            # Some decoding methods draft and verify by themselves, with no prompt in the same pass.
            if all(work.phase in (Phase.DENOISE, Phase.VERIFY) for work in step.works):
                costs.target.observe(len(step.batch), len(step.works), passing)
            return
        costs.arrivals.decoded(seconds)
        before, self._num_timed = self._num_timed, costs.draft.num_timed + costs.target.num_timed
        if not self.policy.uses_costs or before != self._num_timed:  # passes were timed within this step
            return
        drafts = [cycle.spec.positions for cycle in step.cycles if cycle.spec.positions]
        drafted = len(drafts) + sum(drafts), len(drafts)
        verified = sum(1 + cycle.verified for cycle in step.cycles), len(step.cycles)
        drafting = step.drafting
        if step.is_on_device:
            drafting, passing = costs.shares(drafted, verified, drafting + passing)
        made = sum(len(work.verdict.token_ids) for work in step.decoding)
        costs.learn(drafted, verified, (drafting, passing), made=made, read=len(step.batch) - verified[0])

    def _read_prompts(self, step: Step) -> None:
        """Record the time of each first token, and give the policy the end of its prompt if it needs that."""
        now = time.perf_counter()
        for index, work in enumerate(step.works):
            request = work.request
            if work.phase is not Phase.PREFILL or not work.verdict.token_ids or request.num_output:
                continue
            self.costs.arrivals.read(now - request.arrived)
            if self.policy.uses_prefill and step.features is not None:
                assert step.logits is not None
                assert step.batch is not None
                logits, hidden = step.logits[work.rows.start], step.features[step.batch.offsets[index + 1] - 1]
                self.policy.prefilled(request.request_id, request.params.temperature, logits, hidden)
