"""Make plans for the goodput policy: what would have paid most with the last blocks, for the current requests."""

from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from volley.decode.lookup import MOST_LOOKUP_TOKENS
from volley.policies.acceptance import KINDS, TREE
from volley.policies.cost import Costs, FloatArray

_LENGTHS = (11, 8, 6, 4, 3, 2, 1)  # lengths of chains that are tried besides the longest; neighbours differ by 1 %
# Thresholds that are tried: a position with a lower probability is not verified, and 0 keeps blocks whole. Neighbours are about
# as good.
_THRESHOLDS = np.array((0.0, 0.02, 0.04, 0.08, 0.12, 0.18, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85))
PLAIN = 0  # index of the option that drafts nothing
UNEVEN = 1.04  # factor of the time of a pass over cut blocks, because queries are padded to the longest
_SPREAD = 2.0  # standard deviations by which a long cycle verifies more tokens than a usual one


class Plan(NamedTuple):
    """Draft specification with its expected results. Lists have one entry for each kind of request."""

    rate: float  # tokens per second, if all requests were as fast as their geometric mean
    seconds: float  # seconds of a cycle
    waiting: float  # seconds that a prompt waits for a long cycle
    positions: list[int]  # positions that a request drafts
    thresholds: list[float]  # a position, or node, with a lower probability is not verified
    tokens: list[float]  # tokens that a request gains in a cycle
    verified: list[float]  # positions, or nodes, of a request that a cycle verifies
    nodes: int = 10**6  # most nodes of a tree


