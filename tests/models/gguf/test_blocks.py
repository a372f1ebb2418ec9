"""Blocks taken apart: put together again they are what the gguf package decodes, to the bit."""

import gguf
import numpy as np
import pytest
import torch

from volley.models.gguf.blocks import UNPACK, unpack

HALVES = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}  # others have a scale and an offset in front


@pytest.mark.parametrize("kind", UNPACK)
def test_unpacked_blocks_decode_to_the_same_bits(kind: str) -> None:
    generator, size = np.random.default_rng(1), UNPACK[kind][0]
    rows = generator.integers(0, 256, (5, 3 * size), dtype=np.uint8)
    blocks = rows.reshape(-1, size)
    for place in HALVES.get(kind, (0, 2)):
        blocks[:, place : place + 2] = generator.normal(0, 0.1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    expected = torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]))
    found = unpack(kind, rows)
    assert found is not None
    assert torch.equal(found.dense(), expected)
    assert found.group_size == (16 if kind == "Q6_K" else 32)
    found.codes.add_(1)  # codes that are off are seen
    assert not torch.equal(found.dense(), expected)


def test_types_without_even_steps_are_left_alone() -> None:
    assert unpack("IQ4_XS", np.zeros((1, 136), np.uint8)) is None
    assert unpack("F32", np.zeros((1, 4), np.float32)) is None
    assert unpack("Q8_0", np.zeros((2, 3, 34), np.uint8)) is None  # experts in one tensor
