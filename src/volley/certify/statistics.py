"""Tests of whether tokens were drawn from given distributions.

Tokens of one text depend on each other. The tests allow for that: given the tokens before, each token's deviation from its
distribution has mean zero.
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
    """Sums over tokens. ``add`` takes one token and the distribution that it should come from."""

    random: Random
    count: int = 0
    hits: float = 0.0
    """Number of likeliest tokens minus the expected number."""
    variance: float = 0.0
    impossible: int = 0
    """Number of tokens with probability 0."""

    def __post_init__(self) -> None:
        self.bins = [0] * BINS

    def add(self, probs: Tensor, token: int) -> None:
        """Add a token that should come from ``probs [V]`` (fp64)."""
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
        """Return the excess of likeliest tokens over the expected number, as a share of all tokens."""
        return self.hits / self.count if self.count else 0.0

    def p_values(self) -> dict[str, float]:
        """Return the p-values of two tests: the share of likeliest tokens, and the tokens' ranks in their distributions."""
        if self.impossible:
            return {"support": 0.0}
        return {"likeliest": self._p_hits(), "rank": chi_square_p(self.bins)}

    def _p_hits(self) -> float:
        if self.variance == 0:
            return 1.0 if abs(self.hits) < 1e-6 * max(1, self.count) else 0.0
        return sum_p(self.hits, self.variance)


NORMAL_FROM = 100.0
"""Variance above which a sum counts as normally distributed."""


def sum_p(total: float, variance: float) -> float:
    """Return an upper bound of the probability that a martingale sum is this far from 0 (terms within ±1, ``variance`` > 0).

    A sum of few rare events is not normally distributed; for it the bound is Freedman's (1975).
    """
    if variance >= NORMAL_FROM:
        return two_sided(total / math.sqrt(variance))
    far = abs(total) / variance
    return min(1.0, 2 * math.exp(-variance * ((1 + far) * math.log1p(far) - far)))


def poisson_p(count: int, expected: float) -> float:
    """Return the probability of at least ``count`` rare events."""
    if count == 0:
        return 1.0
    return float(torch.special.gammainc(torch.tensor(float(count)).double(), torch.tensor(expected).double()))


def two_sided(deviations: float) -> float:
    """Return the two-sided p-value of a normal variable this many standard deviations from its mean."""
    return 2 * NormalDist().cdf(-abs(deviations))


def chi_square_p(counts: list[int]) -> float:
    """Return the p-value of Pearson's test of equal frequencies."""
    total = sum(counts)
    if total < 10 * len(counts):
        return 1.0
    expected = total / len(counts)
    statistic = sum((count - expected) ** 2 for count in counts) / expected
    half = torch.tensor([(len(counts) - 1) / 2, statistic / 2], dtype=torch.double)
    return float(torch.special.gammaincc(half[0], half[1]))


LEAST_ANSWERS = 20
"""Minimum number of answers: for fewer, the normal approximation is too narrow."""


def two_sample_p(mine: list[float], theirs: list[float]) -> float:
    """Return the p-value that two sets of independent numbers have one mean (Welch's test with the normal distribution)."""
    if min(len(mine), len(theirs)) < LEAST_ANSWERS:
        return 1.0
    difference, error = mean_difference(mine, theirs)
    return two_sided(difference / error) if error else float(abs(difference) < 1e-12)


def mean_difference(mine: list[float], theirs: list[float]) -> tuple[float, float]:
    """Return the difference of two sets' means and its standard error. Each set has at least two numbers."""
    means, errors = [], 0.0
    for values in (mine, theirs):
        mean = sum(values) / len(values)
        means.append(mean)
        errors += sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)
    return means[0] - means[1], math.sqrt(errors)
