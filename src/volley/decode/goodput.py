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
from math import exp, log
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from volley.decode.block_size import BlockSizePolicy, Cycle, Decoding
from volley.decode.cost import FloatArray
from volley.decode.lookup import MOST_FOUND

_REVIEW = 64  # cycles between two looks at what pays, fewer at the beginning
_WHOLE = 32  # cycles between two in which a few requests verify whole blocks
_REMEMBERED = 64  # blocks that the look is based on
_PROBING = 0.005  # share of the time that may be lost by drafting where it does not pay at present, or by not drafting
_PROBED = 4  # requests at most whose whole blocks tell what they are worth; a little more are learnt from in a cycle
_WORTHWHILE = 1.03  # what drafting must promise over plain decoding: the promise is the best of several rough ones
_AS_GOOD = 0.97  # of the best promise for blocks not to be cut: the best of many estimates flatters itself
_HOPELESS = 0.9  # of the best promise: more slots still are not looked at
_CLOSE = 1.4  # below this gain over plain decoding, a plain cycle now and then tells what it really takes
_CHANGED = 0.25  # share of the requests that must have come or gone for another look before its time
_MISJUDGED = 0.1  # relative change of what a plain pass takes, for the same
_TREE = 2  # kinds of requests are 0 and 1, greedy and sampled, and so many more where a tree is drafted
_KINDS = 4
_NODES = 15  # of a tree, anchor not counted
# Trees are grown where verifying whole ones takes at most so many times as long as plain decoding: for greedy requests, and for
# sampled ones, whose chains are judged by speculative sampling and are not so far behind.
_NEARLY_FREE = (1.5, 1.4)
_LESSON = 16  # blocks learnt from at once, which costs less than one by one
_UNLIKELY = 0.05  # the chance below which a token found in the text is not looked at
_FEW = 8  # blocks of a kind that say nothing yet
# What agreement is expected to depend on at first (see Acceptance): drafts of the four kinds, and tokens found in greedy and in
# sampled texts.
_OF_DRAFTS = ((0.5, 0.9, -0.9, 1.0), (0.3, 0.5, -1.2, 0.6), (0.2, 1.0, 0.0, 1.0), (-0.2, 0.9, 0.0, 0.6))
_OF_FOUND = ((-1.0, 1.5, 0.0, 1.0), (-0.4, 0.8, 0.0, 0.6))


class _Plan(NamedTuple):
    """What is drafted and verified until the next look, and what was promised for it."""

    rate: float  # tokens per second if all requests were as fast as their geometric mean
    seconds: float  # of a cycle
    slots: list[int]  # drafted for each request of a kind
    prices: list[float]  # by kind, the gain below which a slot is not verified
    pace: list[float]  # by kind, tokens of a request in a cycle
    verified: float  # tokens of all drafts


class _Slots(NamedTuple):
    """Of the last blocks, for the kinds of requests there are, the most promising slots first."""

    values: FloatArray  # ``[N]``: the tokens that each promises, relative to its request's pace
    kinds: NDArray[np.int64]  # ``[N]``
    places: NDArray[np.int64]  # ``[N]``: in a chain; 0 in a tree, which is drafted whole or not at all
    stands_for: FloatArray  # ``[N]``: so many slots of the requests there are now
    tokens: FloatArray  # ``[kinds, N]``: what a request of each kind gains by it
    lengths: list[int]  # of a block, by kind


_PLAIN = _Plan(0.0, 0.0, [0] * _KINDS, [0.0] * _KINDS, [1.0] * _KINDS, 0.0)


