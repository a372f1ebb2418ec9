"""Sampling laws against a slow row-by-row reference, and the noise that belongs to positions."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.chi_square import chi_square_p
from volley.decode.sampling import (
    NO_TOKEN,
    PositionNoise,
    Purpose,
    draw,
    exponentials,
    if_finite,
    likeliest,
    likeliest_finite,
    moved_uniforms,
    nucleus,
    race,
    scores_of,
    token_probs,
)
from volley.errors import ConfigError
from volley.params import SamplingParams


def slow_law(logits: Sequence[float], params: SamplingParams) -> tuple[list[float], float]:
    """The law by the book, in double precision, and how near a token came to the edge of a truncation."""
    tokens = range(len(logits))
    if params.temperature == 0:
        best = max(tokens, key=lambda t: (logits[t], -t))
        return [float(t == best) for t in tokens], 1.0
    scaled = [x / params.temperature for x in logits]
    if params.top_k:
        smallest = sorted(scaled, reverse=True)[: params.top_k][-1]
        scaled = [x if x >= smallest else -math.inf for x in scaled]
    weights = [math.exp(x - max(scaled)) for x in scaled]
    probs = [weight / sum(weights) for weight in weights]
    margin = 1.0
    if params.top_p < 1:
        before = 0.0
        kept: list[float] = []
        cut: list[float] = []
        for t in sorted(tokens, key=lambda t: (-probs[t], t)):
            if before:
                margin = min(margin, abs(before - params.top_p))
            (kept if before < params.top_p else cut).append(probs[t])
            probs[t], before = (probs[t] if before < params.top_p else 0.0), before + probs[t]
        # Two that differ by little are equal in single precision, which then keeps the earlier.
        margin = min([margin, *(more - less for more in kept for less in cut if more > less)])
    if params.min_p > 0:
        floor = params.min_p * max(probs)
        margin = min([margin, *(abs(p - floor) for p in probs if 0 < p < max(probs))])
        probs = [p if p >= floor else 0.0 for p in probs]
    return [p / sum(probs) for p in probs], margin


ROWS = st.lists(
    st.lists(st.integers(-6, 6).map(float), min_size=6, max_size=6)  # integers: ties are common
    | st.lists(st.floats(-8, 8, width=16), min_size=6, max_size=6),
    min_size=1,
    max_size=4,
)


@given(
    rows=ROWS,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, 8),
    top_p=st.sampled_from([0.05, 0.37, 0.61, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.23, 1.0]),
)
def test_laws_are_the_slow_reference(
    rows: list[list[float]], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    slow = [slow_law(row, params) for row in rows]
    assume(min(margin for _, margin in slow) > 1e-5)
    found = token_probs(torch.tensor(rows), params)
    torch.testing.assert_close(found, torch.tensor([law for law, _ in slow]), rtol=1e-4, atol=1e-6)


def law(logits: list[float], **params: float) -> list[float]:
    values = {"temperature": 1.0, **params}
    return token_probs(torch.tensor([logits]), SamplingParams(**values))[0].tolist()  # type: ignore[arg-type]


def test_edges_of_truncation() -> None:
    flat = [0.0] * 4
    assert law(flat, top_p=0.5) == [0.5, 0.5, 0, 0]  # ties fall to the earlier token, and 0.5 is reached by two
    assert law(flat, top_p=0.51) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert law(flat, top_k=1) == [0.25] * 4  # nothing tells tied tokens apart
    assert law([3.0, 1.0, 3.0, 2.0], top_k=2) == [0.5, 0, 0.5, 0]
    assert law(flat, min_p=1.0) == [0.25] * 4
    assert law([1.0, 0.0, 1.0, 0.0], min_p=1.0) == [0.5, 0, 0.5, 0]
    assert law([5.0, 0.0, 0.0, 0.0], top_p=0.001) == [1, 0, 0, 0]
    assert law(flat, top_k=100) == law(flat)


@given(
    scale=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    top_p=st.sampled_from([1e-30, 0.1, 0.5, 0.9, 0.95, 0.999, 0.9999]),
    top_k=st.sampled_from([0, 1, 7, 200]),
    seed=st.integers(0, 2**32 - 1),
)
def test_few_tokens_are_sorted_and_the_same_are_kept(scale: float, top_p: float, top_k: int, seed: int) -> None:
    """Against a sort of all tokens, to the bit; whole logits make many equal ones."""
    logits = (scale * torch.randn(5, 1000, generator=torch.Generator().manual_seed(seed))).round()
    params = SamplingParams(temperature=1.0, top_k=top_k)
    probs = token_probs(logits, params)
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    cut = (before >= top_p) & (before > 0)
    expected = torch.zeros_like(probs).scatter_(-1, order, ordered.masked_fill(cut, 0))
    assert torch.equal(nucleus(probs, top_p), expected)
    found = token_probs(logits, replace(params, top_p=top_p))
    assert torch.equal(found, expected / expected.sum(dim=-1, keepdim=True, dtype=torch.float64).float())
    assert torch.equal(found[2:3], token_probs(logits[2:3], replace(params, top_p=top_p)))


def dense_law(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Truncate by reading and sorting all tokens."""
    logits = logits.float() / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(params.top_k, dim=-1).values[:, -1:], -torch.inf)
    probs = logits.softmax(dim=-1)
    if params.top_p < 1:
        probs = nucleus(probs, params.top_p)
    probs = probs.masked_fill(probs < params.min_p * probs.amax(dim=-1, keepdim=True), 0.0)
    return probs / probs.sum(dim=-1, keepdim=True)


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(2, 3000),
    top_k=st.integers(0, 40),
    truncation=st.sampled_from([(1.0, 0.0), (0.83, 0.0), (1.0, 0.07), (0.61, 0.03), (0.9995, 0.0)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_truncation_reads_few_tokens(
    seed: int, size: int, top_k: int, truncation: tuple[float, float], dtype: torch.dtype
) -> None:
    """bf16 logits have many ties; of equal ones all stay under top-k."""
    logits = (3 * torch.randn(2, size, generator=torch.Generator().manual_seed(seed))).to(dtype)
    params = SamplingParams(temperature=0.7, top_k=top_k, top_p=truncation[0], min_p=truncation[1])
    found = token_probs(logits, params)
    torch.testing.assert_close(found, dense_law(logits, params), atol=2e-6, rtol=1e-5)
    assert torch.equal(found[1:], token_probs(logits[1:], params))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [5, 2999])
def test_truncation_of_a_row_that_is_not_finite(wrong: float, place: int) -> None:
    logits = torch.randn(2, 3000, generator=torch.Generator().manual_seed(0))
    logits[0, place] = wrong
    for truncation in ({"top_k": 20}, {"top_p": 0.5}, {"min_p": 0.5}):
        probs = token_probs(logits, SamplingParams(temperature=1.0, **truncation))
        assert probs[0].isnan().all()
        assert probs[1].isfinite().all()


def test_temperature_zero_is_the_point_mass_on_the_largest_logit() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [9.0, 1.0, 0.0, 0.0]])
    assert token_probs(logits, SamplingParams(top_k=1, top_p=0.1)).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert token_probs(logits, SamplingParams(temperature=1.0), 0.0).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


