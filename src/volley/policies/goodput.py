"""The default policy: draft and verify as much as makes the most tokens per second, and nothing where that does not pay.

``max  E[tokens of a request in a cycle] / (T_draft + T_target)`` (left as future work by DFlash §5.4.4), with the geometric mean
over the requests: whoever serves the fast ones first soon has a batch of slow ones.

Every 32 cycles the planner (``policies/plan.py``) looks at the last blocks and at what passes cost, and chooses a number of slots
and a price. Each block is drafted with so many slots and cut at the first slot whose chance is below the price: a rule that looks
at no slot behind the cut and at no token. Tokens found in the text (``decode/lookup.py``) take the place of a block where they
promise more.
"""

from collections import deque
from collections.abc import Sequence
from itertools import zip_longest
from math import log

import numpy as np

from volley.decode.lookup import MOST_FOUND
from volley.decode.work import Ask, Rule, Shape
from volley.policies.acceptance import KINDS, OF_FOUND, TREE, Acceptance
from volley.policies.base import Cycle, Policy, View
from volley.policies.plan import PLAIN, WHOLE, Plan, Planner

_REVIEW = 32  # cycles between two reviews, which take 0.5 to 1 ms
_REMEMBERED = 64  # blocks of a kind that a look is based on: their mean is known to some 5 %
_ENOUGH = 8  # blocks of a kind before the first look; until then blocks are whole
_PROBING = 0.0025  # share of the time that trying each of the two plans not chosen may lose
_WORTHWHILE = 1.03  # what drafting must promise over plain decoding: the promise is the best of several rough ones
_NODES = 15  # of a tree, anchor not counted; larger ones gain less than they cost
_NEARLY_FREE = 1.5  # trees are grown where verifying whole ones takes at most so many times as long as plain decoding
_LEARNERS = 16  # one request in so many is learnt from in a cycle, by turns: 10 to 40 µs for a block
_WHOLE = Plan(0.0, 0.0, [10**6] * KINDS, [0.0] * KINDS, [1.0] * KINDS, [0.0] * KINDS)  # as many slots as there may be