class Acceptance:
    """How likely the target agrees with a slot of a chain, given that it agreed with those before it, or with a node of a tree.

    A logistic model of the drafter's log-odds, the slot's number and how much luckier than expected the request has been,
    one for each kind, learnt online (Adagrad).
    """

    def __init__(self, start: tuple[tuple[float, ...], ...] = _OF_DRAFTS) -> None:
        self.weights = np.array(start)
        self._squares = np.full_like(self.weights, 0.1)
        self._now: list[list[float]] = self.weights.tolist()
        self._luck: dict[int, tuple[float, float]] = {}  # Σ (accepted − expected) and Σ variance, decaying
        self._blocks: list[tuple[int, int, list[float], list[bool]]] = []  # yet to be learnt from

    def gains(self, request_id: int, kind: int, confidence: list[float], price: float = 0.0) -> list[float]:
        """The chance that each slot, or node, and all before it are right, up to the first that is below ``price``.

        One number at a time: for a few slots this takes a fifth of the time that arrays need.
        """
        constant, slope, later, lucky = self._now[kind]
        constant += lucky * self._luck_of(request_id)
        found: list[float] = []
        gain, is_tree = 1.0, kind >= _TREE
        for slot, sure in enumerate(confidence):
            if not 1e-4 < sure < 1 - 1e-4:
                sure = min(max(sure, 1e-4), 1 - 1e-4)
            alone = 1 / (1 + exp(-constant - slope * log(sure / (1 - sure)) - later * slot / 8))
            gain = min(gain, alone) if is_tree else gain * alone
            if gain < price:
                break
            found.append(gain)
        return found

    def _luck_of(self, request_id: int) -> float:
        surplus, variance = self._luck.get(request_id, (0.0, 0.0))
        return surplus / (variance + 4)

    def observe(self, request_id: int, kind: int, confidence: list[float], right: list[bool]) -> None:
        """A block of which the first tokens were verified, and which of these were ``right``."""
        self._luck.setdefault(request_id, (0.0, 0.0))
        self._blocks.append((request_id, kind, confidence, right))

    def learn(self) -> None:
        """From the blocks observed, once there are enough to be worth it."""
        if len(self._blocks) < _LESSON:
            return
        features, kinds, judged, right = self._arrays()
        expected = 1 / (1 + np.exp(-np.einsum("rf,frk->rk", self.weights[kinds], features)))
        error = (right - expected) * judged
        gradient = np.einsum("frk,rk->rf", features, error)
        for kind in set(kinds.tolist()):
            step = gradient[kinds == kind].sum(axis=0)
            self._squares[kind] += step**2
            self.weights[kind] += 0.3 * step / np.sqrt(self._squares[kind])
        self._now = self.weights.tolist()
        variance = (expected * (1 - expected) * judged).sum(axis=1).tolist()
        for (request_id, *_), more, spread in zip(self._blocks, gradient[:, 0].tolist(), variance, strict=True):
            if request_id in self._luck:  # it may have ended since
                surplus, total = self._luck[request_id]
                self._luck[request_id] = (0.95 * surplus + more, 0.95 * total + spread)
        self._blocks.clear()

    def _arrays(self) -> tuple[FloatArray, NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
        """Features ``[4, R, K]`` of the waiting blocks, their kinds ``[R]``, and which slots were judged and right ``[R, K]``."""
        slots = np.arange(max(len(confidence) for _, _, confidence, _ in self._blocks))
        sure = np.full((len(self._blocks), len(slots)), 0.5)
        judged, right = np.zeros((2, *sure.shape), dtype=np.bool_)
        for row, (_, kind, confidence, marks) in enumerate(self._blocks):
            sure[row, : len(confidence)] = confidence
            right[row, : len(marks)] = marks
            # Behind a chain's first error nothing was judged.
            judged[row, : len(marks) if kind >= _TREE else min(len(marks), sum(marks) + 1)] = True
        sure = np.clip(sure, 1e-4, 1 - 1e-4)
        features = np.ones((4, *sure.shape))
        features[1] = np.log(sure / (1 - sure))
        features[2] = slots / 8
        features[3] = np.array([self._luck_of(request_id) for request_id, *_ in self._blocks])[:, None]
        return features, np.array([kind for _, kind, _, _ in self._blocks]), judged, right

    def end(self, request_id: int) -> None:
        self._luck.pop(request_id, None)


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
        self.recurrence = Acceptance(_OF_FOUND)
        # By kind: gains of the last blocks, and their mean at the last look.
        self._worth = [deque[list[float]](maxlen=_REMEMBERED) for _ in range(_KINDS)]
        self._usual: list[list[float]] = [[] for _ in range(_KINDS)]
        self._plan = self._other = self._followed = _PLAIN
        self._pace = _PLAIN.pace  # of the best plan that drafts
        self._kinds: list[int] = []  # of the requests in the cycle under way
        self._confidence: list[list[float]] = []
        self._found: dict[int, list[float]] = {}  # by request, confidences of what was found in its text
        self._copy_costs: list[list[float]] = []  # see _price_copies; until they are asked for, none
        self._whole: set[int] = set()  # requests that verify all they draft in this cycle
        self._reviewed_for, self._reviewed_cost = [0] * _KINDS, 1.0  # requests by kind, seconds of a plain pass
        self._cycle = self._next_review = self._last_other = 0
        self._other_every = 0  # cycles between two that follow the plan not chosen, or 0: it is far behind
        self._next_probe = [0] * _KINDS
        self._turn = 0  # requests looked at more closely so far

    def rehearse(self) -> None:
        assert self.costs is not None
        if self.block_size > 1:
            self.tree_nodes(1, sampled=False)
            self.costs.draft(self.block_size, 1)
        if self.uses_lookup:
            self.costs.target(1 + MOST_FOUND, 1)

    def tree_nodes(self, num_requests: int, *, sampled: bool) -> int:
        assert self.costs is not None
        most = _NEARLY_FREE[sampled] * self.costs.target(num_requests, num_requests)
        for share in (4, 2, 1):  # small passes first: large ones take long to measure
            if self.costs.target(num_requests * (1 + _NODES // share), num_requests) > most:
                return 0
        return _NODES

    def draft(self, requests: Decoding) -> list[int]:
        self._cycle += 1
        self._kinds = _kinds(requests)
        counts = [self._kinds.count(kind) for kind in range(_KINDS)]
        can_draft = self.block_size > 1
        if (not can_draft or all(len(self._worth[kind]) >= _FEW for kind in self._kinds)) and self._is_due(counts):
            self._review(counts)
            self._copy_costs = []
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
        more = requests.nodes * len(chosen) if kind >= _TREE else slots
        verifying = self.costs.target.upto(len(requests), more, len(requests))
        extra = self.costs.draft(len(chosen) + slots, len(chosen)) + verifying[-1] - verifying[0]
        self._next_probe[kind] = self._cycle + int(extra / verifying[0] / _PROBING)

    def _extend(self, members: list[int], most: int, requests: Decoding, drafted: list[int]) -> set[int]:
        """Whole blocks, verified whole, for a few of ``members``, others each time."""
        count = min(len(members), most)
        self._turn += count
        chosen = {members[(self._turn + i) % len(members)] for i in range(count)}
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
            or abs(sum(counts) - sum(before)) > _CHANGED * sum(before)
            or abs(self.costs.target(sum(counts), sum(counts)) / self._reviewed_cost - 1) > _MISJUDGED
        )

    def _review(self, counts: list[int]) -> None:
        """The price, and how many slots to draft, that would have paid most for so many requests with the last blocks."""
        assert self.costs is not None
        self._reviewed_for, self._next_review = counts, self._cycle + min(self._cycle, _REVIEW)
        self._reviewed_cost = seconds = self.costs.target(sum(counts), sum(counts))
        plain = _PLAIN._replace(rate=sum(counts) / seconds, seconds=seconds)
        best = self._best(counts) if self.block_size > 1 else _PLAIN
        self._pace = best.pace
        self._plan, self._other = (best, plain) if best.rate > _WORTHWHILE * plain.rate else (plain, best)
        lost = self._other.seconds * max(0.0, 1 - self._other.rate / self._plan.rate)
        is_close = 0 < best.rate < _CLOSE * plain.rate
        self._other_every = 1 + int(lost / self._plan.seconds / _PROBING) if is_close else 0

    def _best(self, counts: list[int]) -> _Plan:
        """Of the plans that draft."""
        known = self._last_slots(counts)
        best, most = _PLAIN, self.block_size - 1
        choices = [k for k in (0, 1, 2, 3, 4, 6, 8, 11) if k < most] + [most]
        kinds = [kind for kind in range(_KINDS) if counts[kind]]
        # All together first: where drafting for one kind alone would not pay, it may for all.
        for changing in [kinds, *([kind] for kind in kinds if len(kinds) > 1)]:
            now = choices.index(max(best.slots[kind] for kind in changing))
            near = choices if changing == kinds else sorted({0, *choices[max(now - 1, 0) : now + 2]})
            for k in near if min(changing) < _TREE else (0, most):
                slots = list(best.slots)
                for kind in changing:
                    slots[kind] = most if k and kind >= _TREE else k
                plan = self._promise(known, counts, slots)
                if k > best.slots[changing[0]] and plan.rate < _HOPELESS * best.rate:
                    break  # larger passes take long to measure
                best = max(best, plan, key=lambda plan: plan.rate)
        return best

    def _last_slots(self, counts: list[int]) -> _Slots:
        parts, lengths = list[FloatArray](), [0] * _KINDS  # rows as in _Slots
        kinds = [kind for kind in range(_KINDS) if counts[kind]]
        for row, kind in enumerate(kinds):
            gains = np.array(list(zip_longest(*self._worth[kind], fillvalue=0.0)))  # slots by blocks
            lengths[kind], self._usual[kind] = len(gains), gains.mean(axis=1).tolist()
            part = np.zeros((4 + len(kinds), gains.size))
            part[0] = gains.ravel() / self._pace[kind]
            part[1] = kind
            part[2] = np.repeat(np.arange(len(gains)) * (kind < _TREE), gains.shape[1])
            part[3] = counts[kind] / gains.shape[1]
            part[4 + row] = gains.ravel() / gains.shape[1]
            parts.append(part)
        found = np.concatenate(parts, axis=1)
        found = found[:, np.argsort(-found[0])]
        return _Slots(found[0], found[1].astype(np.int64), found[2].astype(np.int64), found[3], found[4:], lengths)

    def _promise(self, known: _Slots, counts: list[int], slots: list[int]) -> _Plan:
        """The best that can come of drafting so many slots for each kind."""
        if not any(slots):
            return _PLAIN
        kinds = [kind for kind in range(_KINDS) if counts[kind]]
        drafted = known.places < np.array(slots)[known.kinds]
        verified = known.stands_for[drafted].cumsum()
        paces = 1 + known.tokens[:, drafted].cumsum(axis=1)
        total = sum(counts)
        seconds = self._seconds(counts, slots, known.lengths, verified)
        rates = total * np.exp(np.array([counts[kind] / total for kind in kinds]) @ np.log(paces)) / seconds
        is_cut = rates[-1] < _AS_GOOD * rates.max()
        last = int(rates.argmax()) if is_cut else len(rates) - 1
        pace = list(_PLAIN.pace)
        for kind, reached in zip(kinds, paces[:, last].tolist(), strict=True):
            pace[kind] = reached
        price = float(known.values[drafted][last]) if is_cut else 0.0
        prices = [price * each for each in self._pace]
        return _Plan(float(rates[last]), float(seconds[last]), slots, prices, pace, float(verified[last]))

    def _seconds(self, counts: list[int], slots: list[int], lengths: list[int], verified: FloatArray) -> FloatArray:
        """Of cycles that verify so many tokens of blocks of up to ``lengths`` by kind, of which ``slots`` are drafted."""
        assert self.costs is not None
        drafting = [kind for kind in range(_KINDS) if counts[kind] and slots[kind]]
        longest = [lengths[kind] if kind >= _TREE else min(slots[kind], lengths[kind]) for kind in drafting]
        total, requests = sum(counts), sum(counts[kind] for kind in drafting)
        most = sum(counts[kind] * length for kind, length in zip(drafting, longest, strict=True))
        verified = np.minimum(verified.astype(np.int64), most)
        drafted = requests + sum(counts[kind] * slots[kind] for kind in drafting)
        # Of few requests often none is as long as it might be; one alone is never padded.
        padding = (1 - 1 / total) * (total * max(longest) - verified)
        seconds: FloatArray = self.costs.target.upto(total, most, total)[verified]
        seconds += self.costs.draft(drafted, requests)
        return seconds + self.costs.target.padding(padding)

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
        is_new = any(len(self._worth[kind]) < _REMEMBERED for kind in self._kinds)
        count = len(drew) if is_new else min(len(drew), _PROBED + len(drew) // 8)
        for index in self._by_turns(drew, count):
            request_id, kind, confidence = (
                cycle.requests.request_ids[index],
                self._kinds[index],
                self._confidence[index],
            )
            self.acceptance.observe(request_id, kind, confidence, cycle.right[index])
            self._remember(kind, self.acceptance.gains(request_id, kind, confidence))
        self.acceptance.learn()

    def _observe_found(self, cycle: Cycle) -> None:
        told = [index for index, marks in enumerate(cycle.found) if marks]
        for index in self._by_turns(told, min(len(told), _PROBED + len(told) // 8)):
            request_id, sampled = cycle.requests.request_ids[index], cycle.requests.sampled[index]
            self.recurrence.observe(request_id, int(sampled), self._found[request_id], cycle.found[index])
        self.recurrence.learn()

    def _by_turns(self, members: list[int], count: int) -> list[int]:
        return [members[(self._cycle * count + turn) % len(members)] for turn in range(count)]

    def _remember(self, kind: int, gains: list[float]) -> None:
        """Slots that were not drafted are taken to be as good as they usually are, given those before them."""
        most = self.block_size - 1
        if kind < _TREE and len(gains) < most:
            usual = self._usual[kind] or [1.0] * most
            last = gains[-1] / max(usual[len(gains) - 1], 1e-6)
            gains += [min(gains[-1], last * gain) for gain in usual[len(gains) :]]
        self._worth[kind].append(gains)

    def end(self, request_id: int) -> None:
        self.acceptance.end(request_id)
        self.recurrence.end(request_id)


def _kinds(requests: Decoding) -> list[int]:
    return [sampled + _TREE * tree for sampled, tree in zip(requests.sampled, requests.trees, strict=True)]