class Planner:
    """Searches the options for each kind of request. An option is a pair of draft length and threshold.

    ``_options`` has the axes [positions, thresholds, tokens, verified], kind and option. ``_spread`` has the axes [variance,
    maximum] of verified tokens, kind and option. If reading confidences would make the host wait, the only threshold is 0.
    """

    def __init__(
        self, costs: Costs, counts: list[int], gains: dict[int, FloatArray], trust: list[float], most: int
    ) -> None:
        """Tabulate the options. ``counts`` are the numbers of requests by kind.

        ``gains[kind] [positions, blocks]`` are the acceptance probabilities of positions, or nodes, of the last blocks. They
        decide what is verified, and ``trust[kind]`` is the share of them that came true. A kind without gains is not drafted
        for. ``most`` is the largest number of positions.
        """
        self._costs, self._counts, self._total = costs, np.array(counts, dtype=float), sum(counts)
        self.most_seconds = most_seconds(costs, self._total)
        """Longest allowed wait of a prompt for a cycle, in seconds."""
        thresholds = _THRESHOLDS[:1] if costs.drafts_on_device else _THRESHOLDS
        sizes = np.array([most, *(size for size in _LENGTHS if size < most)] if gains else [], dtype=int)
        positions = self._positions = np.append(0, np.repeat(sizes, len(thresholds)))
        self._options = np.zeros(
            (4, KINDS, len(positions))
        )  # rows: positions, thresholds, tokens and verified, as in Plan
        self._spread = np.zeros((2, KINDS, len(positions)))  # rows: variance and maximum of what a request verifies
        self._options[0] = positions
        self._options[0, TREE:] = most * (positions > 0)  # a tree is drafted whole or not at all
        self._options[1] = np.append(0.0, np.tile(thresholds, len(sizes)))
        self._options[2] = 1.0
        self._options[:2, [kind for kind in range(KINDS) if kind not in gains]] = 0.0
        for kind, chances in gains.items():
            kept = chances >= thresholds[:, None, None]  # [thresholds, positions, blocks]
            last = np.minimum(sizes, len(chances)) if kind < TREE else np.full(len(sizes), len(chances))
            for row, values in ((2, kept * np.minimum(trust[kind] * chances, 1.0)), (3, kept)):
                self._options[row, kind, 1:] += values.mean(axis=2).cumsum(axis=1)[:, last - 1].T.ravel()
            if self.most_seconds < np.inf:
                self._spread[0, kind, 1:] = kept.cumsum(axis=1)[:, last - 1].var(axis=2).T.ravel()
                self._spread[1, kind, 1:] = np.repeat(last, len(thresholds))

    def promise(self, options: Any) -> Plan:
        """Return the plan that uses one option for each kind."""
        (rate,), (seconds,), (waiting,) = self._expect(np.array(options)[:, None])
        positions, *expected = self._options[:, range(KINDS), options].tolist()
        return Plan(float(rate), float(seconds), float(waiting), list(map(int, positions)), *expected)

    def whole(self, size: int) -> Plan:
        """Return the plan that verifies whole drafts of ``size`` positions: 0, or one of the lengths that are tried."""
        return self.promise([int(np.flatnonzero(self._positions == size)[0])] * KINDS)

    def best(self) -> Plan:
        """Return the best plan that drafts and does not keep prompts waiting too long; the plain one if there is none.

        Timing takes long, so passes larger than any so far are timed only if they look best.
        """
        while True:
            plan = self.promise(self._search())
            verified, drafted = float(self._counts @ plan.verified), float(self._counts @ plan.positions)
            costs = self._costs
            if not any([costs.target.time(self._total + verified), costs.draft.time(self._total + drafted)]):
                return plan

    def _search(self) -> Any:
        """Return the options of the best plan that drafts: first one for all kinds, then the best pair for every two kinds in
        turn.

        Drafting may pay for two kinds together and for neither alone. With one or two kinds no plan is better.
        """
        present = self._counts.nonzero()[0].tolist()
        every = np.arange(self._options.shape[2])
        chosen = self._best_of(np.where(self._counts[:, None] > 0, every, PLAIN))
        for one, other in combinations(present, 2):
            first, second = np.meshgrid(self._worthy(one), self._worthy(other), indexing="ij")
            trial = np.tile(chosen[:, None], first.size)
            trial[[one, other]] = first.ravel(), second.ravel()
            chosen = self._best_of(trial)
        return chosen

    def _best_of(self, plans: Any) -> Any:
        """Return the best of ``plans [kinds, plans]`` that draft and keep no prompt waiting too long; the first one if there
        is none."""
        rates, _, waiting = self._expect(plans)
        return plans[:, (rates * plans.any(axis=0) * (waiting <= self.most_seconds)).argmax()]

    def _worthy(self, kind: int) -> Any:
        """Return a kind's options: plain, and those that no other draft beats or equals in tokens and in all costs."""
        positions, thresholds, tokens, verified = self._options[:, kind]
        costs = np.stack([positions, thresholds > 0, verified, *self._spread[:, kind], -tokens])
        beaten = (costs[:, :, None] <= costs[:, None]).all(axis=0)  # [by, option]
        beaten &= (costs[:, :, None] < costs[:, None]).any(axis=0) | ~np.tri(len(positions), dtype=bool)
        beaten[PLAIN] = False
        return np.flatnonzero(~beaten.any(axis=0))

    def _expect(self, options: Any) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return rate, seconds and waiting of plans ``[plans]`` with ``options [kinds, plans]``."""
        kinds = np.arange(KINDS)[:, None]
        positions, thresholds, tokens, verified = self._options[:, kinds, options]
        usual, drafting = (
            self._counts @ verified,
            self._drafting(self._counts @ positions, self._counts @ (positions > 0)),
        )
        uneven = np.where((self._counts @ thresholds > 0) & (self._total > 1), UNEVEN, 1.0)
        seconds = (self._costs.target.expected(self._total + usual, self._total) + drafting) * uneven
        rates = self._total * np.exp(self._counts / self._total @ np.log(tokens)) / seconds
        if self.most_seconds == np.inf:
            return rates, seconds, seconds
        variance, most = self._spread[:, kinds, options]
        verified = np.minimum(usual + _SPREAD * np.sqrt(self._counts @ variance), self._counts @ most)
        passing = self._costs.target.expected(self._total + verified, self._total)
        return rates, seconds, self._costs.waiting(drafting, passing) * uneven

    def _drafting(self, positions: FloatArray, requests: FloatArray) -> FloatArray:
        """Return the seconds to draft ``positions`` for ``requests``."""
        if not positions.any():
            return 0.0 * positions
        return self._costs.draft.expected(positions + requests, requests) * (requests > 0)

    def lookup_budget(self, plan: Plan) -> int:
        """Return how many tokens a cycle may verify beyond those of a plan."""
        if self.most_seconds == np.inf:
            return self._total * MOST_LOOKUP_TOKENS
        left = max(0.0, self.most_seconds - plan.waiting)
        more = np.arange(1 + self._total * MOST_LOOKUP_TOKENS) + self._total + self._counts @ plan.verified
        passes = self._costs.target.expected(more, self._total)
        return int(np.searchsorted(passes, passes[0] + left, side="right")) - 1

    def lookup_costs(self, plan: Plan) -> tuple[float, list[float]]:
        """Return the cost of verifying one prompt-lookup token, and by kind the gain above which prompt lookup replaces a
        draft.

        Both values are in log-tokens, so gains in tokens and losses in time can be subtracted.
        """
        positions = np.array(plan.positions)
        tokens = self._total + self._counts @ plan.verified + np.array((0.0, MOST_LOOKUP_TOKENS))
        self._costs.target.time(tokens[1])
        each = float(np.diff(self._costs.target.expected(tokens, self._total))[0]) / MOST_LOOKUP_TOKENS
        drafted, drafting = self._counts @ positions, self._counts @ (positions > 0)
        saved = self._drafting(drafted, drafting) - self._drafting(drafted - positions, drafting - (positions > 0))
        lost = self._total / plan.seconds
        return lost * each, list(np.log(plan.tokens) - lost * (each * np.array(plan.verified) + saved))


def most_seconds(costs: Costs, requests: int) -> float:
    """Return how long a prompt may wait for a cycle of ``requests``."""
    return costs.arrivals.most_seconds(costs.target(requests, requests))


def fitting(costs: Costs, requests: int, most: int) -> int:
    """Return how many tokens, at most ``most``, each of ``requests`` may draft and verify without keeping a prompt waiting too
    long."""
    bound = most_seconds(costs, requests)
    costs.draft.time(requests)
    if bound == np.inf or most == 0:
        return most
    sizes = requests * (1 + np.arange(1, most + 1, dtype=float))
    waiting = costs.waiting(costs.draft.expected(sizes, requests), costs.target.expected(sizes, requests))
    return int((waiting <= bound).sum())
