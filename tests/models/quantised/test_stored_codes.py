"""Codes of quantised checkpoints on the kernels as they are: the same numbers, less memory, and lossless."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tests.quantised as made
from tests.tiny import eager_model, random_drafter, random_prompts, target_config
from volley import Engine, SamplingParams, native
from volley.models.diagnosis import diagnose
from volley.models.layers.accelerate import weight_bytes
from volley.models.layers.fused import FusedLayer
from volley.models.layers.products import codes_of
from volley.models.quantised.scheme import Quantisation, quantisation_of
from volley.models.quantised.stored_codes import agreeing, attach
from volley.models.targets.loading import load_causal_lm, load_config
from volley.models.targets.target import Target

NAMES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
)

pytestmark = [
    pytest.mark.skipif(not native.available, reason="needs volley's kernels"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


def gptq(bits: int, group: int) -> made.Save:
    return lambda model, folder: made.save_symmetric_gptq(model, folder, bits, group)


SAVED: dict[str, tuple[Any, made.Save]] = {
    "W4A16": ("int4", made.compressed("W4A16")),
    "gptq 128": ("int4", gptq(4, 128)),
    "gptq 64": ("int4", gptq(4, 64)),
    "gptq 32": ("int4", gptq(4, 32)),
    "gptq 8 bits, 32": ("int8", gptq(8, 32)),
    "gptq 4 bits, a channel": ("int4", gptq(4, -1)),
    "gptq 8 bits, a channel": ("int8", gptq(8, -1)),
}


def products(target: Target) -> list[tuple[tuple[str, ...], native.Product]]:
    """Names of linear layers, and the product that has their weights."""
    found = []
    for index, layer in enumerate(target.model.get_submodule("model.layers").children()):
        fused = vars(layer)["forward"]
        assert isinstance(fused, FusedLayer)
        own = (fused.weights.project, fused.weights.output, fused.weights.gate_up, fused.weights.down)
        for names, product in zip((*NAMES, ("mlp.down_proj",)), own, strict=True):
            found.append((tuple(f"model.layers.{index}.{name}" for name in names), product))
    return found


@pytest.mark.parametrize("name", SAVED)
def test_kernels_have_the_numbers_of_the_file(name: str, tmp_path: Path) -> None:
    weights, save = SAVED[name]
    folder = made.saved(tmp_path, save)
    dense = load_causal_lm(folder, torch.float32).state_dict()
    target = Target.from_pretrained(folder, weights=weights)
    for names, product in products(target):
        expected = torch.cat([dense[f"{own}.weight"] for own in names]).bfloat16()
        assert product.kind == weights
        assert torch.equal(product.weight(), expected), names
        anew = native.Product(expected, None, weights).weight()
        assert weights == "int8" or not torch.equal(anew, expected), "rounding anew would have been seen"


def test_codes_times_scales_are_the_weight(tmp_path: Path) -> None:
    """In fp32, before bf16 hides anything."""
    folder = made.saved(tmp_path, gptq(4, 64))
    dense = load_causal_lm(folder, torch.float32)
    found = quantisation_of(load_config(folder))
    assert found is not None
    assert attach(dense, folder, found, "int4") == 28
    assert attach(nn.Module(), folder, found, "int8") == 0
    layer = dense.get_submodule("model.layers.1.mlp.down_proj")
    ((source, _),) = codes_of([layer])
    codes = source.rows(slice(None))
    weight = layer.get_parameter("weight")
    assert codes.codes.dtype == torch.int8
    assert torch.equal(codes.codes.float() * codes.scales.repeat_interleave(64, 1), weight)
    assert not codes_of([layer, dense.get_submodule("lm_head")])


def test_it_takes_less_memory_and_speculation_is_lossless(tmp_path: Path) -> None:
    folder = made.saved(tmp_path, gptq(4, 128))
    small, large = (Target.from_pretrained(folder, weights=kind) for kind in ("int4", "bf16"))
    layers = sum(product.nbytes for _, product in products(small))
    assert layers < 0.29 * sum(product.nbytes for _, product in products(large))
    assert weight_bytes(small.model) < 0.4 * weight_bytes(large.model)
    assert all(weight.device.type == "meta" for weight in small.model.get_submodule("model.layers.0.mlp").parameters())
    prompts, params = random_prompts(3, vocab=300), SamplingParams(max_tokens=24)
    drafter = random_drafter(hidden_size=128, num_attention_heads=4, head_dim=32, intermediate_size=64, vocab_size=300)
    engines = Engine(small, drafter.to(torch.bfloat16), policy="fixed"), Engine(small)
    drafted, plain = ([result.token_ids for result in engine.generate(prompts, params)] for engine in engines)
    assert drafted == plain


def test_scales_for_a_part_of_the_inputs_must_be_fp16(tmp_path: Path) -> None:
    """W8A16 has one for 128 inputs, here in fp32; a layer with no more inputs has one for each output."""
    folder = made.saved(tmp_path, made.compressed("W8A16"))
    dense, found = load_causal_lm(folder, torch.float32), quantisation_of(load_config(folder))
    assert found is not None
    assert attach(dense, folder, found, "int8") == 28
    layer = dense.get_submodule("model.layers.1.mlp")
    whole, parts = (codes_of([layer.get_submodule(name)]) for name in ("up_proj", "down_proj"))
    assert torch.equal(whole[0][0].rows(slice(5, 9)).dense(), layer.get_parameter("up_proj.weight")[5:9])
    assert not parts


@pytest.mark.parametrize("scheme", ["W4A16_ASYM", "W8A8"])
def test_what_does_not_agree_is_rounded_anew(scheme: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = made.saved(tmp_path, made.compressed(scheme))
    assert diagnose(folder).facts["its codes"] == "rounded anew by --weights"
    Target.from_pretrained(folder, weights="int8")
    assert "no layers compute with their stored codes; others are rounded anew" in caplog.text


def test_inspect_says_which_kernels_have_the_codes(tmp_path: Path) -> None:
    folder = made.saved(tmp_path, gptq(4, 128))
    assert diagnose(folder).facts["its codes"] == "the kernels of --weights int4 compute with them as they are"


@pytest.mark.parametrize(
    ("changes", "kernels"),
    [
        ({}, "int4"),
        ({"group_size": 32}, "int4"),
        ({"group_size": 16}, None),
        ({"desc_act": True}, None),
        ({"sym": False}, None),
        ({"bits": 8}, "int8"),
        ({"bits": 8, "group_size": -1}, "int8"),
        ({"bits": 2}, None),
    ],
)
def test_which_formats_agree(changes: dict[str, Any], kernels: str | None) -> None:
    settings = {"bits": 4, "group_size": 128, "sym": True, "desc_act": False, **changes}
    assert agreeing(Quantisation("gptq", settings)) == kernels
    assert agreeing(Quantisation("awq", settings)) is None


def test_shifted_and_reordered_codes_are_not_taken(tmp_path: Path) -> None:
    """A config may say that codes are symmetric and in order where the file says something else."""
    model = eager_model(target_config(**made.WIDE)).requires_grad_(False)
    made.save_gptq(model, tmp_path, act_order=True)
    said = Quantisation("gptq", {"bits": 4, "group_size": 128, "sym": True, "desc_act": False})
    assert attach(model, tmp_path, said, "int4") == 28
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "stored_codes")]
    assert [codes_of([layer]) for layer in layers] == [[]] * 28