def test_temperature_can_be_overridden_while_truncation_stays() -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    one, two = (SamplingParams(temperature=t, top_k=5) for t in (1.0, 2.0))
    assert torch.equal(token_probs(logits, one, 2.0), token_probs(logits, two))
    assert int((token_probs(logits, one, 2.0) > 0).sum()) == 15


def test_bf16_logits_make_fp32_laws() -> None:
    probs = token_probs(torch.randn(2, 9).bfloat16(), SamplingParams(temperature=1.0))
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs.sum(dim=-1), torch.ones(2))


def test_chosen_logprobs() -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    expected = [math.log(float(logits[i].exp()[t] / logits[i].exp().sum())) for i, t in enumerate((6, 0, 3))]
    assert [score.logprob for score in scores_of(logits, [6, 0, 3], 0)] == pytest.approx(expected, rel=1e-5)


# -- noise -------------------------------------------------------------------------------------------------------------


def test_noise_belongs_to_seed_purpose_and_position() -> None:
    noise = PositionNoise(7)
    both = noise.exponentials([3, 4], 10)
    assert torch.equal(both[1:], PositionNoise(7).exponentials([4], 10))
    assert torch.equal(both[:1], noise.exponentials([3], 10))
    uniforms = noise.uniforms(Purpose.ACCEPT, 5, 3)
    assert uniforms[:2] == PositionNoise(7).uniforms(Purpose.ACCEPT, 5, 2)
    others = [(7, Purpose.ACCEPT, 6), (8, Purpose.ACCEPT, 5), (75, Purpose.ACCEPT, 5)]
    for seed, purpose, first in [*others, (7, Purpose.DRAFT, 5), (7, Purpose.TARGET, 5)]:
        assert not set(uniforms) & set(PositionNoise(seed).uniforms(purpose, first, 3))
    assert not torch.isclose(both[0], both[1]).any()
    assert not torch.isclose(both[0], PositionNoise(8).exponentials([3], 10)).any()


