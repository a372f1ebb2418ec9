"""Quantised checkpoints: logits equal transformers' own or what the file says, and what cannot be loaded is refused."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Glm4MoeConfig,
    GptOssConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from tests import quantised as made
from tests.conftest import byte_tokenizer
from tests.tiny import SHAPE, eager_model, greedy, random_drafter, random_prompts, target_config, teach
from volley import Engine, SamplingParams, native
from volley.errors import CheckpointError, UnsupportedModelError
from volley.models.diagnosis import diagnose
from volley.models.layers.accelerate import accelerate
from volley.models.quantised import scheme as quantised
from volley.models.quantised.packed import dense_tensors
from volley.models.quantised.scheme import FORMATS, quantisation_of
from volley.models.targets.loading import load_causal_lm
from volley.models.targets.taps import Taps
from volley.models.targets.target import Target

SCHEMES = ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W8A16", "W4A16", "W4A16_ASYM", "NVFP4", "NVFP4A16", "MXFP4A16"]
ROUNDED = {"FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "NVFP4"}
TOKENS = torch.arange(12)[None]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def wide_model(**changes: Any) -> PreTrainedModel:
    return eager_model(target_config(**{**made.WIDE, **changes})).requires_grad_(False)


def logits(model: PreTrainedModel) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(TOKENS).logits
    return found


def compressed(scheme: str, folder: Path, **changes: Any) -> Path:
    made.save_compressed(wide_model(**changes), scheme, folder)
    return folder


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compressed_tensors_compute_what_transformers_computes(scheme: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if "FP4" in scheme else torch.float32  # the library decodes four-bit floats to bf16
    folder = compressed(scheme, tmp_path)
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model = load_causal_lm(folder, dtype, "eager")
    assert torch.equal(logits(model), logits(own))
    assert not torch.allclose(logits(model).float(), logits(wide_model()), atol=0.1)
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert ("forward" in vars(layer)) == (scheme in ROUNDED)
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    found = quantisation_of(AutoConfig.from_pretrained(folder))
    assert found is not None
    assert found.weights.startswith("8-bit" if "8" in scheme.split("A")[0] else "4-bit")
    assert bool(found.inputs) == (scheme in ROUNDED)
    assert found.left_out == ["lm_head"]


@pytest.mark.parametrize("scheme", ["W8A8", "FP8_DYNAMIC", "NVFP4"])
def test_accelerating_leaves_layers_that_round_their_inputs(scheme: str, tmp_path: Path) -> None:
    folder = compressed(scheme, tmp_path)
    model, fast = (load_causal_lm(folder, torch.bfloat16, "eager") for _ in range(2))
    assert accelerate(fast)
    expected = logits(model).float()
    spread = (logits(fast).float() - expected).norm() / expected.norm()
    for layer in fast.get_submodule("model.layers").modules():  # planted: what rounds inputs is lost
        if "forward" in vars(layer) and hasattr(layer, "quantization_scheme"):
            del layer.forward
    lost = (logits(fast).float() - expected).norm() / expected.norm()
    assert spread < 0.02 < lost


def _by_bitsandbytes(model: PreTrainedModel, folder: Path, **settings: Any) -> None:
    from bitsandbytes.functional import dequantize_4bit

    model.save_pretrained(folder / "dense")
    config = BitsAndBytesConfig(**settings)
    coded = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float32, quantization_config=config)
    coded.save_pretrained(folder)
    for name, weight in made.linear_weights(model).items():
        stored = coded.get_submodule(name.removesuffix(".weight")).weight
        if config.load_in_4bit:
            weight.copy_(dequantize_4bit(stored.data, stored.quant_state))
        else:
            weight.copy_(stored.data.float() * stored.SCB[:, None] / 127)


BY_HAND: dict[str, tuple[str, made.Save]] = {
    "gptq": ("4-bit int, a scale a group of 32", made.save_gptq),
    "gptq-8": ("8-bit int, a scale a group of 32", lambda model, folder: made.save_gptq(model, folder, 8)),
    "gptq-order": (
        "4-bit int, a scale a group of 32, in order of activations",
        lambda model, folder: made.save_gptq(model, folder, act_order=True),
    ),
    "gptq-v2": (
        "4-bit int, a scale a group of 32",
        lambda model, folder: made.save_gptq(model, folder, version="gptq_v2"),
    ),
    "awq": ("4-bit int, a scale a group of 32", made.save_awq),
    "fp8": ("8-bit float, a scale a block of 128 × 128", made.save_fp8),
    "fp8-mistral": (
        "8-bit float, a scale a tensor",
        lambda model, folder: made.save_whole_fp8(model, folder, "weight_scale_inv", "activation_scale"),
    ),
    "fp8-auto": (
        "8-bit float, a scale a tensor",
        lambda model, folder: made.save_whole_fp8(model, folder, "weight_scale", "input_scale"),
    ),
    "nf4": (
        "4-bit nf4, a scale a group of 64",
        lambda model, folder: _by_bitsandbytes(model, folder, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    ),
    "int8": ("8-bit int, a scale a channel", lambda model, folder: _by_bitsandbytes(model, folder, load_in_8bit=True)),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_other_methods_compute_with_what_is_stored(name: str, tmp_path: Path) -> None:
    description, save = BY_HAND[name]
    model = wide_model()
    before = logits(model)
    save(model, tmp_path)
    found = load_causal_lm(tmp_path, torch.float32, "eager")
    assert torch.allclose(logits(found), logits(model), atol=1e-4)
    assert not torch.allclose(logits(found), before, atol=0.1)
    quantisation = quantisation_of(AutoConfig.from_pretrained(tmp_path))
    assert quantisation is not None
    assert quantisation.weights == description


@pytest.mark.parametrize("scheme", ["NVFP4A16", "MXFP4A16"])
def test_experts_coded_one_by_one_are_stacked(scheme: str, tmp_path: Path) -> None:
    """transformers stacks them too, but leaves the scale of the whole matrix out (NVFP4)."""
    shape = {**SHAPE, "hidden_size": 64, "intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(
        **shape, moe_intermediate_size=32, head_dim=16, vocab_size=50, num_hidden_layers=2, initializer_range=0.3
    )
    plain, decoded = (eager_model(config).requires_grad_(False) for _ in range(2))
    weights = made.save_by_expert(eager_model(config).requires_grad_(False), scheme, tmp_path, ["re:.*mlp.gate$"])
    for name, value in weights.items():
        decoded.get_parameter(name).copy_(value)
    found = logits(load_causal_lm(tmp_path, torch.float32, "eager"))
    assert torch.allclose(found, logits(decoded), atol=1e-4)
    assert not torch.allclose(found, logits(plain), atol=0.1)


def test_mxfp4_experts(tmp_path: Path) -> None:
    shape = {**SHAPE, "hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = eager_model(GptOssConfig(**shape, head_dim=16, vocab_size=50, num_hidden_layers=2, initializer_range=0.3))
    made.save_mxfp4(model.requires_grad_(False), tmp_path)
    assert torch.allclose(logits(load_causal_lm(tmp_path, torch.float32, "eager")), logits(model), atol=1e-4)


def test_awq_is_decoded_as_the_library_converts_it(tmp_path: Path) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter

    made.save_awq(wide_model(), tmp_path)
    settings = {"bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    converted = AutoAWQConverter.from_autoawq_config(settings).process(load_file(tmp_path / "model.safetensors"))
    decoded = dict(dense_tensors(tmp_path, FORMATS["awq"], settings, torch.float32))
    stem = "model.layers.1.mlp.down_proj"
    shape = torch.Size(converted[f"{stem}.weight_shape"].tolist())
    codes = unpack_from_int32(converted[f"{stem}.weight_packed"], 4, shape)
    scales = converted[f"{stem}.weight_scale"]
    zeros = unpack_from_int32(converted[f"{stem}.weight_zero_point"], 4, scales.shape, packed_dim=0)
    dense = (codes.float() - zeros.repeat_interleave(32, 1)) * scales.float().repeat_interleave(32, 1)
    assert torch.equal(decoded[f"{stem}.weight"], dense)


@pytest.mark.skipif(not native.available, reason="needs volley's kernels")
def test_decoded_layers_are_fused_and_hold_their_weights_once(tmp_path: Path) -> None:
    folder = compressed("W4A16", tmp_path, vocab_size=300)
    byte_tokenizer().save_pretrained(folder)
    expected = logits(load_causal_lm(folder, torch.bfloat16)).float()
    target = Target.from_pretrained(folder)
    assert target.fused is not None
    assert {weight.device.type for weight in target.model.get_submodule("model.layers.0.mlp").parameters()} == {"meta"}
    found = logits(target.model.set_attn_implementation("eager") or target.model).float()
    assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "W4A16"])
def test_speculation_on_a_quantised_target_is_lossless(scheme: str, tmp_path: Path) -> None:
    folder = compressed(scheme, tmp_path)
    target = Target(load_causal_lm(folder, torch.float32))
    prompts = random_prompts(4)
    params = SamplingParams(max_tokens=40)
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = {tuple(prompt): greedy(own, prompt, 40) for prompt in prompts}
    drafter = random_drafter(hidden_size=128, num_attention_heads=4, head_dim=32, intermediate_size=64)
    engine = Engine(target, drafter, page_size=4, policy="fixed")
    teach(engine, expected)
    results = list(engine.generate(prompts, params))
    assert [result.token_ids for result in results] == list(expected.values())
    assert max(result.stats.acceptance_length for result in results) > 2


def test_taps_embedding_and_head_are_found(tmp_path: Path) -> None:
    target = Target(load_causal_lm(compressed("W8A8", tmp_path), torch.float32))
    with Taps(target.model, (0, 2)) as taps, torch.inference_mode():
        target.run_probe(TOKENS, TOKENS, lambda layer, q, k, v, options: q)
        assert taps.take().shape == (1, 12, 2 * 128)
    assert torch.equal(target.kept_head[: target.vocab_size], wide_model().get_parameter("lm_head.weight"))
    assert torch.equal(target.embed(TOKENS[0]), wide_model().get_parameter("model.embed_tokens.weight")[:12])


def test_inspecting_a_target_says_how_it_is_quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = diagnose(compressed("W8A8", tmp_path / "int"))
    assert found.title == "a target of type qwen3"
    assert found.facts == {
        "shape": "4 layers, hidden size 128, 50 tokens",
        "drafts by default": "prompt lookup",
        "quantised by": "compressed-tensors",
        "its weights": "8-bit int, a scale a channel; decoded when loaded",
        "its inputs": "8-bit int, a scale a token, found anew; rounded so in every pass",
        "its codes": "rounded anew by --weights",
        "not quantised": "lm_head",
    }
    made.save_gptq(wide_model(), tmp_path / "gptq")
    assert diagnose(tmp_path / "gptq").facts["its inputs"] == "not rounded"
    wide_model().save_pretrained(tmp_path / "plain")
    assert [problem.split(tmp_path.name)[1] for problem in diagnose(tmp_path / "plain").problems] == [
        "/plain has no tokenizer files; put the target's tokenizer files there"
    ]
    assert list(diagnose(tmp_path / "plain").facts) == ["shape", "drafts by default"]
    made.edit_config(tmp_path / "plain", quantization_config={"quant_method": "hqq"})
    assert "does not load" in diagnose(tmp_path / "plain").problems[0]


# -- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "modelopt"}, "ModelOptNvfp4Converter"),
        ({"quant_method": "gptqs"}, "did you mean 'gptq'"),
        ({"quant_method": "hqq"}, "take the unquantised checkpoint"),
        ({"quant_method": "gptq", "bits": 3}, "reads 2, 4 and 8 bits"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"a": {"bits": 8}}}, "the same for all modules"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "format gemm"),
    ],
)
def test_what_cannot_be_read_is_refused(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    wide_model().save_pretrained(tmp_path)
    made.edit_config(tmp_path, quantization_config=settings)
    with pytest.raises(UnsupportedModelError, match=said):
        load_causal_lm(tmp_path, torch.float32)


def test_inputs_rounded_by_the_batch_are_refused(tmp_path: Path) -> None:
    folder = compressed("FP8_DYNAMIC", tmp_path)
    settings = AutoConfig.from_pretrained(folder).quantization_config
    settings["config_groups"]["group_0"]["input_activations"]["strategy"] = "tensor"
    made.edit_config(folder, quantization_config=settings)
    with pytest.raises(UnsupportedModelError, match="speculation cannot be lossless"):
        load_causal_lm(folder, torch.float32)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = compressed("W8A8", tmp_path)
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    with pytest.raises(
        UnsupportedModelError, match=r"needs compressed-tensors; install it: pip install compressed-tensors"
    ):
        load_causal_lm(folder, torch.float32)
    assert importlib.util.find_spec("compressed_tensors") is not None


@pytest.mark.parametrize(("change", "said"), [("lacks", "lacks model.norm.weight"), ("has", "has model.scale, which")])
@pytest.mark.parametrize("scheme", [None, "W8A16"])
def test_missing_and_unknown_weights_are_refused(change: str, said: str, scheme: str | None, tmp_path: Path) -> None:
    if scheme is None:
        wide_model().save_pretrained(tmp_path)
    else:
        compressed(scheme, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    if change == "lacks":
        del tensors["model.norm.weight"]
    else:
        tensors["model.scale"] = torch.ones(1)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=said):
        load_causal_lm(tmp_path, torch.float32)


@pytest.mark.parametrize("name", ["mtp.norm.weight", "model.mtp_block.0.norm.weight", "model.layers.{}.eh_proj.weight"])
def test_layers_that_predict_further_tokens_are_left_unused(name: str, tmp_path: Path) -> None:
    model = wide_model()
    model.save_pretrained(tmp_path)
    file, extra = tmp_path / "model.safetensors", name.format(model.config.num_hidden_layers)
    save_file({**load_file(file), extra: torch.ones(1)}, file, {"format": "pt"})
    made.edit_config(tmp_path, num_nextn_predict_layers=1)
    assert torch.equal(logits(load_causal_lm(tmp_path, torch.float32, "eager")), logits(model))
    if "{}" in name:
        made.edit_config(tmp_path, num_nextn_predict_layers=0)
        with pytest.raises(CheckpointError, match=f"has {extra}, which its model does not"):
            load_causal_lm(tmp_path, torch.float32)


def test_blocks_at_the_edges_are_smaller(tmp_path: Path) -> None:
    """192 inputs and 320 rows: divided into as many equal blocks as there are scales they would be of other sizes."""
    model = wide_model(hidden_size=192, intermediate_size=320)
    made.save_fp8(model, tmp_path)
    found = load_causal_lm(tmp_path, torch.float32)
    for name, weight in made.linear_weights(model).items():
        torch.testing.assert_close(found.get_parameter(name), weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, r"has codes of model\.layers\.0\.mlp\.up_proj\.weight and lacks .*weight_scale_inv; fetch it again"),
        ({"weight_scale_inv": torch.ones(3, 3)}, r"scales of shape \(3, 3\), which are not blocks of 128 × 128"),
        ({"weight": torch.ones(256, 128), "weight_scale_inv": torch.ones(2, 1)}, "is of type torch.float32"),
    ],
)
def test_float8_that_cannot_be_read(change: dict[str, torch.Tensor], said: str, tmp_path: Path) -> None:
    made.save_fp8(wide_model(), tmp_path)
    file, layer = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj"
    tensors = load_file(file)
    del tensors[f"{layer}.weight_scale_inv"]
    save_file({**tensors, **{f"{layer}.{part}": value for part, value in change.items()}}, file, {"format": "pt"})
    with pytest.raises((CheckpointError, UnsupportedModelError), match=said):
        load_causal_lm(tmp_path, torch.float32)


def test_biases_of_zeros_that_the_model_lacks_are_left_out(tmp_path: Path) -> None:
    """AutoGPTQ wrote one for every layer."""
    model = wide_model()
    made.save_gptq(model, tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.down_proj.bias"
    tensors = load_file(file)
    save_file({**tensors, name: torch.zeros(128)}, file, {"format": "pt"})
    found = load_causal_lm(tmp_path, torch.float32).get_parameter("model.layers.0.mlp.down_proj.weight")
    torch.testing.assert_close(found, model.get_parameter("model.layers.0.mlp.down_proj.weight").float())
    save_file({**tensors, name: torch.ones(128)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"has {name}, which"):
        load_causal_lm(tmp_path, torch.float32)


def test_modules_that_are_not_quantised_are_named_by_a_minus(tmp_path: Path) -> None:
    """As Qwen3.5's own GPTQ files do; an empty entry changes nothing either."""
    model = wide_model()
    made.save_gptq(model, tmp_path)
    settings = AutoConfig.from_pretrained(tmp_path).quantization_config
    made.edit_config(tmp_path, quantization_config={**settings, "dynamic": {"lm_head": {}, "-:.*mtp.*": {}}})
    assert torch.allclose(logits(load_causal_lm(tmp_path, torch.float32, "eager")), logits(model), atol=1e-4)
    made.edit_config(tmp_path, quantization_config={**settings, "dynamic": {"+:.*mlp.*": {"bits": 8}}})
    with pytest.raises(UnsupportedModelError, match="other modules having other ones"):
        load_causal_lm(tmp_path, torch.float32)


