"""Whether tokens were drawn from the distributions they should come from.

Tokens of one text depend on each other, and these tests allow it: given the tokens before, each token's deviation from its own
distribution has mean zero, whatever those tokens were.
"""

import math
from dataclasses import dataclass
from random import Random
from statistics import NormalDist

import torch
from torch import Tensor

BINS = 10


@dataclass
class Deviations:
    """Sums over tokens. ``add`` takes one token and the distribution that it should have come from."""

    random: Random
    count: int = 0
    hits: float = 0.0
    """Tokens that were the likeliest, less how many were expected."""
    variance: float = 0.0
    impossible: int = 0
    """Tokens that have no probability."""

    def __post_init__(self) -> None:
        self.bins = [0] * BINS

    def add(self, probs: Tensor, token: int) -> None:
        """``probs [V]`` (fp64)."""
        largest, own = float(probs.max()), float(probs[token])
        is_best = own == largest
        best = min(1.0, float(probs[probs == largest].sum()))
        self.count += 1
        self.hits += is_best - best
        self.variance += best * (1 - best)
        self.impossible += own == 0
        likelier = float(probs[probs > own].sum()) if not is_best else 0.0
        equal = float(probs[probs == own].sum())
        place = likelier + self.random.random() * equal
        self.bins[min(BINS - 1, int(place * BINS))] += 1

    @property
    def shift(self) -> float:
        """How much more often than expected the likeliest token came, as a share of all tokens."""
        return self.hits / self.count if self.count else 0.0

    def p_values(self) -> dict[str, float]:
        """Of the share of likeliest tokens, and of where tokens lie in their distributions, most probable first."""
        if self.impossible:
            return {"support": 0.0}
        return {"likeliest": self._p_hits(), "rank": chi_square_p(self.bins)}

    def _p_hits(self) -> float:
        if self.variance == 0:
            return 1.0 if abs(self.hits) < 1e-6 * max(1, self.count) else 0.0
        return sum_p(self.hits, self.variance)


NORMAL_FROM = 100.0
"""Variance from which on a sum is taken to be normal."""


def sum_p(total: float, variance: float) -> float:
    """At most the chance of a sum so far from 0, of terms within ±1 whose mean is 0 whatever came before (``variance`` > 0).

    A sum of few rare events is no normal number: there it is Freedman's bound (1975).
    """
    if variance >= NORMAL_FROM:
        return two_sided(total / math.sqrt(variance))
    far = abs(total) / variance
    return min(1.0, 2 * math.exp(-variance * ((1 + far) * math.log1p(far) - far)))


def poisson_p(count: int, expected: float) -> float:
    """The chance of at least ``count`` rare events."""
    if count == 0:
        return 1.0
    return float(torch.special.gammainc(torch.tensor(float(count)).double(), torch.tensor(expected).double()))


def two_sided(deviations: float) -> float:
    """The chance of a normal number at least so many standard deviations from its mean."""
    return 2 * NormalDist().cdf(-abs(deviations))


def chi_square_p(counts: list[int]) -> float:
    """Pearson's test of equal chances."""
    total = sum(counts)
    if total < 10 * len(counts):
        return 1.0
    expected = total / len(counts)
    statistic = sum((count - expected) ** 2 for count in counts) / expected
    half = torch.tensor([(len(counts) - 1) / 2, statistic / 2], dtype=torch.double)
    return float(torch.special.gammaincc(half[0], half[1]))


LEAST_ANSWERS = 20
"""Fewer say nothing: the normal distribution would be too narrow."""


def two_sample_p(mine: list[float], theirs: list[float]) -> float:
    """Whether two sets of independent numbers have one mean (Welch's test, by the normal distribution)."""
    if min(len(mine), len(theirs)) < LEAST_ANSWERS:
        return 1.0
    difference, error = mean_difference(mine, theirs)
    return two_sided(difference / error) if error else float(abs(difference) < 1e-12)


def mean_difference(mine: list[float], theirs: list[float]) -> tuple[float, float]:
    """Of the means of two sets of at least two numbers each, and its standard error."""
    means, errors = [], 0.0
    for values in (mine, theirs):
        mean = sum(values) / len(values)
        means.append(mean)
        errors += sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)
    return means[0] - means[1], math.sqrt(errors)