def test_numbers_of_a_cycle_whose_place_only_the_device_knows() -> None:
    cycles, moved = [(PositionNoise(7), 5), (PositionNoise(8), 20)], torch.tensor([3, 0])
    there = [(PositionNoise(7), 8), (PositionNoise(8), 20)]
    expected = [number for own, first in there for number in own.uniforms(Purpose.DRAFT, first, 4)]
    assert moved_uniforms(cycles, 4, Purpose.DRAFT, moved).tolist() == expected
    cpu = torch.device("cpu")
    assert torch.equal(exponentials(cycles, 10, cpu, moved), exponentials(there, 10, cpu))


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_noise_has_its_law_along_every_axis(seed: int) -> None:
    positions = range(2000)
    x = PositionNoise(seed).exponentials(positions, 4).double()
    bins = torch.bucketize(-torch.expm1(-x), torch.linspace(0, 1, 11, dtype=torch.double)[1:-1])
    for column in bins.T:
        assert chi_square_p(torch.bincount(column, minlength=10), torch.full((10,), 0.1)) > 1e-4
    noise = PositionNoise(seed)
    drawn = [noise.uniforms(Purpose.ACCEPT, p, 2) + noise.uniforms(Purpose.DRAFT, p, 1) for p in positions]
    u, second, draft = torch.tensor(drawn, dtype=torch.double).T
    assert u.min() >= 0
    assert u.max() < 1
    assert chi_square_p(torch.bincount((u * 10).long(), minlength=10), torch.full((10,), 0.1)) > 1e-4
    neighbour = PositionNoise(seed ^ 1).exponentials(positions, 4).double()
    shifted = [x[:, 0].roll(1), draft.roll(1), u.roll(1)]
    columns = torch.stack([x[:, 0], x[:, 1], draft, neighbour[:, 0], u, second, *shifted])
    correlation = torch.corrcoef(columns) - torch.eye(len(columns), dtype=torch.double)
    assert correlation.abs().max() < 4.5 / math.sqrt(len(positions))


def test_a_race_draws_from_the_law() -> None:
    probs = torch.tensor([0.5, 0.0, 0.2, 0.05, 0.25])
    noise = PositionNoise(3).exponentials(range(60_000), 5)
    counts = torch.bincount(race(probs.expand(60_000, -1), noise), minlength=5)
    assert chi_square_p(counts, probs) > 1e-3
    assert chi_square_p(counts, torch.tensor([0.48, 0.0, 0.21, 0.05, 0.26])) < 1e-6


def test_races_with_shared_noise_agree_as_the_gumbel_coupling_does() -> None:
    """P(same) = Σ_v 1 / Σ_u max(p_u / p_v, q_u / q_v): at least (1 − d) / (1 + d) for total variation d."""
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    noise = PositionNoise(1).exponentials(range(20_000), 3)
    same = (race(p.expand(20_000, -1), noise) == race(q.expand(20_000, -1), noise)).double().mean()
    expected = sum(1 / float(torch.maximum(p / p[v], q / q[v]).sum()) for v in range(3))
    assert float(same) == pytest.approx(expected, abs=0.015)


