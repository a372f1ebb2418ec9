"""Decide by goodput (the default policy): draft and verify what maximises tokens per second, and nothing if drafting does not
pay.

It maximises ``E[tokens of a request in a cycle] / (T_draft + T_target)`` (left as future work by DFlash §5.4.4), with the
geometric mean over the requests. An arithmetic mean would serve the fast requests first and soon leave a batch of slow ones.
``docs/how-it-works.md`` explains it.
"""

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from itertools import zip_longest
from math import log

import numpy as np

from volley.decode.lookup import MOST_LOOKUP_TOKENS
from volley.decode.work import DraftSpec, Rule, Shape
from volley.policies.acceptance import KINDS, OF_LOOKUP, TREE, Acceptance
from volley.policies.base import Cycle, Policy, View
from volley.policies.plan import Plan, Planner, fitting
from volley.policies.probes import WORTHWHILE, cycles_between

_REVIEW = 64  # cycles between two reviews, each of which takes 0.5 to 1 ms; the first ones come sooner
_REMEMBERED = 64  # blocks of each kind that a review uses: their mean is known to some 5 %
_ENOUGH = 8  # blocks of a kind before its first review; until then blocks are whole
_FEW = 2  # requests up to which each is judged by its own blocks, because texts differ
_OPENING = 3  # number of first blocks of each of a few requests
_PROBED = 3  # positions of these blocks
_PROMISING = 2.0  # least speedup of an opening's cycle whose tokens are all right
_PRIOR = 2  # blocks of earlier requests that count beside those of a few requests
_MOST_TRUST = 1.5  # bound of how much better than expected drafts count
_SOON = 4  # least number of cycles between two reviews
_NODES = 15  # nodes of a tree, without the anchor; larger trees gain less than they cost
_NEARLY_FREE = 1.5  # trees are used if verifying whole ones takes at most this many times as long as plain decoding
_OFTEN, _SELDOM = 2, 16  # bounds of the number of cycles between two that a request is learnt from: 10 to 40 µs a block
_SAMPLE = 15  # if drafting is far from paying, every 15th request tries it; drafting is suspended for the others
_LONGEST = 10**6  # draft positions: a view limits them
_NOTHING = Plan(0.0, 0.0, 0.0, [0] * KINDS, [0.0] * KINDS, [1.0] * KINDS, [0.0] * KINDS)
_WHOLE = Plan(0.0, 0.0, 0.0, [_LONGEST] * KINDS, [0.0] * KINDS, [1.0] * KINDS, [0.0] * KINDS)


@dataclass
class _Review:
    """Best plans for the current mix of requests."""

    plan: Plan
    number: int = 0  # number of requests
    left: int = 0  # cycles until the next review
    lookup_costs: tuple[float, list[float]] = (0.0, [])  # see Planner.lookup_costs
    lookup_budget: int = 0  # prompt-lookup tokens that fit a cycle
    opening: Plan | None = None  # plan for the first blocks of a request, if the best one drafts nothing
    others: list[tuple[Plan, int]] = field(default_factory=list)  # plans to probe, each once in this many cycles


