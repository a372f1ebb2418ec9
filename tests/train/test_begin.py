"""A new drafter begins as its target's last layers, for targets of many kinds, and never worse than guessing."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tests.conftest import byte_tokenizer
from tests.train.runs import EXPERTS, MIXED, SHAPE, make_rows, write_rows
from volley.models.drafters.drafter import Drafter, RMSNorm
from volley.train.begin import LAST_TAP, OTHER_TAPS, SHARPNESS, begin_from_target, soften
from volley.train.loop import Trainer
from volley.train.options import RANDOM, TrainConfig
from volley.train.parallel import Ranks
from volley.train.shape import drafter_config

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama with a tied head": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE),
    "phi3": Phi3Config(**{key: value for key, value in SHAPE.items() if key != "head_dim"}),
    "gemma3": Gemma3TextConfig(**SHAPE, **MIXED, query_pre_attn_scalar=8),
    "experts": Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts=4, moe_intermediate_size=24),
    "one dense layer": Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts=4, moe_intermediate_size=24, mlp_only_layers=[1]),
    "biases and sinks": GptOssConfig(**SHAPE, **MIXED, **EXPERTS, num_local_experts=4),
    "hybrid": Qwen3NextConfig(
        **SHAPE,
        **EXPERTS,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        num_experts=4,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
    ),
}


def make_target(config: PretrainedConfig) -> PreTrainedModel:
    """A random target whose norms are not all alike."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.4 * torch.rand_like(weight))
    return model


def new_drafter(model: PreTrainedModel, **options: Any) -> Drafter:
    config = TrainConfig(
        **{"target": "t", "data": "d", "out": "o", "block_size": 4, "num_layers": 2, "taps": (0, 1), **options}
    )
    drafter = Drafter(drafter_config(config, model, 0))
    begin_from_target(drafter, model)
    return drafter


@torch.no_grad()
def test_a_draft_layer_begins_as_the_layer_that_it_copies() -> None:
    """With norms of queries and keys it computes the same; it reads features with those projections too, but no scale before."""
    model = make_target(CONFIGS["qwen3"])
    drafter = new_drafter(model)
    states, positions = torch.randn(7, 32), torch.arange(7)
    cos, sin = drafter.rotary(positions, states.dtype)
    for own, copied in zip(drafter.layers, model.model.layers[-2:], strict=True):
        normed = own.input_layernorm(states)
        queries, (keys, values) = own.self_attn.queries(normed, cos, sin), own.self_attn.keys_values(normed, cos, sin)
        context = drafter.hidden_norm(states * copied.input_layernorm.weight)
        of_features = own.self_attn.keys_values(context, cos, sin)[0]
        torch.testing.assert_close(of_features, keys, msg="keys have a norm of their own")
        mixed = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (queries, keys, values)), is_causal=True, enable_gqa=True
        )
        hidden = states + own.self_attn.o_proj(mixed[0].transpose(0, 1).flatten(1))
        hidden = hidden + own.mlp(own.post_attention_layernorm(hidden))
        rotary = cos.transpose(0, 1), sin.transpose(0, 1)
        expected = copied(states[None], position_embeddings=rotary)
        torch.testing.assert_close(hidden, expected[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(drafter.norm(states), model.model.norm(states))


@torch.no_grad()
def test_features_begin_as_mostly_the_last_tap() -> None:
    drafter = new_drafter(make_target(CONFIGS["llama"]))
    taps = torch.randn(3, 2, 32)
    expected = OTHER_TAPS * taps[:, 0] + LAST_TAP * taps[:, 1]
    torch.testing.assert_close(drafter.fc(taps.flatten(1)), expected)
    assert bool((drafter.layers[0].self_attn.q_norm.weight == SHARPNESS).all()), "where the target has no such norm"


@torch.no_grad()
def test_mlps_of_other_widths_take_what_fits() -> None:
    model = make_target(CONFIGS["qwen3"])
    whole = new_drafter(model).layers[0]
    fewer, more = (new_drafter(model, intermediate_size=size).layers[0] for size in (16, 80))
    torch.testing.assert_close(fewer.mlp.down_proj.weight, whole.mlp.down_proj.weight[:, :16])
    states = torch.randn(5, 32)
    torch.testing.assert_close(more.mlp(states), whole.mlp(states))


@torch.no_grad()
def test_attention_and_mlp_come_from_the_nearest_layers_that_have_them() -> None:
    model = make_target(CONFIGS["hybrid"])
    drafter, attention = new_drafter(model), model.model.layers[1].self_attn
    scale = model.model.layers[1].input_layernorm(torch.ones(32)).detach()  # of ones: its scale
    queries = attention.q_proj.weight.unflatten(0, (4, 16))[:, :8].flatten(0, 1)  # the rest of each head is its gate
    for layer in drafter.layers:
        torch.testing.assert_close(layer.self_attn.q_proj.weight, queries)
        torch.testing.assert_close(layer.input_layernorm.weight, scale)
        torch.testing.assert_close(layer.self_attn.q_norm.weight, 1 + attention.q_norm.weight)
    model = make_target(CONFIGS["one dense layer"])
    for layer in new_drafter(model).layers:
        torch.testing.assert_close(layer.mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight)


@pytest.mark.slow
@pytest.mark.parametrize("start", [None, RANDOM])
@pytest.mark.parametrize("family", CONFIGS)
def test_no_start_is_above_a_guess_among_all_tokens(family: str, start: str | None, tmp_path: Path) -> None:
    target = tmp_path / "target"
    make_target(CONFIGS[family]).save_pretrained(target)
    byte_tokenizer().save_pretrained(target)
    config = TrainConfig(
        target=str(target),
        data=str(write_rows(tmp_path / "rows.jsonl", make_rows(24))),
        out=str(tmp_path / "run"),
        init=start,
        block_size=4,
        num_layers=2,
        taps=(0, 1),
        eval_share=0.2,
        eval_prompts=0,
        dtype="float32",
    )
    trainer = Trainer(config, Ranks("cpu"), speaks=False)
    assert trainer.held_out.teacher_forced()["cross_entropy"] < math.log(260) + 0.5
    assert bool((trainer.learner.model.drafter.norm.weight != 0).any())


def test_a_norm_is_softened_no_further_than_it_helps() -> None:
    norm = RMSNorm(4, 1e-6)
    soften(norm, lambda: float((norm.weight[0] - 0.5).abs().detach()))
    torch.testing.assert_close(norm.weight.detach(), torch.full((4,), 0.5))
    soften(norm, lambda: 1.0)
    torch.testing.assert_close(norm.weight.detach(), torch.full((4,), 0.5))