# -- parameters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("stop", ("a", "")),
        ("seed", -1),
        ("seed", 2**63),
        ("draft_temperature", -1.0),
        ("draft_temperature", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", 1e-40),
        ("logit_bias", {1: 101}),
        ("top_logprobs", -1),
    ],
)
def test_impossible_parameters_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"SamplingParams\.{name} is .*; it must be"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_one_stop_string_may_stand_alone() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[1]).stop_token_ids == (1,)  # type: ignore[arg-type]


def test_draws_fall_on_tokens_as_often_as_the_law_says_and_never_on_impossible_ones() -> None:
    law = torch.tensor([0.0, 0.3, 0.0, 0.2, 0.5, 0.0])
    uniforms = PositionNoise(3).uniforms(Purpose.DRAFT, 0, 20_000)
    counts = torch.bincount(draw(law.expand(20_000, -1), uniforms), minlength=6)
    assert counts[law == 0].sum() == 0
    assert chi_square_p(counts[law > 0], law[law > 0]) > 1e-3
    assert draw(law.expand(2, -1), [0.0, 1 - 2**-53]).tolist() == [1, 4]


@given(size=st.integers(1, 640) | st.sampled_from([128, 384, 640]), rows=st.integers(1, 12), seed=st.integers(0, 999))
def test_drawing_from_parts_of_the_vocabulary_is_drawing_from_all_of_it(size: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(rows, size, generator=generator).mul(4).exp()
    weights[torch.rand(weights.shape, generator=generator) < 0.5] = 0
    weights[:, int(torch.randint(size, (1,), generator=generator))] = 1e-3
    uniforms = torch.rand(rows, generator=generator, dtype=torch.double).tolist()
    uniforms[0] = 1 - 2**-53 if seed % 2 else 0.0
    sums = weights.double().cumsum(dim=-1)
    for token, row, total, uniform in zip(draw(weights, uniforms).tolist(), weights, sums, uniforms, strict=True):
        assert row[token] > 0
        place, error = uniform * total[-1], 1e-6 * total[-1]
        assert total[token] - row[token].double() - error <= place <= total[token] + error


@pytest.mark.parametrize("size", [200, 256])
def test_a_row_without_numbers_draws_some_token(size: int) -> None:
    """An index beyond the row would end a whole process on a GPU."""
    found = draw(torch.full((2, size), math.nan), [0.3, 0.7])
    assert bool(((found >= 0) & (found < size)).all())


@pytest.mark.parametrize("narrow", [{"top_p": 0.95}, {"min_p": 0.001}])
def test_a_truncated_distribution_does_not_depend_on_the_number_of_rows(narrow: dict[str, float]) -> None:
    params = SamplingParams(temperature=1.0, **narrow)  # type: ignore[arg-type]
    logits = 3 * torch.randn(5, 151_936, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together = token_probs(logits, params)
        for row, expected in zip(logits, together, strict=True):
            assert torch.equal(token_probs(row[None], params)[0], expected)
    finally:
        torch.set_num_threads(before)


SPECIAL = st.sampled_from([0.0, -0.0, 1.0, 1.0078125, -1.0, 3e38, math.inf, -math.inf, math.nan, -math.nan])


@given(st.lists(st.lists(SPECIAL | st.floats(-9, 9), min_size=5, max_size=5), max_size=4), st.integers(0, 2100))
def test_the_likeliest_token_is_the_first_of_the_largest_and_none_if_that_is_not_finite(
    rows: list[list[float]], before: int
) -> None:
    """In bf16 a kernel finds it; the reference is PyTorch's argmax in fp32, where a NaN is above all."""
    logits = torch.cat([torch.full((len(rows), before), -9.5), torch.tensor(rows).reshape(-1, 5)], dim=1).bfloat16()
    wide = logits.float()
    best = wide.argmax(dim=-1) if len(rows) else torch.empty(0, dtype=torch.int64)
    for given_logits in (logits, wide):
        assert likeliest(given_logits).tolist() == best.tolist()
        assert likeliest_finite(given_logits).tolist() == if_finite(best, wide).tolist()
        assert likeliest_finite(given_logits, wide).tolist() == if_finite(best, wide, wide).tolist()
    assert likeliest_finite(torch.full((1, 3), math.nan).bfloat16()).tolist() == [NO_TOKEN]