class Goodput(Policy):
    """Every 64 cycles the planner chooses a number of positions and a threshold, from the last blocks and the costs of passes.

    Each block is drafted with that many positions, and cut at the first position whose probability is below the threshold. The
    cut depends on no token and on no position after it. Each kind of request (greedy or sampled, chain or tree) has its own
    number and threshold. One or two requests are judged by their own blocks, and each begins with three drafts.
    """

    uses_confidence = uses_costs = True

    def __init__(self, *, uses_lookup: bool = True) -> None:
        """Make the policy. ``uses_lookup``: verify prompt-lookup tokens, too."""
        self.uses_lookup = uses_lookup
        self.acceptance = Acceptance()
        self.lookup_acceptance = Acceptance(OF_LOOKUP)
        # Last blocks by kind: the request, the probability of each position, the expected number of accepted tokens, and the
        # actual one.
        self._blocks = [deque[tuple[int, list[float], float, int]](maxlen=_REMEMBERED) for _ in range(KINDS)]
        self._learnt: dict[int, int] = {}  # blocks learnt from, by request: those that were once among a few
        self._changed = 0  # cycle in which the last of these began
        self._usual: list[list[float]] = [[] for _ in range(KINDS)]  # mean probabilities at the last review
        # Reviews by the kinds of request in the batch, and whether each kind has enough blocks.
        self._reviews: dict[frozenset[tuple[int, bool]], _Review] = {}
        self._review = _Review(_WHOLE)  # the current review
        # Cycles of the last probes, by index in ``_Review.others``. If a review leaves out its first plan, the second one takes
        # index 0 and so the time of the first one's last probe.
        self._tried = [0, 0]
        self._trial: int | None = None  # index of the current probe; a draft that gave way to a prompt does not count
        self._tree_nodes: dict[int, int] = {}  # by number of requests
        # Number of requests from which on drafting is far from paying, for greedy, sampled or mixed batches.
        self._hopeless: dict[frozenset[bool], int] = {}
        self._cycle = 0
        self._prompts_go_on = False

    def rehearse(self) -> None:
        assert self.costs is not None
        if self.block_size == 1:  # passes are timed once prompt lookup finds tokens
            return
        self._nodes(1)
        self.costs.draft(self.block_size, 1)
        if self.uses_lookup:
            self.costs.target(1 + MOST_LOOKUP_TOKENS, 1)

    def decide(self, views: Sequence[View], under_way: int) -> list[DraftSpec]:
        assert self.costs is not None
        self._cycle += 1
        if self.block_size == 1 and not any(view.lookup_confidence for view in views):
            return [view.draft(0) for view in views]
        if self._prompts_go_on != self.costs.arrivals.go_on:
            self._prompts_go_on = not self._prompts_go_on
            self._reviews.clear()
        own = self._nodes(under_way) if self.block_size > 1 and any(view.max_nodes is None for view in views) else 0
        # Chains with rejection sampling gain as much as trees, with fewer tokens.
        nodes = [
            view.max_nodes if view.max_nodes is not None else own * (view.rule is not Rule.REJECTION) for view in views
        ]
        kinds = [(view.rule is not Rule.GREEDY) + TREE * (size > 0) for view, size in zip(views, nodes, strict=True)]
        drafting = {kind for view, kind in zip(views, kinds, strict=True) if view.limit}
        if self._are_few(len(views)):
            self._note_new(views)
        plan, is_probe = self._choose(kinds, drafting, opens=self._opens(views))
        if self.costs.ledger.is_spent:
            plan, is_probe = _NOTHING, False
        specs, uses_lookup = list[DraftSpec](), not (is_probe or self.costs.lookup_ledger.is_spent)
        budget = self._review.lookup_budget if uses_lookup else 0
        for view, kind, size in zip(views, kinds, nodes, strict=True):
            confidence = view.lookup_confidence[:budget]
            num_lookup = self._num_lookup_tokens(view.request_id, kind, confidence) if confidence else 0
            budget -= num_lookup
            own = min(size, plan.nodes)
            draft = view.draft(plan.positions[kind], own, plan.thresholds[kind])
            specs.append(view.lookup(num_lookup) if num_lookup else draft)
        return specs

    def _nodes(self, under_way: int) -> int:
        """Return the number of tree nodes while ``under_way`` requests are running or waiting; 0: no trees."""
        assert self.costs is not None
        if self.costs.drafts_on_device:  # the host grows trees, and would wait for the drafter's output
            return 0
        if under_way not in self._tree_nodes:
            target, tokens = self.costs.target, under_way * (1 + _NODES)
            most = _NEARLY_FREE * target(under_way, under_way)
            is_cheap = target.expected(np.array(tokens), under_way) <= most and target(tokens, under_way) <= most
            self._tree_nodes[under_way] = _NODES if is_cheap else 0
        return self._tree_nodes[under_way]

    def draft_kv_every(self, sampled: Set[bool], under_way: int) -> int:
        is_hopeless = under_way >= self._hopeless.get(frozenset(sampled), under_way + 1)
        opened = sum(count >= _OPENING for count in self._learnt.values())
        return _SAMPLE if is_hopeless and not (self._are_few(under_way) and opened < under_way) else 1

    def _are_few(self, number: int) -> bool:
        """Return True if each of ``number`` requests is judged by its own blocks."""
        return self.block_size > 1 and number <= _FEW and not self._prompts_go_on

    def _note_new(self, views: Sequence[View]) -> None:
        """Begin the reviews anew if one of a few requests is new."""
        for view in views:
            if view.request_id not in self._learnt:
                self._learnt[view.request_id], self._changed = 0, self._cycle
                self._reviews.clear()

    def _opens(self, views: Sequence[View]) -> bool:
        """Return True if one of a few requests has too few blocks to be judged by."""
        return self._are_few(len(views)) and any(
            view.limit and self._learnt[view.request_id] < _OPENING for view in views
        )

    def _choose(self, kinds: list[int], drafting: Set[int], *, opens: bool) -> tuple[Plan, bool]:
        """Return the plan of this cycle, and True if it is a probe: a plan that is tried to keep its measurements up to date.

        Requests of the kinds in ``drafting`` can be drafted for; the others end with their next token. If ``opens``, something
        is drafted.
        """
        assert self.costs is not None
        if self.block_size > 1 and not all(map(self._knows, drafting)):
            most = fitting(self.costs, len(kinds), max(_NODES, self.block_size - 1))
            if most:
                return _WHOLE._replace(positions=[most] * KINDS, nodes=most), True
        # The last review of these kinds is used, unless it is too old or was made for a very different number of requests.
        present = frozenset((kind, self._knows(kind)) for kind in kinds)
        review = self._reviews.get(present)
        if review is None or not review.left or 2 * abs(len(kinds) - review.number) >= review.number:
            review = self._reviews[present] = self._make_review(kinds)
        review.left -= 1
        self._review = review
        if opens and review.opening:
            return review.opening, True
        for index, (plan, every) in enumerate(review.others):
            if self._cycle >= self._tried[index] + every and (drafting or not any(plan.positions)):
                self._trial = index
                return plan, True
        self._trial = None
        return review.plan, False

    def _knows(self, kind: int) -> bool:
        """Return True if a kind has had enough blocks."""
        return len(self._blocks[kind]) >= _ENOUGH

    def _make_review(self, kinds: list[int]) -> _Review:
        """Choose between plain decoding and the best plan that drafts. The other one and whole blocks are probed now and then."""
        assert self.costs is not None
        self._tree_nodes.clear()
        gains, trust = {}, [1.0] * KINDS
        for kind in filter(self._knows, set(kinds)) if self.block_size > 1 else ():
            own = list(self._blocks[kind])
            if self._are_few(len(kinds)):
                others = [block for block in own if block[0] not in self._learnt]
                own = others[-_PRIOR:] + [block for block in own if block[0] in self._learnt]
            _, blocks, expected, right = zip(*own, strict=True)
            gains[kind] = np.array(list(zip_longest(*blocks, fillvalue=0.0)))
            self._usual[kind] = np.maximum(gains[kind].mean(axis=1), 1e-6).tolist()
            # The acceptance model, by which drafts are cut, learns slowly. A deviation of the last blocks beyond one standard
            # deviation, or about one token if none was accepted, is not chance.
            lead, chance = sum(right) - sum(expected), (sum(right) + 1) ** 0.5
            beyond = lead - min(max(lead, -chance), chance)
            trust[kind] = min(1 + beyond / max(sum(expected), 1.0), _MOST_TRUST)
        planner = Planner(self.costs, [kinds.count(kind) for kind in range(KINDS)], gains, trust, self.block_size - 1)
        plain = planner.whole(0)
        left = min(self._cycle, max(self._cycle - self._changed, _SOON), _REVIEW)
        review = _Review(plain, len(kinds), left)
        if gains:
            best, whole = planner.best(), planner.whole(self.block_size - 1)
            review.plan, other = (best, plain) if best.rate > WORTHWHILE * plain.rate else (plain, best)
            review.opening = self._opening(planner, plain) if review.plan is plain else None
            self._note_hope(kinds, best.rate > plain.rate / WORTHWHILE)
            for plan in (other, whole):
                if plan.waiting <= planner.most_seconds:
                    every = cycles_between(plan.rate, plan.seconds, review.plan.rate, review.plan.seconds)
                    review.others.append((plan, every))
        if self.uses_lookup:
            review.lookup_costs = planner.lookup_costs(review.plan)
            review.lookup_budget = planner.lookup_budget(review.plan)
        return review

    def _opening(self, planner: Planner, plain: Plan) -> Plan | None:
        """Return the plan for the first blocks of a request; ``None`` if it would gain little were all of its tokens right."""
        size = min(_PROBED, self.block_size - 1)
        plan = planner.whole(size)
        gain = (1 + size) * plain.seconds / plan.seconds
        return plan if gain > _PROMISING and plan.waiting <= planner.most_seconds else None

    def _note_hope(self, kinds: list[int], is_near: bool) -> None:
        """Record whether drafting is close to paying. If it is not, it is not for more requests either."""
        sampled = frozenset(kind % TREE > 0 for kind in kinds)
        if not is_near:
            self._hopeless[sampled] = min(self._hopeless.get(sampled, len(kinds)), len(kinds))
        elif self._hopeless.get(sampled, len(kinds) + 1) <= len(kinds):
            del self._hopeless[sampled]

    def _num_lookup_tokens(self, request_id: int, kind: int, confidence: list[float]) -> int:
        """Return how many prompt-lookup tokens pay for a request; 0 if a draft pays more."""
        cost, least = self._review.lookup_costs
        tokens, count = 1.0, 0
        for gain in self.lookup_acceptance.gains(request_id, kind % TREE, confidence, cost):
            if gain < cost * (tokens + gain):
                break
            tokens, count = tokens + gain, count + 1
        return count if log(tokens) - cost * count > least[kind] else 0

    def cuts(self, spec: DraftSpec) -> bool:
        return spec.threshold > 0

    def trim(self, cycles: Sequence[Cycle]) -> list[int]:
        gains = self.acceptance.gains
        return [
            len(gains(own.request_id, _kind(own.spec), own.confidence, own.spec.threshold))
            if own.spec.threshold
            else own.spec.size
            for own in cycles
        ]

    def observe(self, cycles: Sequence[Cycle]) -> None:
        """Learn from some requests in turn, and from all first blocks and all blocks whose threshold differs from the plan's."""
        if cycles and self._trial is not None:
            self._tried[self._trial], self._trial = self._cycle, None
        every, plan = min(max(len(cycles), _OFTEN), _SELDOM), self._review.plan
        for cycle in cycles:
            kind = _kind(cycle.spec)
            is_trial = (
                len(self._blocks[kind]) < _ENOUGH
                or not plan.positions[kind]
                or cycle.spec.threshold != plan.thresholds[kind]
            )
            is_trial |= self._learnt.get(cycle.request_id, _OPENING) < _OPENING
            if (cycle.request_id + self._cycle) % every and not (is_trial and cycle.spec.positions):
                continue
            if cycle.lookup_right:
                self.lookup_acceptance.observe(
                    cycle.request_id, kind % TREE, cycle.lookup_confidence, cycle.lookup_right
                )
            if cycle.spec.positions:
                self.acceptance.observe(cycle.request_id, kind, cycle.confidence, cycle.right)
                usual = self._usual[kind]
                gains = self.acceptance.gains(cycle.request_id, kind, cycle.confidence) or [0.0]
                expected = sum(gains[: len(cycle.right)])
                # Probabilities of positions that were not drafted are assumed to fall off as usual.
                gains += [gains[-1] * later / usual[len(gains) - 1] for later in usual[len(gains) :]]
                self._blocks[kind].append((cycle.request_id, gains, expected, sum(cycle.right)))
                if cycle.request_id in self._learnt:
                    self._learnt[cycle.request_id] += 1
                    if self._learnt[cycle.request_id] == _OPENING:
                        self._reviews.clear()
                        self._tried = [self._cycle] * 2

    def end(self, request_id: int) -> None:
        self._learnt.pop(request_id, None)
        self.acceptance.end(request_id)
        self.lookup_acceptance.end(request_id)


def _kind(spec: DraftSpec) -> int:
    return (spec.rule is not Rule.GREEDY) + TREE * (spec.shape is Shape.TREE)
