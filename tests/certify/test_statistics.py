"""A bias of one percent is found with the stated number of tokens, and without one no alarm is raised."""

import math
import random

import numpy as np
import pytest
import torch

from volley.certify.options import CertifyConfig
from volley.certify.reference import distribution, penalised
from volley.certify.statistics import Deviations, mean_difference, poisson_p, sum_p, two_sample_p, two_sided
from volley.decode.sampling import token_probs
from volley.params import SamplingParams

TESTS = 16


def smallest_p(shift: float, count: int, seed: int) -> float:
    """Return the smallest p-value of ``count`` tokens whose likeliest has ``shift`` more probability than stated."""
    rng, deviations = random.Random(seed), Deviations(random.Random(seed + 1))
    probs = torch.tensor([0.5, 0.3, 0.2], dtype=torch.double)
    tokens = rng.choices(range(3), [0.5 + shift, 0.3 - shift / 2, 0.2 - shift / 2], k=count)
    counts = [tokens.count(token) for token in range(3)]
    for token, times in enumerate(counts):
        one = Deviations(random.Random(seed * 3 + token))
        one.add(probs, token)
        deviations.count += times
        deviations.hits += times * one.hits
        deviations.variance += times * one.variance
    deviations.bins = [deviations.count // 10] * 10
    return deviations.p_values()["likeliest"]


@pytest.mark.slow
def test_one_percent_is_found_with_the_stated_sample() -> None:
    config = CertifyConfig(bias=0.01)
    count, level = config.sample_size(TESTS), config.alpha / TESTS
    found = sum(smallest_p(0.01, count, seed) < level for seed in range(40))
    assert found >= 30  # nine in ten are expected: fewer than 30 of 40 would come once in 600 times
    assert not any(smallest_p(0.0, count, seed) < level for seed in range(40))
    assert sum(smallest_p(0.01, count // 20, seed) < level for seed in range(40)) < 5


@pytest.mark.slow
def test_tokens_add_up_one_by_one() -> None:
    rng, good, bad = random.Random(0), Deviations(random.Random(1)), Deviations(random.Random(2))
    for _ in range(3000):
        probs = torch.rand(8, dtype=torch.double, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
        probs /= probs.sum()
        good.add(probs, rng.choices(range(8), probs.tolist())[0])
        bad.add(probs, rng.choices(range(8), (probs**1.3).tolist())[0])
    assert min(good.p_values().values()) > 1e-3
    assert min(bad.p_values().values()) < 1e-4
    bad.impossible = 1
    assert bad.p_values() == {"support": 0.0}


def test_two_samples() -> None:
    rng = random.Random(0)
    same = [[rng.gauss(0, 1) for _ in range(400)] for _ in range(2)]
    assert two_sample_p(*same) > 1e-3
    assert two_sample_p(same[0], [value + 0.5 for value in same[1]]) < 1e-6
    assert two_sample_p([1.0] * 5, [2.0] * 5) == 1.0  # too few to say


def test_the_shift_that_two_samples_can_find_is_found() -> None:
    """Nine times in ten, and none where there is none."""
    config, rng, found, false = CertifyConfig(), random.Random(0), 0, 0
    for _ in range(100):
        mine, theirs = ([rng.gauss(0.6, 0.2) for _ in range(150)] for _ in range(2))
        shift = config.errors_found(4) * mean_difference(mine, theirs)[1]
        found += two_sample_p([value + shift for value in mine], theirs) < config.alpha / 4
        false += two_sample_p(mine, theirs) < config.alpha / 4
    assert 80 <= found < 100
    assert not false


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.8}])
def test_the_slow_reference_is_the_distribution_that_is_decoded_with(options: dict[str, float]) -> None:
    torch.manual_seed(0)
    params = SamplingParams(temperature=0.7, **options)  # type: ignore[arg-type]
    logits = 2 * torch.randn(20, 30)
    fast = token_probs(logits.clone(), params)
    slow = torch.stack([distribution(row, params) for row in logits])
    assert torch.allclose(fast.double(), slow, atol=1e-6)


def test_the_slow_penalties() -> None:
    params = SamplingParams(
        presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0, logit_bias=((3, 1.0),)
    )
    found = penalised(torch.tensor([2.0, -2.0, 1.0, 0.0]), params, prompt=[1], output=[0, 0])
    assert found.tolist() == [1.0 - 0.5 - 0.5, -4.0, 1.0, 1.0]


@pytest.mark.parametrize("chance", [0.0003, 0.003, 0.03])
def test_a_sum_of_rare_misses_raises_no_more_alarms_than_it_says(chance: float) -> None:
    """As where answers are all but certain: their number is Poisson's, whose tail is far above that of a normal number."""
    count, level = 400, 1e-3
    rng, alarms, normal = np.random.default_rng(0), 0, 0
    misses = rng.binomial(count, chance, 200_000)
    variance = count * chance * (1 - chance)
    for number, times in zip(*np.unique(misses, return_counts=True), strict=True):
        total = count * chance - float(number)
        alarms += int(times) * (sum_p(total, variance) < level)
        normal += int(times) * (two_sided(total / variance**0.5) < level)
    assert alarms <= 200_000 * level
    assert normal > 200_000 * level, "the normal distribution raises too many"
    assert sum_p(20.0, 1.0) < 1e-12, "and what is far off is seen"


def test_rare_events() -> None:
    assert poisson_p(0, 0.3) == 1.0
    assert poisson_p(1, 0.3) == pytest.approx(1 - math.exp(-0.3))
    assert poisson_p(2, 0.3) == pytest.approx(1 - 1.3 * math.exp(-0.3))
