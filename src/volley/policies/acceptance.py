"""Predict if the target accepts a draft token. The model learns while decoding, from the drafter's confidences and the
outcomes."""

from math import exp, log, sqrt

SAMPLED, TREE = 1, 2  # a request's kind is 0 if greedy and 1 if sampled, plus 2 if it drafts trees
KINDS = 4

# Initial weights by kind: fitted to the bundled pair, and outweighed after some 50 blocks.
OF_DRAFTS = ((0.5, 0.9, -0.9, 1.0), (0.0, 0.6, -0.5, 0.5), (0.2, 1.0, 0.0, 1.0), (-0.2, 0.9, 0.0, 0.6))
OF_LOOKUP = ((-1.0, 1.5, 0.0, 1.0), (-0.4, 0.8, 0.0, 0.6))  # for prompt lookup in greedy and in sampled texts

_RATE = 0.1  # Adagrad's learning rate; twice as much is noisier on stationary text
_KEPT = 0.99  # decay of the squares per block; a sum over all blocks would adapt too slowly to new texts
_LEAST = 0.01  # least sum of squares: otherwise small gradients would keep moving the weights if nothing is accepted
_RECENT = 0.95  # decay of a request's record per block: about 20 blocks count
_DOUBT = 4.0  # added to a record's variance, so that a few tokens say little


class Acceptance:
    """Predicts the acceptance probability of each position of a chain, given those before it, or of each node of a tree.

    It is a logistic model for each kind, learnt online (Adagrad with decay). Its features are 1, the log-odds of the
    confidence, the position and the request's record: how many more of its tokens were accepted than expected. In a sampled
    chain, draft and target agree with probability Σ min(p, q), which is not small if both are flat. There the second feature
    is -log(1 - confidence).
    """

    def __init__(self, start: tuple[tuple[float, ...], ...] = OF_DRAFTS) -> None:
        self.weights = [list(row) for row in start]
        self._squares = [[0.1] * 4 for _ in start]  # sums of squared gradients; 0.1 keeps the first steps short
        self._records: dict[int, tuple[float, float]] = {}  # by request: Σ (right - expected) and Σ variance

    def gains(self, request_id: int, kind: int, confidence: list[float], threshold: float = 0.0) -> list[float]:
        """Return the probability that each position, or node, is accepted with all before it, up to the first below the
        ``threshold``.

        Plain Python takes a fifth of the time of arrays for a few positions.
        """
        constant, slope, later, own = self.weights[kind]
        constant += own * self._record(request_id)
        gains: list[float] = []
        gain = 1.0
        for position, sure in enumerate(confidence):
            alone = 1 / (1 + exp(-constant - slope * _odds(kind, sure) - later * position / 8))
            gain = min(gain, alone) if kind >= TREE else gain * alone
            if gain < threshold:
                break
            gains.append(gain)
        return gains

    def _record(self, request_id: int) -> float:
        surplus, variance = self._records.get(request_id, (0.0, 0.0))
        return surplus / (variance + _DOUBT)

    def observe(self, request_id: int, kind: int, confidence: list[float], right: list[bool]) -> None:
        """Learn from a block whose first ``len(right)`` tokens were verified; from a chain only up to its first error."""
        weights, squares, record = self.weights[kind], self._squares[kind], self._record(request_id)
        constant, slope, later = weights[0] + weights[3] * record, weights[1], weights[2]
        surplus = by_odds = by_position = variance = 0.0
        for position, (sure, is_right) in enumerate(zip(confidence, right, strict=False)):
            odds = _odds(kind, sure)
            chance = 1 / (1 + exp(-constant - slope * odds - later * position / 8))
            error, variance = is_right - chance, variance + chance * (1 - chance)
            surplus, by_odds, by_position = surplus + error, by_odds + error * odds, by_position + error * position / 8
            if not is_right and kind < TREE:
                break
        for index, gradient in enumerate((surplus, by_odds, by_position, surplus * record)):
            squares[index] = _KEPT * squares[index] + gradient * gradient
            weights[index] += _RATE * gradient / sqrt(max(squares[index], _LEAST))
        before, total = self._records.get(request_id, (0.0, 0.0))
        self._records[request_id] = (_RECENT * before + surplus, _RECENT * total + variance)

    def end(self, request_id: int) -> None:
        self._records.pop(request_id, None)


def _odds(kind: int, sure: float) -> float:
    sure = min(max(1e-4, sure), 1 - 1e-4)  # in this order NaN becomes 1e-4
    return (0.0 if kind == SAMPLED else log(sure)) - log(1 - sure)
