"""Accelerated models compute what they computed before, and are left alone where that could not be promised."""

import copy
import sys
from types import FrameType
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.diffusion_gemma import random_model
from tests.models.test_families import make_model
from tests.tiles import needs_kernels
from volley import Engine, native
from volley.models.layers.accelerate import SharedProjection, accelerate
from volley.models.layers.products import make_product
from volley.models.targets.target import Target

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make(config: transformers.PretrainedConfig, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


@pytest.mark.parametrize(
    "config",
    [
        transformers.Qwen3Config(**SIZES, head_dim=8),
        transformers.LlamaConfig(**SIZES),
        transformers.Qwen2Config(**SIZES),  # its q, k and v projections have biases
        transformers.Gemma3TextConfig(**SIZES, head_dim=8, query_pre_attn_scalar=8),  # its norms scale by 1 + weight
    ],
    ids=lambda config: config.model_type,
)
@pytest.mark.parametrize("rows", [1, 5, 16, 40])
def test_logits_stay_within_rounding(config: transformers.PretrainedConfig, rows: int) -> None:
    plain = make(config)
    fast = copy.deepcopy(plain)
    assert accelerate(fast)
    ids = 3 + torch.arange(rows)[None] % 50  # token 0 is padding, whose embedding some models zero
    with torch.inference_mode():
        expected, found = plain(ids).logits.float(), fast(ids).logits.float()
    assert (found - expected).norm() / expected.norm() < 2**-5
    changed = [name for name, module in fast.named_modules() if "forward" in vars(module)]
    assert any(name.endswith("down_proj") for name in changed)
    assert any(name.endswith("norm") for name in changed) == (native.available or config.model_type != "gemma3_text")
    assert any(name.endswith("q_proj") for name in changed) == (config.model_type != "qwen2")


def test_siblings_agree_with_their_own_weights_in_any_order() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(16, size, bias=False).bfloat16() for size in (8, 24, 16)]
    shared = SharedProjection(layers, make_product(torch.cat([layer.weight for layer in layers])))
    with torch.inference_mode():
        for order in ((0, 1, 2), (2, 0, 1), (1, 1, 0), (2, 2, 2)):
            for index in order:
                x = torch.randn(3, 16).bfloat16()
                for _ in range(2):
                    torch.testing.assert_close(shared.project(x, index), layers[index](x), rtol=2**-6, atol=2**-6)


def test_nothing_outlives_the_last_sibling() -> None:
    layers = [nn.Linear(8, 8, bias=False).bfloat16() for _ in range(2)]
    shared = SharedProjection(layers, make_product(torch.cat([layer.weight for layer in layers])))
    x = torch.ones(1, 8).bfloat16()
    shared.project(x, 0)
    assert shared.kept is not None
    shared.project(x, 1)
    assert shared.kept is None


def test_siblings_may_be_asked_in_several_threads() -> None:
    """Another thread asks before each line: the outputs of one thread's input are never those of another's."""
    layers = [nn.Linear(4, 4, bias=False) for _ in range(3)]
    shared = SharedProjection(layers, lambda x: x.repeat(1, 3))
    own, other = torch.zeros(1, 4), torch.ones(1, 4)

    def interrupted(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not SharedProjection.project.__code__:
            return None
        if event == "line":
            shared.project(other, 0)
        return interrupted

    before = sys.gettrace()
    sys.settrace(interrupted)
    try:
        found = [shared.project(own, index) for index in range(3)]
    finally:
        sys.settrace(before)
    assert all(torch.equal(output, own) for output in found)


def test_weights_that_are_kept_twice_as_wide_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("volley.models.layers.accelerate.has_bf16_products", lambda: False)
    accelerate(make(transformers.Qwen3Config(**SIZES, head_dim=8)), release=True)
    (record,) = caplog.records
    assert "kept in fp32, in twice their memory" in record.getMessage()


@needs_kernels
def test_codes_that_are_a_small_part_of_a_model_are_told(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {**SIZES, "hidden_size": 64, "head_dim": 16}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}  # which codes do not take
    model = make(transformers.Qwen3MoeConfig(**sizes, **experts, tie_word_embeddings=True))
    attention, rest = 2 * (64 + 32 + 32 + 64) * 64 + 60 * 64, 2 * (8 * 3 * 40 * 64 + 8 * 64)
    accelerate(model, "int8", release=True)
    accelerate(make(transformers.Qwen3Config(**sizes)), "int8", release=True)
    (record,) = caplog.records
    share = round(100 * attention / (attention + rest))
    assert f"weights='int8': {share} % of the numbers in matrices became codes" in record.getMessage()


@pytest.mark.parametrize("kind", ["Qwen3", "DiffusionGemma"])
def test_norms_of_a_model_that_is_only_run_are_one_operation_in_fp32_too(kind: str) -> None:
    plain = (
        random_model()
        if kind == "DiffusionGemma"
        else make(transformers.Qwen3Config(**SIZES, head_dim=8), torch.float32)
    )
    fast = copy.deepcopy(plain)
    assert accelerate(fast, release=True)
    changed = {name for name, module in fast.named_modules() if "forward" in vars(module)}
    norms = {name: module for name, module in plain.named_modules() if name.endswith("norm")}
    assert changed >= norms.keys()
    assert all("norm" in name or name.endswith("experts") for name in changed)
    for name, norm in norms.items():
        x = torch.randn(5, len(norm.weight) if hasattr(norm, "weight") else 8)
        torch.testing.assert_close(fast.get_submodule(name)(x), norm(x))


def test_other_dtypes_are_left_alone() -> None:
    model = make(transformers.Qwen3Config(**SIZES, head_dim=8), torch.float32)
    assert not accelerate(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_weights_that_a_model_keeps_in_fp32_do_not_stop_the_others() -> None:
    """ERNIE's gates stay in fp32 in a bf16 model."""
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 0}
    config = transformers.Ernie4_5_MoeConfig(**SIZES, **experts)
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for name, weight in plain.named_parameters():
        if name.endswith("gate.weight"):
            weight.data = weight.data.float()
    fast = copy.deepcopy(plain)
    assert accelerate(fast, release=True)
    changed = [name for name, module in fast.named_modules() if "forward" in vars(module)]
    assert any(name.endswith("o_proj") for name in changed)
    ids = torch.arange(3, 20)[None]
    with torch.inference_mode():
        expected, found = plain(ids).logits.float(), fast(ids).logits.float()
    assert (found - expected).norm() / expected.norm() < 2**-4


def test_a_weight_that_its_parent_multiplies_with_stays() -> None:
    target = Target(make_model("longcat_flash").bfloat16())
    expected = Engine(target, block_size=1).next_logits(range(3, 20))
    accelerate(target.model, release=True)
    found = Engine(target).next_logits(range(3, 20))
    assert (found - expected).norm() / expected.norm() < 2**-4