class Goodput(Policy):
    """The geometric mean of all requests' speeds, as high as can be expected.

    Greedy and sampled requests, chains and trees promise different things, so each kind has a memory, slots and a price of its
    own. Trees are for few requests: they verify more than they draft, which pays while verifying is nearly free.
    """

    uses_confidence = uses_costs = True

    def __init__(self, *, uses_lookup: bool = True) -> None:
        """``uses_lookup`` lets it verify tokens that were found in the text."""
        self.uses_lookup = uses_lookup
        self.acceptance = Acceptance()
        self.recurrence = Acceptance(OF_FOUND)
        self._gains = [deque[list[float]](maxlen=_REMEMBERED) for _ in range(KINDS)]  # of the last blocks, by kind
        self._usual: list[list[float]] = [[] for _ in range(KINDS)]  # their means at the last review, by slot
        self._plan = _WHOLE
        self._others: list[Plan] = []  # the plans that are tried, every how many cycles, and in which they last were
        self._every, self._tried = [0, 0], [0, 0]
        self._copying: tuple[float, list[float]] = (0.0, [])  # see Planner.copying
        self._tree_nodes: dict[int, int] = {}  # by number of requests
        self._reviewed: list[int] = []  # kinds of the requests at the last review
        self._cycle = 0

    def rehearse(self) -> None:
        assert self.costs is not None
        if self.block_size > 1:
            self._nodes(1)
            self.costs.draft(self.block_size, 1)
        if self.uses_lookup:
            self.costs.target(1 + MOST_FOUND, 1)

    def decide(self, views: Sequence[View], under_way: int) -> list[Ask]:
        self._cycle += 1
        own = self._nodes(under_way) if any(view.max_nodes is None for view in views) else 0
        # Speculative chains get as far as trees, with fewer tokens.
        nodes = [
            view.max_nodes if view.max_nodes is not None else own * (view.rule is not Rule.SPECULATIVE)
            for view in views
        ]
        kinds = [view.is_sampled + TREE * (size > 0) for view, size in zip(views, nodes, strict=True)]
        plan, is_probe = self._choose(kinds)
        asks = []
        for view, kind, size in zip(views, kinds, nodes, strict=True):
            copied = 0 if is_probe or not view.found else self._copies(view.request_id, kind, view.found)
            asks.append(view.copy(copied) if copied else view.draft(plan.slots[kind], size, plan.prices[kind]))
        return asks

    def _nodes(self, under_way: int) -> int:
        """Tokens of the trees that are grown while so many requests are under way."""
        assert self.costs is not None
        if self.block_size == 1:
            return 0
        if under_way not in self._tree_nodes:
            target, tokens = self.costs.target, under_way * (1 + _NODES)
            most = _NEARLY_FREE * target(under_way, under_way)
            is_cheap = target.expected(np.array(tokens), under_way) <= most and target(tokens, under_way) <= most
            self._tree_nodes[under_way] = _NODES if is_cheap else 0
        return self._tree_nodes[under_way]

    def _choose(self, kinds: list[int]) -> tuple[Plan, bool]:
        """The plan of this cycle, and whether it is a probe: one that is tried so that what is known stays true."""
        if self.block_size > 1 and any(len(self._gains[kind]) < _ENOUGH for kind in kinds):
            return _WHOLE, True
        if self._is_due(kinds):
            self._review(kinds)
        for index, plan in enumerate(self._others):
            if self._cycle >= self._tried[index] + self._every[index]:
                self._tried[index] = self._cycle
                return plan, True
        return self._plan, False

    def _is_due(self, kinds: list[int]) -> bool:
        before = self._reviewed
        is_other = set(kinds) != set(before) or 2 * abs(len(kinds) - len(before)) >= len(before)
        return is_other or self._cycle % _REVIEW == 0

    def _review(self, kinds: list[int]) -> None:
        """Choose between plain decoding and the best plan that drafts; the other one and whole blocks are tried now and then."""
        assert self.costs is not None
        self._reviewed = kinds
        self._tree_nodes.clear()
        counts = [kinds.count(kind) for kind in range(KINDS)]
        drafting = set(kinds) if self.block_size > 1 else ()
        gains = {kind: np.array(list(zip_longest(*self._gains[kind], fillvalue=0.0))) for kind in drafting}
        for kind, chances in gains.items():
            self._usual[kind] = np.maximum(chances.mean(axis=1), 1e-6).tolist()
        planner = Planner(self.costs, counts, gains, self.block_size - 1)
        self._plan = plain = planner.promise([PLAIN] * KINDS)
        if gains:
            best, whole = planner.best(), planner.promise([WHOLE] * KINDS)
            self._plan, other = (best, plain) if best.rate > _WORTHWHILE * plain.rate else (plain, best)
            lost = [max(0.0, 1 - plan.rate / self._plan.rate) * plan.seconds for plan in (other, whole)]
            self._every = [_REVIEW + int(seconds / self._plan.seconds / _PROBING) for seconds in lost]
            self._others = [other, whole]
        if self.uses_lookup:
            self._copying = planner.copying(self._plan)

    def _copies(self, request_id: int, kind: int, confidence: list[float]) -> int:
        """Of tokens found in a request's text, how many pay."""
        cost, least = self._copying
        tokens, count = 1.0, 0
        for gain in self.recurrence.gains(request_id, kind % TREE, confidence, cost):
            if gain < cost * (tokens + gain):
                break
            tokens, count = tokens + gain, count + 1
        return count if log(tokens) - cost * count > least[kind] else 0

    def trim(self, cycles: Sequence[Cycle]) -> list[int]:
        gains = self.acceptance.gains
        return [
            len(gains(cycle.request_id, _kind(cycle.ask), cycle.confidence, cycle.ask.price))
            if cycle.ask.price
            else cycle.ask.size
            for cycle in cycles
        ]

    def observe(self, cycles: Sequence[Cycle]) -> None:
        """Learn from one request in 16, by turns; from all first blocks, and those tried at another price than the plan's."""
        every = min(len(cycles), _LEARNERS)
        for cycle in cycles:
            kind = _kind(cycle.ask)
            is_trial = len(self._gains[kind]) < _ENOUGH or cycle.ask.price != self._plan.prices[kind]
            if (cycle.request_id + self._cycle) % every and not (is_trial and cycle.ask.positions):
                continue
            if cycle.found_right:
                self.recurrence.observe(cycle.request_id, kind % TREE, cycle.found, cycle.found_right)
            if cycle.ask.positions:
                self.acceptance.observe(cycle.request_id, kind, cycle.confidence, cycle.right)
                usual = self._usual[kind]
                gains = self.acceptance.gains(cycle.request_id, kind, cycle.confidence) or [0.0]
                # Positions that were not drafted are taken to fall off as they usually do.
                gains += [gains[-1] * later / usual[len(gains) - 1] for later in usual[len(gains) :]]
                self._gains[kind].append(gains)

    def end(self, request_id: int) -> None:
        self.acceptance.end(request_id)
        self.recurrence.end(request_id)


def _kind(ask: Ask) -> int:
    return (ask.rule is not Rule.GREEDY) + TREE * (ask.shape is Shape.TREE)
