"""What would have paid most with the last blocks, for the requests there are now."""

from typing import Any, NamedTuple

import numpy as np

from volley.decode.lookup import MOST_FOUND
from volley.policies.acceptance import KINDS, TREE
from volley.policies.cost import Costs, FloatArray

_SLOTS = (11, 8, 6, 4, 3, 2, 1)  # of a chain that are tried, besides the most there may be; neighbours differ by 1 %
# Tried as chances below which a slot is not verified. The best is flat, so neighbours are about as good; 0 leaves blocks whole.
_PRICES = np.array((0.0, 0.02, 0.04, 0.08, 0.12, 0.18, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85))
PLAIN, WHOLE = 0, 1  # the first two options
UNEVEN = 1.04  # times as long as even ones take passes over blocks that were cut: queries are padded to the longest
_SPREAD = 2.0  # standard deviations of what a cycle verifies by which a long one exceeds a usual one


class Plan(NamedTuple):
    """What is drafted and verified, and what is expected of it; lists are by kind."""

    rate: float  # tokens per second if all requests were as fast as their geometric mean
    seconds: float  # of a cycle
    waiting: float  # seconds that a prompt waits for a cycle in which more than usual is verified
    slots: list[int]  # that a request drafts
    prices: list[float]  # the chance below which a slot, or node, is not verified
    tokens: list[float]  # of a request in a cycle
    verified: list[float]  # slots, or nodes, of a request in a cycle
    nodes: int = 10**6  # of a tree, at most


