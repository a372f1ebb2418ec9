"""The default policy: verify exactly as much as makes the most tokens per second, and draft only where that pays.

``max  E[tokens of all requests] / (T_draft + T_target)`` (left as future work by DFlash §5.4.4). The best split of a pass among
requests takes the most promising slots of all of them until one more costs more time than it brings tokens: so there is a price,
the same for all, and a slot is verified if what it promises is worth it. Looking at the last blocks of this engine tells, for the
number of requests there are now, the price and how many slots are worth drafting. A block is then cut where its own
confidences fall below the price: a rule that looks at no slot behind the cut and at no token.
"""

import math
from collections import deque

import numpy as np

from volley.decode.block_size import BlockSizePolicy, Cycle, Decoding
from volley.decode.cost import FloatArray

_REVIEW = 16  # cycles between two looks at what pays, while the number of requests stays the same
_REMEMBERED = 64  # blocks that the look is based on
_PROBING = 0.01  # share of the time that may go into drafting where it does not pay at present
_PROBED = 4  # requests that draft whole blocks to learn what they are worth, and blocks remembered of a cycle
_WORTHWHILE = 1.03  # what drafting must promise over plain decoding: the promise is the best of several rough ones
_CLOSE = 1.4  # below this gain over plain decoding, a plain cycle now and then tells what it really takes
_LESSON = 8  # blocks learnt from at once, which costs less than one by one