@pytest.mark.parametrize("save", [made.save_fp8, made.save_gptq, made.save_awq])
def test_end_tokens_come_from_the_generation_config(save: made.Save, tmp_path: Path) -> None:
    save(wide_model(), tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert Target(load_causal_lm(tmp_path, torch.float32)).stop_token_ids >= {7, 9}


def test_what_a_router_has_in_fp32_is_not_rounded(tmp_path: Path) -> None:
    """Biases of some routers differ by less than bf16 can tell."""
    shape = {**SHAPE, "hidden_size": 128, "intermediate_size": 128, "n_routed_experts": 4, "num_experts_per_tok": 2}
    config = Glm4MoeConfig(
        **shape, moe_intermediate_size=128, head_dim=32, vocab_size=50, num_hidden_layers=2, first_k_dense_replace=1
    )
    model = eager_model(config).requires_grad_(False)
    name = next(name for name, _ in model.named_buffers() if name.endswith("e_score_correction_bias"))
    model.get_buffer(name).copy_(7 + torch.tensor([0.001, 0.002, 0.003, 0.004]))
    made.save_fp8(model, tmp_path)
    found = load_causal_lm(tmp_path, torch.bfloat16).get_buffer(name)
    assert torch.equal(found, model.get_buffer(name))


def test_a_packed_matrix_without_scales_is_refused(tmp_path: Path) -> None:
    made.save_gptq(wide_model(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.scales"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks model.layers.0.mlp.up_proj.scales"):
        load_causal_lm(tmp_path, torch.float32)
