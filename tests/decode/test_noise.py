"""Noise against NumPy's Philox and known answers, on every path there is; and that rare tokens win as rarely as they should."""

import numpy as np
import pytest
import torch

from tests.chi_square import chi_square_p
from tests.gpu.pretended import CPU, CUDA, OnDevice, pretended_cuda
from volley import native
from volley.decode import noise
from volley.decode.sampling import PositionNoise, race

PLACES = [(0, 0), (3, 7), (2**63 - 1, 7), (12_345_678_901_234, 2**40)]
SEEDS, POSITIONS = zip(*PLACES, strict=True)


def words(seed: int, position: int, size: int, purpose: int = 0) -> np.ndarray:
    return np.random.Philox(key=[seed, purpose], counter=[0, 0, position, 0]).random_raw(size)


def slowly(seed: int, position: int, size: int) -> torch.Tensor:
    """The uniforms in single precision, their logarithms in double."""
    uniforms = (words(seed, position, size) >> np.uint64(1)).astype(np.float32) * np.float32(2.0**-63)
    return torch.from_numpy(-np.log1p(-uniforms.astype(np.float64)))


def test_philox_gives_its_known_answers() -> None:
    """NumPy's gives those that the authors published for key 0 and counter 0, and ours NumPy's for counter 1."""
    published = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert np.random.Philox(key=[0, 0], counter=[2**64 - 1] * 4).random_raw(4).tolist() == published
    (found,) = noise.philox(torch.tensor([[0], [0]]), 0, 4).numpy().view(np.uint64)
    assert found.tolist() == [0x02F4BA6408E4D89B, 0x3DD62B0B9CA8C5B2, 0x1C8667A55D902E79, 0x907D7A052FD5B4DC]


@pytest.mark.parametrize("purpose", [0, 4])
@pytest.mark.parametrize("size", [1, 4, 9, 515])
def test_pytorchs_integers_are_numpys_philox(size: int, purpose: int) -> None:
    found = noise.philox(torch.tensor([SEEDS, POSITIONS]), purpose, size).numpy().view(np.uint64)
    expected = np.stack([words(*place, size, purpose) for place in PLACES])
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("size", [1, 5, 256, 1000])
@pytest.mark.parametrize("path", ["c", "numpy", "pytorch", "kernel"])
def test_every_path_gives_the_same_numbers_to_rounding(path: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    positions = [position + len(path) for position in POSITIONS]  # those of another path may be kept
    expected = torch.stack([slowly(*place, size) for place in zip(SEEDS, positions, strict=True)])
    if path == "c" and not native.is_built:
        pytest.skip("the library in C was not built")
    if path in ("c", "numpy"):
        monkeypatch.setattr(native, "is_built", path == "c")
        found = noise.exponentials(SEEDS, 0, positions, size, CPU)
    else:
        pytest.importorskip("triton")
        monkeypatch.setattr(noise, "usable", lambda _: path == "kernel")
        with pretended_cuda(runs_kernels=True) as counts:
            moved = torch.full((len(SEEDS),), 2, device=CUDA)
            there = noise.exponentials(SEEDS, 0, [position - 2 for position in positions], size, CUDA, moved)
            assert isinstance(there, OnDevice)
            assert counts.waits.total() == 0
            assert ("_exponentials_kernel" in counts.operations) is (path == "kernel")
            found = there.inner
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


def test_extreme_words_make_finite_noise() -> None:
    """And none is 0: a race divides by it."""
    extreme = torch.tensor([0, 1, -1, 2**62, 2**40, -(2**63)])
    found = noise.from_words(extreme)
    assert found.min() >= 2.0**-63
    assert found.max() < 20
    assert float(found[4]) == pytest.approx(2.0**-24, rel=1e-6)


@pytest.mark.slow
def test_rare_tokens_win_as_rarely_as_they_should() -> None:
    """Among 10⁸ numbers those below 10⁻⁶ and 10⁻⁷ are as many as expected, and their sizes have the right distribution."""
    size, rows = 1_000_000, 100
    small = torch.cat([own[own < 1e-6] for row in range(rows) for own in noise.exponentials([1], 0, [row], size, CPU)])
    assert abs(len(small) - 100) < 50
    below = (small < 5e-7).double().mean()
    assert float(below) == pytest.approx(0.5, abs=0.2)
    assert small.unique().numel() == len(small), "and none is one of few steps"


def biased(places: int, size: int) -> torch.Tensor:
    """Planted: noise of 10 bits, whose smallest numbers are 0 and then cut off, as 23 bits would in a large vocabulary."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(0, 1024, (places, size), generator=generator)
    return (-torch.log1p(-steps / 1024)).clamp_min(1e-30)


def test_noise_of_few_bits_is_seen_where_there_are_many_rare_tokens() -> None:
    rare, races = 50, 20_000
    probs = torch.tensor([1 - rare * 1e-4, *[1e-4] * rare])
    law = torch.tensor([probs[0], probs[1:26].sum(), probs[26:].sum()])

    def probability(numbers: torch.Tensor) -> float:
        winners = race(probs.expand(races, -1), numbers)
        return chi_square_p(torch.bincount((winners > 0).long() + (winners > 25).long(), minlength=3), law)

    assert probability(noise.exponentials([5] * races, 0, range(races), 1 + rare, CPU)) > 1e-3
    assert probability(biased(races, 1 + rare)) < 1e-9


def numpys(seed: int, position: int, size: int) -> torch.Tensor:
    """Planted: NumPy's own exponentials in single precision, cut off where they are 0."""
    generator = np.random.Generator(np.random.Philox(key=[seed, 0], counter=[0, 0, position, 0]))
    return torch.from_numpy(generator.standard_exponential(size, dtype=np.float32).clip(1e-30))


@pytest.mark.slow
def test_no_token_without_a_chance_wins_in_a_large_vocabulary() -> None:
    """Runs 400 races among 151,936 tokens; NumPy's noise lets such tokens win one race of 57."""
    probs = torch.full((151_936,), 1e-10)
    probs[:2] = 0.5
    for is_right, draw in (
        (True, lambda position: noise.exponentials([3], 0, [position], len(probs), CPU)[0]),
        (False, lambda position: numpys(3, position, len(probs))),
    ):
        rare = sum(int(race(probs, draw(position))) > 1 for position in range(400))
        assert (rare == 0) is is_right


def test_a_requests_noise_is_that_of_its_seed_and_position() -> None:
    found = PositionNoise(9).exponentials([4, 2], 6)
    assert torch.equal(found, noise.exponentials([9, 9], 0, [4, 2], 6, CPU))