class Acceptance:
    """How likely the target agrees with a slot, given that it agreed with all slots before it.

    A logistic model of the drafter's log-odds, the slot's number and how much luckier than expected the request has been,
    one for greedy and one for sampled requests, learnt online (Adagrad).
    """

    _START = np.array([[0.5, 0.9, -0.9, 1.0], [0.3, 0.5, -1.2, 0.6]])

    def __init__(self) -> None:
        self.weights = self._START.copy()
        self._squares = np.full_like(self.weights, 0.1)
        self._now: list[list[float]] = self.weights.tolist()
        self._luck: dict[int, tuple[float, float]] = {}  # Σ (accepted − expected) and Σ variance, decaying
        self._blocks: list[tuple[int, bool, list[float], int, int]] = []  # yet to be learnt from

    def gains(self, request_id: int, sampled: bool, confidence: list[float], price: float = 0.0) -> list[float]:
        """The chance that each slot and all before it are right, up to the first that is below ``price``.

        One number at a time: for a few slots this takes a fifth of the time that arrays need.
        """
        constant, slope, later, lucky = self._now[sampled]
        constant += lucky * self._luck_of(request_id)
        found: list[float] = []
        gain = 1.0
        for slot, sure in enumerate(confidence):
            sure = min(max(sure, 1e-4), 1 - 1e-4)
            gain /= 1 + math.exp(-(constant + slope * math.log(sure / (1 - sure)) + later * slot / 8))
            if gain < price:
                break
            found.append(gain)
        return found

    def _luck_of(self, request_id: int) -> float:
        surplus, variance = self._luck.get(request_id, (0.0, 0.0))
        return surplus / (variance + 4)

    def observe(self, request_id: int, sampled: bool, confidence: list[float], verified: int, accepted: int) -> None:
        """A block with ``verified`` slots, of which the first ``accepted`` were right."""
        self._luck.setdefault(request_id, (0.0, 0.0))
        self._blocks.append((request_id, sampled, confidence, verified, accepted))

    def learn(self) -> None:
        """From the blocks observed, once there are enough to be worth it."""
        if len(self._blocks) < _LESSON:
            return
        features, sampled, judged, right = self._arrays()
        weights = self.weights[sampled.astype(np.int64)]
        expected = 1 / (1 + np.exp(-np.einsum("rf,frk->rk", weights, features)))
        error = (right - expected) * judged
        gradient = np.einsum("frk,rk->rf", features, error)
        for kind, members in enumerate((np.logical_not(sampled), sampled)):
            step = gradient[members].sum(axis=0)
            self._squares[kind] += step**2
            self.weights[kind] += 0.3 * step / np.sqrt(self._squares[kind])
        self._now = self.weights.tolist()
        variance = (expected * (1 - expected) * judged).sum(axis=1).tolist()
        for (request_id, *_), more, spread in zip(self._blocks, gradient[:, 0].tolist(), variance, strict=True):
            if request_id in self._luck:  # it may have ended since
                surplus, total = self._luck[request_id]
                self._luck[request_id] = (0.95 * surplus + more, 0.95 * total + spread)
        self._blocks.clear()

    def _arrays(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Features ``[4, R, K]`` of the waiting blocks, which are sampled ``[R]``, and which slots were judged and right."""
        slots = np.arange(max(len(confidence) for _, _, confidence, _, _ in self._blocks))
        sure = np.full((len(self._blocks), len(slots)), 0.5)
        for row, (_, _, confidence, _, _) in zip(sure, self._blocks, strict=True):
            row[: len(confidence)] = confidence
        sure = np.clip(sure, 1e-4, 1 - 1e-4)
        features = np.ones((4, *sure.shape))
        features[1] = np.log(sure / (1 - sure))
        features[2] = slots / 8
        features[3] = np.array([self._luck_of(request_id) for request_id, *_ in self._blocks])[:, None]
        verified, accepted = np.array([block[3:] for block in self._blocks]).T[..., None]
        sampled = np.array([block[1] for block in self._blocks])
        return features, sampled, slots < np.minimum(verified, accepted + 1), slots < accepted

    def end(self, request_id: int) -> None:
        self._luck.pop(request_id, None)


class Goodput(BlockSizePolicy):
    """Most expected tokens per second of the whole batch.

    Greedy and sampled requests differ in what their slots promise, so each kind has its own memory and number of slots.
    """

    uses_confidence = True

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        # For greedy and sampled requests: gains of the last blocks, [largest slots] each, and their mean at the last look.
        self._worth: tuple[deque[list[float]], ...] = (deque(maxlen=_REMEMBERED), deque(maxlen=_REMEMBERED))
        self._usual: list[list[float]] = [[], []]
        self._slots = [0, 0]  # drafted per request at present, by kind
        self._is_close = False  # whether it is worth knowing what a plain cycle takes
        self._price = 0.0  # gain below which a slot is not verified
        self._confidence: list[list[float]] = []  # of the cycle under way
        self._reviewed_for = (0, 0)
        self._cycle = self._next_review = self._next_plain = 0
        self._next_probe = [0, 0]

    def draft(self, requests: Decoding) -> list[int]:
        self._cycle += 1
        sampled = sum(requests.sampled)
        counts = (len(requests) - sampled, sampled)
        if all(len(worth) >= _LESSON for worth, count in zip(self._worth, counts, strict=True) if count) and (
            counts != self._reviewed_for or self._cycle >= self._next_review
        ):
            self._review(counts)
        if self._is_close and self._cycle >= self._next_plain:
            self._next_plain = self._cycle + 2 * _REVIEW
            return [0] * len(requests)
        drafted = [min(limit, self._slots[kind]) for limit, kind in zip(requests.limits, requests.sampled, strict=True)]
        if self._cycle % _REVIEW == 0:  # now and then whole blocks, to know what the slots behind would be worth
            for index in self._by_turns([index for index, size in enumerate(drafted) if size]):
                drafted[index] = requests.limits[index]
        for kind, count in enumerate(counts):
            is_new = len(self._worth[kind]) < _LESSON
            if count and (is_new or (not self._slots[kind] and self._cycle >= self._next_probe[kind])):
                self._probe(kind, requests, drafted)
        return drafted

    def _probe(self, kind: int, requests: Decoding, drafted: list[int]) -> None:
        """Whole blocks for a few requests of a kind, by turns, so that what is known stays true; seldom enough to be cheap."""
        assert self.costs is not None
        chosen = self._by_turns([index for index, sampled in enumerate(requests.sampled) if sampled == kind])
        for index in chosen:
            drafted[index] = requests.limits[index]
        more = sum(requests.limits[index] for index in chosen)
        verifying = self.costs.target.upto(len(requests), more, len(requests))
        extra = self.costs.draft(len(chosen) + more, len(chosen)) + verifying[-1] - verifying[0]
        self._next_probe[kind] = self._cycle + int(extra / verifying[0] / _PROBING)

    def _by_turns(self, members: list[int]) -> set[int]:
        """A few of ``members``, others in every cycle."""
        return {members[(self._cycle * _PROBED + i) % len(members)] for i in range(min(len(members), _PROBED))}

    def _review(self, counts: tuple[int, int]) -> None:
        """The price, and how many slots to draft, that would have paid most for so many requests with the last blocks."""
        assert self.costs is not None
        if counts != self._reviewed_for:
            self._next_plain = self._cycle + 4
        self._reviewed_for, self._next_review = counts, self._cycle + _REVIEW
        worth = [np.array(blocks) for blocks in self._worth]
        self._usual = [blocks.mean(axis=0).tolist() if len(blocks) else [] for blocks in worth]
        plain = sum(counts) / self.costs.target(sum(counts), sum(counts))
        best, self._slots, self._price = _WORTHWHILE * plain, [0, 0], 0.0
        kinds = [kind for kind in (0, 1) if counts[kind]]
        for kind in kinds * len(kinds):  # by turns, the other kind's slots given
            for slots in sorted({0, 1, 2, 3, 4, 6, 8, 11, self.block_size - 1} & set(range(self.block_size))):
                wanted = [slots if k == kind else self._slots[k] for k in (0, 1)]
                rate, price = self._promise(worth, counts, wanted)
                if rate > best:
                    best, self._slots, self._price = rate, wanted, price
        self._is_close = any(self._slots) and best < _CLOSE * plain

    def _promise(self, worth: list[FloatArray], counts: tuple[int, int], slots: list[int]) -> tuple[float, float]:
        """Tokens per second if each kind drafts so many slots, and the smallest gain that is then worth verifying."""
        assert self.costs is not None
        drafting = [kind for kind in (0, 1) if counts[kind] and slots[kind]]
        if not drafting:
            return 0.0, 0.0
        total = sum(counts)
        gains = np.concatenate([worth[kind][:, : slots[kind]].ravel() for kind in drafting])
        # Each remembered slot stands for this many slots of the requests there are.
        shares = np.repeat(
            [counts[kind] / len(worth[kind]) for kind in drafting],
            [len(worth[kind]) * slots[kind] for kind in drafting],
        )
        order = np.argsort(-gains)
        expected = total + np.cumsum(gains[order] * shares[order])
        requests = sum(counts[kind] for kind in drafting)
        tokens = sum(counts[kind] * slots[kind] for kind in drafting)
        verifying = self.costs.target.upto(total, tokens, total)
        verified = np.minimum(np.cumsum(shares[order]).astype(np.int64), tokens)
        rates = expected / (self.costs.draft(requests + tokens, requests) + verifying[verified])
        last = int(rates.argmax())
        return float(rates[last]), float(gains[order[last]])

    def verify(self, requests: Decoding, drafted: list[int], confidence: list[list[float]]) -> list[int]:
        self._confidence = confidence
        sampled, gains, price = requests.sampled, self.acceptance.gains, self._price
        return [
            len(gains(request_id, sampled[index], confidence[index], price)) if drafted[index] else 0
            for index, request_id in enumerate(requests.request_ids)
        ]

    def observe(self, cycle: Cycle) -> None:
        requests = cycle.requests
        drew = [index for index, size in enumerate(cycle.drafted) if size]
        for index in drew:
            block = (requests.request_ids[index], requests.sampled[index], self._confidence[index])
            self.acceptance.observe(*block, cycle.verified[index], cycle.accepted[index])
        self.acceptance.learn()
        for turn in range(min(len(drew), _PROBED)):
            index = drew[(self._cycle + turn) % len(drew)]
            block = (requests.request_ids[index], requests.sampled[index], self._confidence[index])
            self._remember(requests.sampled[index], self.acceptance.gains(*block))

    def _remember(self, kind: int, gains: list[float]) -> None:
        """Slots that were not drafted are taken to be as good as they usually are, given those before them."""
        most = self.block_size - 1
        if len(gains) < most:
            usual = self._usual[kind] or [1.0] * most
            last = gains[-1] / max(usual[len(gains) - 1], 1e-6)
            gains += [min(gains[-1], last * gain) for gain in usual[len(gains) :]]
        self._worth[kind].append(gains)

    def end(self, request_id: int) -> None:
        self.acceptance.end(request_id)
