"""How likely a target agrees with a draft: learnt while it runs, from how sure the draft was and how it went."""

from math import exp, log

import numpy as np
from numpy.typing import NDArray

from volley.decode.cost import FloatArray

SAMPLED, TREE = 1, 2  # kinds of requests are 0 and 1, greedy and sampled, and 2 more where a tree is drafted
KINDS = 4

_LESSON = 16  # blocks learnt from at once, which costs less than one by one
# What agreement is expected to depend on at first (see Acceptance): drafts of the four kinds, and tokens found in greedy and in
# sampled texts.
OF_DRAFTS = ((0.5, 0.9, -0.9, 1.0), (0.0, 0.6, -0.5, 0.5), (0.2, 1.0, 0.0, 1.0), (-0.2, 0.9, 0.0, 0.6))
OF_FOUND = ((-1.0, 1.5, 0.0, 1.0), (-0.4, 0.8, 0.0, 0.6))


class Acceptance:
    """How likely the target agrees with a slot of a chain, given that it agreed with those before it, or with a node of a tree.

    A logistic model of the drafter's log-odds, the slot's number and how much luckier than expected the request has been,
    one for each kind, learnt online (Adagrad). Of a sampled chain it sees only how little the largest probability leaves to the
    other tokens: flat laws of draft and target still have much in common, where a greedy draft would be wrong.
    """

    def __init__(self, start: tuple[tuple[float, ...], ...] = OF_DRAFTS) -> None:
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
        gain, is_tree = 1.0, kind >= TREE
        for slot, sure in enumerate(confidence):
            if not 1e-4 < sure < 1 - 1e-4:
                sure = min(max(sure, 1e-4), 1 - 1e-4)
            odds = (0.0 if kind == SAMPLED else log(sure)) - log(1 - sure)
            alone = 1 / (1 + exp(-constant - slope * odds - later * slot / 8))
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
            judged[row, : len(marks) if kind >= TREE else min(len(marks), sum(marks) + 1)] = True
        sure = np.clip(sure, 1e-4, 1 - 1e-4)
        features = np.ones((4, *sure.shape))
        kinds = np.array([kind for _, kind, _, _ in self._blocks])
        features[1] = np.log(sure) * (kinds != SAMPLED)[:, None] - np.log(1 - sure)
        features[2] = slots / 8
        features[3] = np.array([self._luck_of(request_id) for request_id, *_ in self._blocks])[:, None]
        return features, kinds, judged, right

    def end(self, request_id: int) -> None:
        self._luck.pop(request_id, None)
