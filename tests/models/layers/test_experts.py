"""Experts in fewer operations against transformers' own."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.diffusion_gemma import random_model
from volley.models.layers.experts import GroupedExperts, group_experts

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def experts_of(
    config: transformers.PretrainedConfig, dtype: torch.dtype, implementation: str = "grouped_mm"
) -> nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.set_experts_implementation(implementation)
    (found,) = (module for name, module in model.named_modules() if name.endswith(".experts"))
    for weight in found.parameters():
        nn.init.normal_(weight, std=0.2)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 70])
@torch.no_grad()
def test_numbers_are_those_of_transformers(rows: int, dtype: torch.dtype) -> None:
    experts = experts_of(transformers.Qwen3MoeConfig(**SIZES, num_experts=5, num_experts_per_tok=3), dtype)
    states = torch.randn(rows, 32, dtype=dtype)
    weights, chosen = torch.rand(rows, 4).topk(3)  # nobody chooses the last expert
    expected = experts(states, chosen, weights)
    assert group_experts(experts)
    found = experts(states, chosen, weights)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_gates_by_gelu_are_those_of_transformers() -> None:
    """One kernel, where the kernels are built."""
    model = random_model()
    experts: Any = model.model.encoder.language_model.layers[0].experts
    states, (weights, chosen) = torch.randn(70, 32), torch.rand(70, 4).topk(2)
    expected = experts(states, chosen, weights)
    assert group_experts(experts)
    torch.testing.assert_close(experts(states, chosen, weights), expected)


def test_other_kinds_of_experts_stay_as_they_are() -> None:
    sizes = {**SIZES, "num_experts_per_tok": 2}
    biased = experts_of(transformers.GptOssConfig(**sizes, num_local_experts=4), torch.float32)
    double = experts_of(transformers.Qwen3MoeConfig(**sizes, num_experts=4), torch.float64)
    looping = experts_of(transformers.Qwen3MoeConfig(**sizes, num_experts=4), torch.float32, "eager")
    for module in (biased, double, looping, nn.Linear(2, 2)):
        assert not group_experts(module)
        assert not isinstance(vars(module).get("forward"), GroupedExperts)
