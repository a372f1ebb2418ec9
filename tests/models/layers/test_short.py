"""DiffusionGemma's layers in few operations against transformers' own."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.diffusion_gemma import random_model
from volley import native
from volley.memory.attention import AttentionOptions
from volley.models.layers.accelerate import accelerate
from volley.models.layers.short import ShortConditioning, ShortLayer, shorten

pytestmark = pytest.mark.skipif(not native.is_built, reason="the kernels are not built")


def parts() -> tuple[Any, Any]:
    """Encoder and decoder of a model that is only run, whose attention is the caller's."""
    model = random_model()
    model.set_attn_implementation("volley")
    accelerate(model, release=True)
    return model.model.encoder.language_model, model.model.decoder


def attend(_: int, queries: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Every token sees every other."""
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * options.scale
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values)


@pytest.mark.parametrize("rows", [1, 70])
@torch.no_grad()
def test_layers_compute_what_they_did(rows: int) -> None:
    """A layer with values of its own and one whose values are its keys, with a scalar for all rows and one for each."""
    encoder, decoder = parts()
    plain = copy.deepcopy(encoder.layers)
    assert shorten(encoder, decoder) == len(encoder.layers) == 2
    torch.manual_seed(1)
    states, positions = torch.randn(1, rows, 32), torch.randint(0, 300, (1, rows))
    for layer, own in zip(encoder.layers, plain, strict=True):
        assert isinstance(vars(layer)["forward"], ShortLayer)
        turns = encoder.rotary_emb(states, positions, own.self_attn.layer_type)
        for scalar in (own.layer_scalar, torch.rand(1, rows, 1)):
            layer._buffers["layer_scalar"] = own._buffers["layer_scalar"] = scalar
            before, given = states.clone(), {"position_embeddings": turns, "volley_call": attend}
            torch.testing.assert_close(layer(states, **given), own(states, **given), atol=1e-5, rtol=1e-5)
            assert torch.equal(states, before)


@torch.no_grad()
def test_self_conditioning_computes_what_it_did() -> None:
    encoder, decoder = parts()
    plain = copy.deepcopy(decoder.self_conditioning)
    shorten(encoder, decoder)
    assert isinstance(vars(decoder.self_conditioning)["forward"], ShortConditioning)
    states, told = torch.randn(1, 9, 32), torch.randn(1, 9, 32)
    torch.testing.assert_close(decoder.self_conditioning(states, told), plain(states, told))


def test_the_layers_own_weights_are_those_that_are_used() -> None:
    encoder, decoder = parts()
    shorten(encoder, decoder)
    layer = encoder.layers[0]
    states = torch.randn(4, 32)
    with torch.no_grad():
        layer.mlp.up_proj.weight.zero_()
        assert not vars(layer)["forward"].gate(states).any()


def in_bf16(encoder: Any) -> None:
    encoder.layers[1].bfloat16()


def with_another_gate(encoder: Any) -> None:
    encoder.layers[1].mlp.act_fn = nn.SiLU()


def with_a_bias(encoder: Any) -> None:
    layer = encoder.layers[1].self_attn
    layer.o_proj = nn.Linear(layer.o_proj.in_features, layer.o_proj.out_features)


def with_another_norm(encoder: Any) -> None:
    encoder.layers[1].self_attn.v_norm = nn.Identity()


def of_another_kind(encoder: Any) -> None:
    layer = encoder.layers[1]
    layer.__class__ = type("OtherLayer", (type(layer),), {})


@pytest.mark.parametrize("change", [in_bf16, with_another_gate, with_a_bias, with_another_norm, of_another_kind])
def test_a_layer_that_computes_something_else_is_left_alone(change: Any) -> None:
    encoder, decoder = parts()
    change(encoder)
    assert shorten(encoder, decoder) == 1
    assert "forward" not in vars(encoder.layers[1])
    assert "forward" not in vars(decoder.self_conditioning)
