"""Choose the number of denoising passes over a draft of self-speculation: the one with the most tokens per second, or none.

This is not a :class:`~volley.policies.base.Policy`: the self-speculative decoding method uses it for drafts that it makes
itself. Each pass makes more of the canvas right, and takes as long as a pass that writes one token. The gain of a number of
passes is the mean of its last cycles. Its cost is in the cost table.

The first pass over the next canvas may be fused into the pass that verifies a draft. The fused canvas is useful only if the
whole draft is right. That probability is learnt from the probabilities of the draft's tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

import numpy as np

from volley.policies.acceptance import SAMPLED, Acceptance
from volley.policies.cost import FloatArray, PassCost
from volley.policies.probes import WORTHWHILE, cycles_between

_ENOUGH = 4  # cycles with a number of passes before its mean is used
_HOPE = 1.6  # until then: assumed gain in tokens over half as many passes
_REMEMBERED = 64  # cycles that a mean covers
_REVIEW = 32  # cycles between two reviews
_ALL = 0  # request id of the shared acceptance record


@dataclass
class _Tried:
    """Measurements of one number of passes."""

    means: FloatArray = field(default_factory=lambda: np.zeros(3))
    """Means of its last cycles: tokens, passes over the canvas alone, tokens verified."""
    cycles: int = 0
    last: int = 0  # cycle of its last probe

    def add(self, values: tuple[float, float, float]) -> None:
        self.cycles += 1
        self.means += (np.array(values) - self.means) / min(self.cycles, _REMEMBERED)


@dataclass
class _Drafts:
    """Measurements for drafts of one length, greedy or sampled."""

    tried: dict[int, _Tried]
    best: int = 0
    others: dict[int, int] = field(default_factory=dict)  # numbers of passes to probe, with cycles between probes
    until: int = 0  # cycle of the next review
    requests: int = 0  # number of requests at the last review


class DraftSteps:
    """Learns from all requests of an engine, separately for greedy and sampled ones and for each block length.

    Verification is lossless whatever a canvas holds, so this may depend on tokens, too.
    """

    def __init__(self, costs: PassCost, plain: int = 1) -> None:
        """Choose by ``costs``. A pass that writes one token of a request covers ``plain`` tokens of it."""
        self.costs, self.plain = costs, plain
        self._drafts: dict[tuple[int, bool], _Drafts] = {}
        self._cycle = 0
        self._acceptance = Acceptance()

    def choose(self, length: int, requests: int, *, is_greedy: bool) -> int:
        """Return the number of passes over the next draft of ``length - 1`` tokens, 0 for no draft, if ``requests`` draft
        together."""
        own = self._drafts.get((length, is_greedy))
        if own is None:
            own = self._drafts[length, is_greedy] = _Drafts({steps: _Tried() for steps in candidates(length)})
        self._cycle += 1
        if length > 1 and own.tried[1].cycles < _ENOUGH:
            return 1
        if self._cycle >= own.until or 2 * abs(requests - own.requests) >= own.requests:
            self._review(own, length, requests)
        for steps, every in own.others.items():
            if self._cycle >= own.tried[steps].last + every:
                own.tried[steps].last = self._cycle
                return steps
        return own.best

    def _review(self, own: _Drafts, length: int, requests: int) -> None:
        seconds, rates, tokens = {0: self._pass(self.plain, requests)}, dict[int, float](), 1.0
        rates[0] = 1 / seconds[0]
        for steps, tried in own.tried.items():
            hoped = (min(_HOPE * tokens, length), steps, length)
            tokens, alone, verified = tried.means.tolist() if tried.cycles >= _ENOUGH else hoped
            seconds[steps] = self._pass(verified, requests) + alone * self._pass(length, requests)
            rates[steps] = tokens / seconds[steps]
        best = max(rates, key=rates.__getitem__)
        own.best = best if rates[best] > WORTHWHILE * rates[0] else 0
        is_known = own.best == 0 or own.tried[own.best].cycles >= _ENOUGH
        own.until, own.requests = self._cycle + (_REVIEW if is_known else 1), requests
        own.others.clear()
        for steps in own.tried.keys() - {own.best}:
            own.others[steps] = cycles_between(rates[steps], seconds[steps], rates[own.best], seconds[own.best])

    def should_fuse(
        self, confidence: Sequence[float], verified: int, length: int, requests: int, *, is_greedy: bool
    ) -> bool:
        """Return True if the next canvas should be fused behind a draft whose tokens had these probabilities.

        The fused pass over ``verified`` tokens of each request gets longer by ``length``. It saves a pass over ``length`` if
        the whole draft is right.
        """
        chance = self._acceptance.gains(_ALL, 0 if is_greedy else SAMPLED, list(confidence))[-1]
        self.costs.time((verified + length) * requests)
        together, verifying, alone = (
            self.costs.rough(tokens * requests, requests) for tokens in (verified + length, verified, length)
        )
        return chance * alone >= together - verifying

    def note_right(self, confidence: Sequence[float], accepted: int, *, is_greedy: bool) -> None:
        """Learn how many tokens of a draft with these probabilities were right."""
        right = [True] * accepted + [False] * (accepted < len(confidence))
        self._acceptance.observe(_ALL, 0 if is_greedy else SAMPLED, list(confidence), right)

    def _pass(self, tokens: float, requests: int) -> float:
        return self.costs(ceil(tokens * requests), requests)

    def observe(self, length: int, steps: int, *, is_greedy: bool, tokens: int, alone: int, verified: int) -> None:
        """Learn from a cycle of one request: a draft of ``steps`` passes brought ``tokens``.

        ``alone`` of these passes did nothing else. The last pass verified the draft: it covered ``verified`` tokens, including
        a fused canvas.
        """
        own = self._drafts.get((length, is_greedy))
        if own is not None and steps in own.tried:
            own.tried[steps].add((tokens, alone, verified))


def candidates(length: int) -> list[int]:
    """Return the numbers of passes that are tried for a draft of ``length - 1`` masks: powers of two."""
    return [1 << power for power in range((length - 1).bit_length())]
