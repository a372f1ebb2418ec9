"""Embeddings that are looked up in a product: which are, and that their rows are what they were."""

from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from tests.models.families import COMMON
from tests.tiles import needs_kernels
from tests.tiny import eager_model
from volley.models.layers.accelerate import accelerate, weight_bytes
from volley.models.layers.embeddings import scale_of
from volley.models.targets.target import Target
from volley.native import Product, Weights

TOKENS = torch.tensor([3, 59, 3, 0])
FAMILIES: dict[str, Any] = {
    "gemma3": lambda **own: tf.Gemma3TextConfig(**COMMON, head_dim=16, sliding_window=8, **own),
    "gemma2": lambda **own: tf.Gemma2Config(**COMMON, head_dim=16, sliding_window=8, **own),
    "llama": lambda **own: tf.LlamaConfig(**COMMON, **own),
    "phi3": lambda **own: tf.Phi3Config(**COMMON, **own),
    "olmo2": lambda **own: tf.Olmo2Config(**COMMON, **own),
}


def made(family: str, *, tied: bool) -> Any:
    return eager_model(FAMILIES[family](tie_word_embeddings=tied)).requires_grad_(False).bfloat16()


@needs_kernels
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_the_weight_in_codes(family: str, weights: Weights, tied: bool) -> None:
    model = made(family, tied=tied)
    embedding = model.get_input_embeddings()
    weight, expected = embedding.weight.detach().clone(), embedding(TOKENS)
    kind = weights if tied or weights == "bf16" else "int8"
    embedding.weight.copy_(Product(weight, None, kind).weight())
    rounded = embedding(TOKENS)
    embedding.weight.copy_(weight)
    accelerate(model, weights, release=True)
    assert embedding.weight.is_meta == (tied or weights != "bf16")
    found = Target(model).embed(TOKENS)
    assert torch.equal(found, rounded)
    if weights == "bf16":
        assert torch.equal(found, expected)


@needs_kernels
def test_a_shared_weight_is_held_once() -> None:
    """Gemma's embedding is the head's weight, whose rows it scales."""
    small, large = made("gemma3", tied=True), made("gemma3", tied=True)
    for model, weights in ((small, "int8"), (large, "bf16")):
        accelerate(model, weights, release=True)  # type: ignore[arg-type]
    assert weight_bytes(small) < 0.6 * weight_bytes(large)


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3.5


class Normed(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.normalize(super().forward(input), dim=-1)


def test_scales_are_found_by_trying() -> None:
    found = [scale_of(kind(20, 8).bfloat16()) for kind in (nn.Embedding, Scaled, Normed)]
    assert [None if scale is None else float(scale) for scale in found] == [1.0, 3.5, None]
    assert scale_of(nn.Linear(8, 20)) is None
    assert scale_of(nn.Embedding(20, 8, padding_idx=19)) == 1, "a padding row may have any number"
    replaced = nn.Embedding(20, 8)
    replaced.forward = lambda input: input  # type: ignore[method-assign]
    assert scale_of(replaced) is None