class Planner:
    """Every pair of slots and price is an option; for each kind it is known how many tokens it brings and verifies.

    Where the host would have to wait for the confidences by which drafts are cut, 0 is the only price.
    """

    def __init__(
        self, costs: Costs, counts: list[int], gains: dict[int, FloatArray], trust: list[float], most: int
    ) -> None:
        """``counts`` are the requests of each kind, ``gains[kind] [slots, blocks]`` the chances of the slots, or nodes, of the
        last blocks: they decide what is verified, and ``trust[kind]`` of them come true. ``most`` slots may be drafted.
        """
        self._costs, self._counts, self._total = costs, np.array(counts, dtype=float), sum(counts)
        self.most_seconds = most_seconds(costs, self._total)
        """That a prompt may wait for a cycle."""
        prices = _PRICES[:1] if costs.drafts_late else _PRICES
        sizes = np.array([most, *(size for size in _SLOTS if size < most)] if gains else [], dtype=int)
        slots = np.append(0, np.repeat(sizes, len(prices)))
        self._options = np.zeros((4, KINDS, len(slots)))  # slots, prices, tokens and verified, as in a plan
        self._spread = np.zeros((2, KINDS, len(slots)))  # variance of what a request verifies, and the most it can
        self._options[0] = slots
        self._options[0, TREE:] = most * (slots > 0)  # a tree is drafted whole or not at all
        self._options[1] = np.append(0.0, np.tile(prices, len(sizes)))
        self._options[2] = 1.0
        for kind, chances in gains.items():
            kept = chances >= prices[:, None, None]  # [prices, slots, blocks]
            last = np.minimum(sizes, len(chances)) if kind < TREE else np.full(len(sizes), len(chances))
            for row, values in ((2, kept * (trust[kind] * chances)), (3, kept)):
                self._options[row, kind, 1:] += values.mean(axis=2).cumsum(axis=1)[:, last - 1].T.ravel()
            if self.most_seconds < np.inf:
                self._spread[0, kind, 1:] = kept.cumsum(axis=1)[:, last - 1].var(axis=2).T.ravel()
                self._spread[1, kind, 1:] = np.repeat(last, len(prices))

    def promise(self, options: Any) -> Plan:
        """What is expected of an option for each kind."""
        (rate,), (seconds,), (waiting,) = self._expect(np.array(options)[:, None])
        slots, *expected = self._options[:, range(KINDS), options].tolist()
        return Plan(float(rate), float(seconds), float(waiting), list(map(int, slots)), *expected)

    def best(self) -> Plan:
        """The best plan that drafts and does not keep prompts waiting too long; if all do, the plain one.

        Larger passes than any so far are timed only if they look best: that takes long.
        """
        while True:
            plan = self.promise(self._search())
            verified, drafted = float(self._counts @ plan.verified), float(self._counts @ plan.slots)
            costs = self._costs
            if not any([costs.target.time(self._total + verified), costs.draft.time(self._total + drafted)]):
                return plan

    def _search(self) -> Any:
        """One option for all kinds first, since drafting may pay for all where it pays for none alone; then the best for each."""
        chosen, present = np.full(KINDS, PLAIN), self._counts.nonzero()[0].tolist()
        for changing in [present, *([kind] for kind in present if len(present) > 1)]:
            trial = np.tile(chosen[:, None], self._options.shape[2])
            trial[changing] = np.arange(self._options.shape[2])
            drafts, (rates, _, waiting) = trial[present].any(axis=0), self._expect(trial)
            chosen = trial[:, (rates * drafts * (waiting <= self.most_seconds)).argmax()]
        return chosen

    def _expect(self, options: Any) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Rate, seconds and waiting of plans, given by their options ``[kinds, plans]``."""
        kinds = np.arange(KINDS)[:, None]
        slots, prices, tokens, verified = self._options[:, kinds, options]
        usual, drafting = self._counts @ verified, self._drafting(self._counts @ slots, self._counts @ (slots > 0))
        uneven = np.where((self._counts @ prices > 0) & (self._total > 1), UNEVEN, 1.0)
        seconds = (self._costs.target.expected(self._total + usual, self._total) + drafting) * uneven
        rates = self._total * np.exp(self._counts / self._total @ np.log(tokens)) / seconds
        if self.most_seconds == np.inf:
            return rates, seconds, seconds
        variance, most = self._spread[:, kinds, options]
        verified = np.minimum(usual + _SPREAD * np.sqrt(self._counts @ variance), self._counts @ most)
        passing = self._costs.target.expected(self._total + verified, self._total)
        return rates, seconds, self._costs.waiting(drafting, passing) * uneven

    def _drafting(self, slots: FloatArray, requests: FloatArray) -> FloatArray:
        """Seconds to draft so many slots for so many requests."""
        return self._costs.draft.expected(slots + requests, requests) * (requests > 0) if slots.any() else 0.0 * slots

    def room(self, plan: Plan) -> int:
        """How many more tokens than a plan's a cycle may verify."""
        if self.most_seconds == np.inf:
            return self._total * MOST_FOUND
        left = max(0.0, self.most_seconds - plan.waiting)
        more = np.arange(1 + self._total * MOST_FOUND) + self._total + self._counts @ plan.verified
        passes = self._costs.target.expected(more, self._total)
        return int(np.searchsorted(passes, passes[0] + left, side="right")) - 1

    def copying(self, plan: Plan) -> tuple[float, list[float]]:
        """What a token copied from the text costs, and by kind what a copy must be worth to take the place of a draft.

        Both are logarithms of tokens: a cycle that is longer by 1 % makes every request slower by 1 %.
        """
        slots, tokens = np.array(plan.slots), self._total + self._counts @ plan.verified + np.array((0.0, MOST_FOUND))
        self._costs.target.time(tokens[1])
        each = float(np.diff(self._costs.target.expected(tokens, self._total))[0]) / MOST_FOUND
        drafted, drafting = self._counts @ slots, self._counts @ (slots > 0)
        saved = self._drafting(drafted, drafting) - self._drafting(drafted - slots, drafting - (slots > 0))
        lost = self._total / plan.seconds
        return lost * each, list(np.log(plan.tokens) - lost * (each * np.array(plan.verified) + saved))


def most_seconds(costs: Costs, requests: int) -> float:
    """How long a prompt may wait for a cycle of so many requests."""
    return costs.arrivals.most_seconds(costs.target(requests, requests))


def fitting(costs: Costs, requests: int, most: int) -> int:
    """How many tokens, at most ``most``, each of so many requests may draft and verify while no prompt waits too long."""
    bound = most_seconds(costs, requests)
    costs.draft.time(requests)
    if bound == np.inf or most == 0:
        return most
    sizes = requests * (1 + np.arange(1, most + 1, dtype=float))
    waiting = costs.waiting(costs.draft.expected(sizes, requests), costs.target.expected(sizes, requests))
    return int((waiting <= bound).sum())
