"""What would have paid most with the last blocks, for the requests there are now: how many slots to draft, and what a slot must
promise to be verified.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from volley.decode.acceptance import KINDS, TREE
from volley.decode.cost import Costs, FloatArray

_AS_GOOD = 0.97  # of the best promise for blocks not to be cut: the best of many estimates flatters itself
_HOPELESS = 0.9  # of the best promise: more slots still are not looked at


class Plan(NamedTuple):
    """What is drafted and verified, and what was promised for it."""

    rate: float  # tokens per second if all requests were as fast as their geometric mean
    seconds: float  # of a cycle
    slots: list[int]  # drafted for each request of a kind
    prices: list[float]  # by kind, the gain below which a slot is not verified
    pace: list[float]  # by kind, tokens of a request in a cycle
    verified: float  # tokens of all drafts


PLAIN = Plan(0.0, 0.0, [0] * KINDS, [0.0] * KINDS, [1.0] * KINDS, 0.0)


class Planner:
    """The slots of the last blocks, the most promising first: the best split of a pass verifies those before some place."""

    def __init__(self, costs: Costs, counts: list[int], worth: dict[int, FloatArray], pace: list[float]) -> None:
        """``counts`` are the requests of each kind, ``worth[kind] [slots, blocks]`` what the slots, or nodes, of its last blocks
        were expected to gain; ``pace``, by kind, is how many tokens a request makes in a cycle at present.
        """
        self._costs, self._counts, self._pace = costs, counts, pace
        self._present = [kind for kind in range(KINDS) if counts[kind]]
        self._total = sum(counts)
        self._shares = np.array([counts[kind] / self._total for kind in self._present])
        self._lengths = {kind: len(slots) for kind, slots in worth.items()}
        every = [worth[kind] for kind in self._present]
        kinds = np.repeat(self._present, [slots.size for slots in every])
        blocks = np.repeat([slots.shape[1] for slots in every], [slots.size for slots in every])
        places = np.concatenate([np.indices(slots.shape)[0].ravel() for slots in every]) * (kinds < TREE)
        gains = np.concatenate([slots.ravel() for slots in every])
        values = gains / np.array(pace)[kinds]
        order = np.argsort(-values)
        self._values: FloatArray = values[order]  # what a slot promises, relative to its request's pace
        self._kinds: NDArray[np.int64] = kinds[order]
        self._places: NDArray[np.int64] = places[order]  # in a chain; 0 in a tree, which is drafted whole or not at all
        # So many slots of the requests there are now.
        self._stands_for: FloatArray = (np.array(counts)[kinds] / blocks)[order]
        # What a request of each kind there is gains by the slot.
        self._tokens: FloatArray = ((kinds == np.array(self._present)[:, None]) * gains / blocks)[:, order]

    def best(self, most: int) -> Plan:
        """Of the plans that draft up to ``most`` slots for a request."""
        best = PLAIN
        choices = [k for k in (0, 1, 2, 3, 4, 6, 8, 11) if k < most] + [most]
        # All together first: where drafting for one kind alone would not pay, it may for all.
        for changing in [self._present, *([kind] for kind in self._present if len(self._present) > 1)]:
            now = choices.index(max(best.slots[kind] for kind in changing))
            near = choices if changing == self._present else sorted({0, *choices[max(now - 1, 0) : now + 2]})
            for k in near if min(changing) < TREE else (0, most):
                slots = list(best.slots)
                for kind in changing:
                    slots[kind] = most if k and kind >= TREE else k
                plan = self.promise(slots)
                if k > best.slots[changing[0]] and plan.rate < _HOPELESS * best.rate:
                    break  # larger passes take long to measure
                best = max(best, plan, key=lambda plan: plan.rate)
        return best

    def promise(self, slots: list[int]) -> Plan:
        """The best that can come of drafting so many slots for each kind."""
        if not any(slots):
            return PLAIN
        drafted = self._places < np.array(slots)[self._kinds]
        verified = self._stands_for[drafted].cumsum()
        paces = 1 + self._tokens[:, drafted].cumsum(axis=1)
        seconds = self._seconds(slots, verified)
        rates = self._total * np.exp(self._shares @ np.log(paces)) / seconds
        is_cut = rates[-1] < _AS_GOOD * rates.max()
        last = int(rates.argmax()) if is_cut else len(rates) - 1
        price = float(self._values[drafted][last]) if is_cut else 0.0
        pace = list(PLAIN.pace)
        for kind, reached in zip(self._present, paces[:, last].tolist(), strict=True):
            pace[kind] = reached
        prices = [price * each for each in self._pace]
        return Plan(float(rates[last]), float(seconds[last]), slots, prices, pace, float(verified[last]))

    def _seconds(self, slots: list[int], verified: FloatArray) -> FloatArray:
        """Of cycles that verify so many tokens of blocks of which ``slots`` are drafted, by kind."""
        counts, total = self._counts, self._total
        drafting = [kind for kind in self._present if slots[kind]]
        longest = [self._lengths[kind] if kind >= TREE else min(slots[kind], self._lengths[kind]) for kind in drafting]
        most = sum(counts[kind] * length for kind, length in zip(drafting, longest, strict=True))
        requests = sum(counts[kind] for kind in drafting)
        drafted = requests + sum(counts[kind] * slots[kind] for kind in drafting)
        whole = np.minimum(verified.astype(np.int64), most)
        # Of few requests often none is as long as it might be; one alone is never padded.
        padding = (1 - 1 / total) * (total * max(longest) - whole)
        seconds: FloatArray = self._costs.target.upto(total, most, total)[whole]
        return seconds + self._costs.draft(drafted, requests) + self._costs.target.padding(padding)
