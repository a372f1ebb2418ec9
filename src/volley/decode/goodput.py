"""The default policy: verify exactly as much as makes the most tokens per second, and draft only where that pays.

``max  E[tokens of a request in a cycle] / (T_draft + T_target)`` (left as future work by DFlash §5.4.4), as the geometric mean of
all requests: whoever serves the fast ones first soon has a batch of slow ones, and in the long run most tokens are written where
a slot is worth what it adds to its request's speed *relative to that speed*. The best split of a pass takes the most promising
slots of all requests until one more costs more than it brings: so there is a price, and a slot, or a node of a tree, is verified
if what it promises is worth it. Looking at the last blocks of this engine tells, for the requests there are now, the price and
how many slots are worth drafting. A block is then cut where its own confidences fall below the price: a rule that looks at no
slot behind the cut and at no token. Tokens that were found in the text (``decode/lookup.py``) take the place of a request's block
where they promise it more, at what they cost.
"""

from collections import deque
from itertools import zip_longest
from operator import mul

import numpy as np

from volley.decode.acceptance import KINDS, OF_FOUND, TREE, Acceptance
from volley.decode.block_size import BlockSizePolicy, Cycle, Decoding
from volley.decode.cost import FloatArray
from volley.decode.lookup import MOST_FOUND
from volley.decode.plan import PLAIN, Planner

_REVIEW = 64  # cycles between two looks at what pays, fewer at the beginning
_WHOLE = 32  # cycles between two in which a few requests verify whole blocks
_REMEMBERED = 64  # blocks that the look is based on
_PROBING = 0.005  # share of the time that may be lost by drafting where it does not pay at present, or by not drafting
_PROBED = 4  # requests at most whose whole blocks tell what they are worth; a little more are learnt from in a cycle
_WORTHWHILE = 1.03  # what drafting must promise over plain decoding: the promise is the best of several rough ones
_CLOSE = 1.4  # below this gain over plain decoding, a plain cycle now and then tells what it really takes
_CHANGED = 0.5  # share of the requests that must have come or gone for another look before its time
_MISJUDGED = 0.15  # relative change of what a plain pass takes, for the same
_NODES = 15  # of a tree, anchor not counted
_NEARLY_FREE = 1.5  # trees are grown where verifying whole ones takes at most so many times as long as plain decoding
_UNLIKELY = 0.05  # the chance below which a token found in the text is not looked at
_FEW = 8  # blocks of a kind that say nothing yet


class _Turns:
    """A few at a time, others each time."""

    def __init__(self) -> None:
        self._next = 0

    def of(self, members: list[int], most: int) -> list[int]:
        first, count = self._next, min(most, len(members))
        self._next += count
        return [members[(first + turn) % len(members)] for turn in range(count)]


