"""Codecs: how far off they are, that fast decoding is the slow one, and that every vector is coded by itself."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from volley.errors import ConfigError
from volley.memory.quantise import Codec, Int8Codec, RotatedInt4Codec, random_rotation

CPU = torch.device("cpu")
CODECS = [Int8Codec, RotatedInt4Codec]


def restored(codec: Codec, vectors: torch.Tensor) -> torch.Tensor:
    decoded = codec.decode(*codec.encode(vectors)).float()
    return decoded if codec.rotation is None else decoded @ codec.rotation.T


def mse(codec: Codec, vectors: torch.Tensor) -> float:
    """Mean squared error of a coordinate, relative to the mean square of a coordinate."""
    return float((restored(codec, vectors) - vectors).square().mean() / vectors.square().mean())


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_four_bits_stay_below_the_ideal_quantiser_of_a_gaussian(head_dim: int) -> None:
    torch.manual_seed(0)
    vectors = torch.randn(4096, head_dim)
    assert mse(RotatedInt4Codec(head_dim, torch.float32, CPU), vectors) < 0.0095
    assert mse(RotatedInt4Codec(head_dim, torch.bfloat16, CPU), vectors) < 0.0095


@pytest.mark.parametrize("head_dim", [64, 80])
def test_the_rotation_makes_any_vector_as_good(head_dim: int) -> None:
    """Keys have a few channels that are much larger than the others."""
    torch.manual_seed(0)
    vectors = torch.randn(4096, head_dim)
    vectors[:, 3] *= 30
    vectors[:, 7] += 20
    codec = RotatedInt4Codec(head_dim, torch.float32, CPU)
    assert mse(codec, vectors) < 0.012
    codec.rotation = torch.eye(head_dim)
    assert mse(codec, vectors) > 0.02


def test_eight_bits() -> None:
    torch.manual_seed(0)
    vectors = torch.randn(4096, 64)
    codec = Int8Codec(64, torch.float32, CPU)
    assert mse(codec, vectors) < 5e-5
    error = (restored(codec, vectors) - vectors).abs()
    assert bool((error <= vectors.abs().amax(dim=-1, keepdim=True) / 127 * 0.52).all())


@pytest.mark.parametrize("size", [2, 8, 64, 6, 80])
def test_a_rotation_is_orthogonal_and_always_the_same(size: int) -> None:
    rotation = random_rotation(size)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(size), rtol=0, atol=1e-5)
    random_rotation.cache_clear()
    assert torch.equal(random_rotation(size), rotation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decoding_by_bytes_is_decoding_by_nibbles(dtype: torch.dtype) -> None:
    codec = RotatedInt4Codec(8, dtype, CPU)
    codes = torch.arange(256, dtype=torch.uint8).view(4, 16, 4)
    scales = torch.rand(4, 16, 1).bfloat16()
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    fast, slow = codec.decode(codes, scales), codec.levels[nibbles.long()] * scales.float()
    assert fast.dtype == dtype
    torch.testing.assert_close(fast.float(), slow, rtol=0 if dtype == torch.float32 else 2**-7, atol=0)


@pytest.mark.parametrize("codec_class", CODECS)
@pytest.mark.parametrize("value", [0.0, 1e-4, 1e4])
def test_vectors_of_any_size(codec_class: type[Codec], value: float) -> None:
    torch.manual_seed(0)
    codec = codec_class(8, torch.float32, CPU)
    vectors = torch.randn(50, 2, 8) * value
    error = (restored(codec, vectors) - vectors).norm(dim=-1)
    assert bool((error <= 0.3 * vectors.norm(dim=-1)).all())


@given(codec_class=st.sampled_from(CODECS), rows=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_a_vector_is_coded_by_itself(codec_class: type[Codec], rows: int, seed: int) -> None:
    torch.manual_seed(seed)
    codec = codec_class(8, torch.float32, CPU)
    vectors = torch.randn(rows, 2, 3, 8)
    codes, scales = codec.encode(vectors)
    single = [codec.encode(row) for row in vectors]
    assert torch.equal(codes, torch.stack([row for row, _ in single]))
    torch.testing.assert_close(scales, torch.stack([row for _, row in single]), rtol=2**-7, atol=0)


def test_an_odd_head_size_does_not_fit_four_bits() -> None:
    with pytest.raises(ConfigError, match=r"head size 7 is odd .* use int8 or auto"):
        RotatedInt4Codec(7, torch.float32, CPU)