class Goodput(BlockSizePolicy):
    """The speeds of all requests, as their geometric mean, as high as can be expected.

    Greedy and sampled requests, chains and trees differ in what they promise, so each kind has its own memory and number
    of slots. Trees are for few requests: they verify more than they draft, which pays while verifying is nearly free.
    """

    uses_confidence = True

    def __init__(self, *, uses_lookup: bool = True) -> None:
        """``uses_lookup`` lets it verify tokens that were found in the text."""
        self.uses_lookup = uses_lookup
        self.acceptance = Acceptance()
        self.recurrence = Acceptance(OF_FOUND)
        # By kind: gains of the last blocks, and their mean at the last look.
        self._worth = [deque[list[float]](maxlen=_REMEMBERED) for _ in range(KINDS)]
        self._usual: list[list[float]] = [[] for _ in range(KINDS)]
        self._plan = self._other = self._followed = PLAIN
        self._pace = PLAIN.pace  # of the best plan that drafts
        self._kinds: list[int] = []  # of the requests in the cycle under way
        self._confidence: list[list[float]] = []
        self._found: dict[int, list[float]] = {}  # by request, confidences of what was found in its text
        self._copy_costs: list[list[float]] = []  # see _price_copies; until they are asked for, none
        self._tree_nodes: dict[int, int] = {}  # by number of requests
        self._whole: set[int] = set()  # requests that verify all they draft in this cycle
        self._reviewed_for, self._reviewed_cost = [0] * KINDS, 1.0  # requests by kind, seconds of a plain pass
        self._cycle = self._next_review = self._last_other = 0
        self._other_every = 0  # cycles between two that follow the plan not chosen, or 0: it is far behind
        self._next_probe = [0] * KINDS
        self._probes, self._lessons, self._lookups = _Turns(), _Turns(), _Turns()

    def rehearse(self) -> None:
        assert self.costs is not None
        if self.block_size > 1:
            self.tree_nodes(1, speculative=False)
            self.costs.draft(self.block_size, 1)
        if self.uses_lookup:
            self.costs.target(1 + MOST_FOUND, 1)

    def tree_nodes(self, num_requests: int, *, speculative: bool) -> int:
        assert self.costs is not None
        if speculative:
            return 0  # their chains get as far, with fewer tokens
        if num_requests not in self._tree_nodes:
            most = _NEARLY_FREE * self.costs.target(num_requests, num_requests)
            sizes = (num_requests * (1 + _NODES // share) for share in (4, 2, 1))  # large passes take long to measure
            is_cheap = all(self.costs.target(size, num_requests) <= most for size in sizes)
            self._tree_nodes[num_requests] = _NODES if is_cheap else 0
        return self._tree_nodes[num_requests]

    def draft(self, requests: Decoding) -> list[int]:
        self._cycle += 1
        self._kinds = _kinds(requests)
        counts = [self._kinds.count(kind) for kind in range(KINDS)]
        can_draft = self.block_size > 1
        if (not can_draft or all(len(self._worth[kind]) >= _FEW for kind in self._kinds)) and self._is_due(counts):
            self._review(counts)
        self._followed = self._plan
        is_trial = self._other_every > 0 and self._cycle >= self._last_other + self._other_every
        if is_trial:
            self._last_other, self._followed = self._cycle, self._other
        slots = self._followed.slots
        drafted = [min(limit, slots[kind]) for limit, kind in zip(requests.limits, self._kinds, strict=True)]
        self._whole.clear()
        if is_trial or self._cycle % _WHOLE == 0:  # whole blocks, or low estimates would never be proved wrong
            drafting = [index for index, size in enumerate(drafted) if size]
            self._extend(drafting, min(_PROBED, 1 + len(requests) // 8), requests, drafted)
        for kind in set(self._kinds) if can_draft else ():
            is_new = len(self._worth[kind]) < _FEW
            if is_new or (any(slots) and not slots[kind] and self._cycle >= self._next_probe[kind]):
                self._probe(kind, requests, drafted)
        return drafted

    def _probe(self, kind: int, requests: Decoding, drafted: list[int]) -> None:
        """Whole blocks for a few requests of a kind, by turns, so that what is known stays true; seldom enough to be cheap."""
        assert self.costs is not None
        members = [index for index, other in enumerate(self._kinds) if other == kind]
        chosen = self._extend(members, _PROBED, requests, drafted)
        slots = sum(requests.limits[index] for index in chosen)
        more = requests.nodes * len(chosen) if kind >= TREE else slots
        verifying = self.costs.target.upto(len(requests), more, len(requests))
        extra = self.costs.draft(len(chosen) + slots, len(chosen)) + verifying[-1] - verifying[0]
        self._next_probe[kind] = self._cycle + int(extra / verifying[0] / _PROBING)

    def _extend(self, members: list[int], most: int, requests: Decoding, drafted: list[int]) -> list[int]:
        """Whole blocks, verified whole, for a few of ``members``."""
        chosen = self._probes.of(members, most)
        for index in chosen:
            drafted[index] = requests.limits[index]
            self._whole.add(requests.request_ids[index])
        return chosen

    def _is_due(self, counts: list[int]) -> bool:
        assert self.costs is not None
        before = self._reviewed_for
        return (
            self._cycle >= self._next_review
            or any((old == 0) != (new == 0) for old, new in zip(before, counts, strict=True))
            or abs(sum(counts) - sum(before)) >= _CHANGED * sum(before)
            or abs(self.costs.target(sum(counts), sum(counts)) / self._reviewed_cost - 1) > _MISJUDGED
        )

    def _review(self, counts: list[int]) -> None:
        """The price, and how many slots to draft, that would have paid most for so many requests with the last blocks."""
        assert self.costs is not None
        self._reviewed_for, self._next_review = counts, self._cycle + min(self._cycle, _REVIEW)
        self._copy_costs.clear()
        self._tree_nodes.clear()
        self._reviewed_cost = seconds = self.costs.target(sum(counts), sum(counts))
        plain = PLAIN._replace(rate=sum(counts) / seconds, seconds=seconds)
        worth = {
            kind: np.array(list(zip_longest(*blocks, fillvalue=0.0)))
            for kind, blocks in enumerate(self._worth)
            if counts[kind] and blocks
        }
        for kind, slots in worth.items():
            self._usual[kind] = slots.mean(axis=1).tolist()
        best = Planner(self.costs, counts, worth, self._pace).best(self.block_size - 1) if worth else PLAIN
        self._pace = best.pace
        self._plan, self._other = (best, plain) if best.rate > _WORTHWHILE * plain.rate else (plain, best)
        lost = self._other.seconds * max(0.0, 1 - self._other.rate / self._plan.rate)
        is_close = 0 < best.rate < _CLOSE * plain.rate
        self._other_every = 1 + int(lost / self._plan.seconds / _PROBING) if is_close else 0

    def _price_copies(self) -> None:
        """How many times as much a request's cycle has to bring for so many tokens found in its text to pay, since they make the
        cycle of everyone longer; up to the number that may pay. First where they are verified instead of a draft, then where
        nothing is drafted.
        """
        assert self.costs is not None
        costs, plan, counts = self.costs, self._plan, self._reviewed_for
        total = sum(counts)
        drafting = sum(count for count, slots in zip(counts, plan.slots, strict=True) if slots)
        slots = sum(map(mul, counts, plan.slots)) / max(drafting, 1)
        verified = plan.verified / max(drafting, 1)

        def cycle(drafting: int, more: int = MOST_FOUND) -> FloatArray:
            """Seconds, with each number of tokens up to ``more`` verified on top."""
            target = costs.target.upto(total + round(drafting * verified), more, total)
            return target + (costs.draft(round(drafting * (1 + slots)), drafting) if drafting else 0.0)

        padding = costs.target.padding((total - 1) * np.maximum(np.arange(MOST_FOUND + 1) - max(plan.slots), 0.0))
        now = cycle(drafting, 0)[0]
        paces = [pace for pace, slots in zip(plan.pace, plan.slots, strict=True) if slots]
        for others, pace in ((max(drafting - 1, 0), min(paces, default=1.0)), (min(drafting, total - 1), 1.0)):
            longer = 1 + (cycle(others) + padding - now) / plan.seconds
            cost = np.clip(longer, 0.1, None) ** total
            may_pay = (1 + np.arange(len(cost)) > pace * cost).nonzero()[0]
            self._copy_costs.append(cost[: may_pay.max(initial=0) + 1].tolist())

    def look_up(self, requests: Decoding, drafting: list[int], confidence: list[list[float]]) -> list[int]:
        self._found = dict(zip(requests.request_ids, confidence, strict=True))
        counts = [0] * len(requests)
        if self._followed is not self._plan or not self._plan.seconds:
            return counts
        if not self._copy_costs:
            self._price_copies()
        for index, (request_id, sampled, sure) in enumerate(
            zip(requests.request_ids, requests.sampled, confidence, strict=True)
        ):
            if not sure or request_id in self._whole:
                continue
            costs = self._copy_costs[not drafting[index]]
            best = self._plan.pace[self._kinds[index]] if drafting[index] else 1.0
            expected = 1.0
            sure = sure[: len(costs) - 1]
            for count, gain in enumerate(self.recurrence.gains(request_id, int(sampled), sure, _UNLIKELY), start=1):
                expected += gain
                worth = expected / costs[count]
                if worth > best:
                    best, counts[index] = worth, count
        return counts

    def verify(self, requests: Decoding, drafted: list[int], confidence: list[list[float]]) -> list[int]:
        self._kinds = _kinds(requests)
        self._confidence = confidence
        prices = [
            0.0 if i in self._whole else self._followed.prices[k]
            for i, k in zip(requests.request_ids, self._kinds, strict=True)
        ]
        gains = self.acceptance.gains
        return [
            len(gains(request_id, kind, sure, price) if price else sure) if size else 0
            for request_id, kind, sure, price, size in zip(
                requests.request_ids, self._kinds, confidence, prices, drafted, strict=True
            )
        ]

    def observe(self, cycle: Cycle) -> None:
        every = 2 if len(self._kinds) <= _PROBED else 4
        if self._cycle % every and all(self._followed.slots[kind] for kind in self._kinds):
            return  # some cycles teach enough, unless it was a probe
        self._observe_found(cycle)
        drew = [index for index, size in enumerate(cycle.drafted) if size]
        if all(len(self._worth[kind]) == _REMEMBERED for kind in self._kinds):
            whole = [index for index in drew if cycle.requests.request_ids[index] in self._whole]
            drew = list({*whole, *self._lessons.of(drew, _PROBED + len(drew) // 8)})
        for index in drew:
            request_id, kind = cycle.requests.request_ids[index], self._kinds[index]
            confidence = self._confidence[index]
            self.acceptance.observe(request_id, kind, confidence, cycle.right[index])
            self._remember(kind, self.acceptance.gains(request_id, kind, confidence))
        self.acceptance.learn()

    def _observe_found(self, cycle: Cycle) -> None:
        told = [index for index, marks in enumerate(cycle.found) if marks]
        for index in self._lookups.of(told, _PROBED + len(told) // 8):
            request_id, sampled = cycle.requests.request_ids[index], cycle.requests.sampled[index]
            self.recurrence.observe(request_id, int(sampled), self._found[request_id], cycle.found[index])
        self.recurrence.learn()

    def _remember(self, kind: int, gains: list[float]) -> None:
        """Slots that were not drafted are taken to be as good as they usually are, given those before them."""
        most = self.block_size - 1
        if kind < TREE and len(gains) < most:
            usual = self._usual[kind] or [1.0] * most
            last = gains[-1] / max(usual[len(gains) - 1], 1e-6)
            gains += [min(gains[-1], last * gain) for gain in usual[len(gains) :]]
        self._worth[kind].append(gains)

    def end(self, request_id: int) -> None:
        self.acceptance.end(request_id)
        self.recurrence.end(request_id)


def _kinds(requests: Decoding) -> list[int]:
    return [sampled + TREE * tree for sampled, tree in zip(requests.sampled, requests.trees, strict=True)]
