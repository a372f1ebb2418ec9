"""Quantised checkpoints of diffusion language models: what transformers decodes is what canvases are denoised with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from compressed_tensors.quantization.utils import generate_gparam
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig, DiffusionGemmaForBlockDiffusion

from tests import quantised as made
from tests.conftest import byte_tokenizer
from tests.diffusion_gemma import logits_of, made_up, random_model
from tests.procedures.test_denoising import Masked, dense_sdar
from tests.tiny import eager_model, target_config
from volley import DiffusionParams, Engine, SamplingParams
from volley.errors import CheckpointError
from volley.models.quantised.scheme import quantisation_of
from volley.models.targets.diffusion import load_target
from volley.models.targets.diffusion_gemma import DiffusionGemma

SCHEMES = ["FP8_DYNAMIC", "NVFP4"]
LAYERS = "model.encoder.language_model.layers."

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def in_fp32(model: Any) -> Any:
    """The library decodes four-bit floats to bf16. transformers' own method refuses quantised models."""
    return nn.Module.float(model)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantised_sdar_denoises_with_the_decoded_weights(scheme: str, tmp_path: Path) -> None:
    plain = eager_model(target_config(vocab_size=260, num_hidden_layers=2, **made.WIDE)).requires_grad_(False)
    made.save_compressed(plain, scheme, tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    decode = CompressedTensorsConfig(dequantize=True)
    hf = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", quantization_config=decode
    ).eval()
    made.edit_config(tmp_path, model_type="sdar", architectures=["SDARForCausalLM"], mask_token_id=3, block_size=8)
    target = load_target(tmp_path, torch.float32, "cpu")
    in_fp32(hf)
    assert target.diffusion is not None
    engine, prompt = Engine(target, page_size=8), [*range(20, 33)]
    params = SamplingParams(max_tokens=19, ignore_eos=True, diffusion=DiffusionParams(threshold=0.3))
    (result,) = engine.generate([prompt], params)
    _, full = engine.procedures.choose(params)
    assert full.diffusion is not None
    assert (result.token_ids, result.stats.denoising_steps) == dense_sdar(
        Masked(target, hf), prompt, full, full.diffusion, 3
    )
    lossy = (
        dense(hf, prompt) - dense(eager_model(target_config(vocab_size=260, num_hidden_layers=2, **made.WIDE)), prompt)
    ).norm()
    assert lossy > 0.01


def dense(hf: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = hf(torch.tensor([prompt])).logits.float()
    return found


def compressed_gemma(folder: Path, scheme: str, *, once: bool) -> None:
    """With ``once`` the file has what both modes share in the decoder only, as transformers writes plain weights."""
    model = random_model(wide=True).requires_grad_(False)
    made.save_compressed_but(model, scheme, folder, ["re:.*vision.*", "re:.*router.*"])
    byte_tokenizer().save_pretrained(folder)
    if once:
        tensors = load_file(folder / "model.safetensors")
        kept = {name: value for name, value in tensors.items() if not name.startswith(LAYERS) or "layer_scalar" in name}
        assert len(kept) < len(tensors)
        save_file(kept, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("once", [False, True])
def test_a_quantised_diffusion_gemma_has_the_logits_of_transformers(once: bool, tmp_path: Path) -> None:
    compressed_gemma(tmp_path / "whole", "FP8_DYNAMIC", once=False)
    decode = CompressedTensorsConfig(dequantize=True)
    options = {"dtype": torch.float32, "quantization_config": decode}
    hf = DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path / "whole", **options).eval()
    compressed_gemma(tmp_path / "read", "FP8_DYNAMIC", once=once)
    target = load_target(tmp_path / "read", torch.float32, "cpu")
    assert isinstance(target, DiffusionGemma)
    prompt, canvas, last = made_up(11)
    with torch.inference_mode():
        theirs = in_fp32(hf)(prompt[None], decoder_input_ids=canvas[None], self_conditioning_logits=last[None]).logits[
            0
        ]
    mine = logits_of(target, prompt, canvas, last)
    plain = logits_of(DiffusionGemma(random_model(wide=True)), prompt, canvas, last)
    # where inputs are rounded, a sum that is another in its last bit may round the other way
    assert (mine - theirs).norm() < 1e-3 * theirs.norm()
    assert (mine - plain).norm() > 0.02 * plain.norm()
    params = SamplingParams(
        max_tokens=20, seed=1, ignore_eos=True, temperature=1.0, diffusion=DiffusionParams(max_steps=3)
    )
    (result,) = Engine(target).generate([prompt.tolist()], params)
    assert len(result.token_ids) == 20
    modules = [module for module in target.model.model.decoder.layers.modules() if isinstance(module, nn.Linear)]
    assert modules == [], "what both modes share is held once"


def experts_apart(folder: Path, scheme: str, trees: str) -> DiffusionGemmaForBlockDiffusion:
    """A file with experts one by one, and transformers' model of what it decodes to, inputs of linear layers rounded.

    ``trees``: what both modes share is in the file for ``both``, or for ``encoder`` or ``decoder`` only.
    """
    left_out = ["re:.*vision.*", "re:.*router.*", "re:.*self_conditioning.*"]
    weights = made.save_by_expert(random_model(wide=True).requires_grad_(False), scheme, folder, left_out)
    byte_tokenizer().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    kept, decoder = dict[str, torch.Tensor](), "model.decoder.layers."
    for name, value in tensors.items():
        if name.startswith(LAYERS) and "layer_scalar" not in name and trees == "decoder":
            continue
        moves = name.startswith(decoder) and "layer_scalar" not in name and trees == "encoder"
        kept[LAYERS + name.removeprefix(decoder) if moves else name] = value
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    model = random_model(wide=True).requires_grad_(False)
    for name, value in weights.items():
        model.get_parameter(name).copy_(value)
    scheme_of_all = {"group_0": preset_name_to_scheme(scheme, ["Linear"])}
    config = QuantizationConfig(
        config_groups=scheme_of_all, ignore=["lm_head", *left_out], quantization_status="compressed"
    )
    apply_quantization_config(model, config)
    for _, layer in model.named_modules():
        if hasattr(layer, "input_global_scale"):
            layer.input_global_scale.data.copy_(generate_gparam(-torch.ones(1), torch.ones(1)))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("trees", ["both", "decoder", "encoder"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_coded_one_by_one_compute_as_transformers_with_the_decoded_weights(
    scheme: str, trees: str, tmp_path: Path
) -> None:
    hf = experts_apart(tmp_path, scheme, trees)
    assert any(".experts.3.up_proj." in name for name in load_file(tmp_path / "model.safetensors"))
    target = load_target(tmp_path, torch.float32, "cpu")
    assert isinstance(target, DiffusionGemma)
    prompt, canvas, last = made_up(11)
    with torch.inference_mode():
        theirs = hf(prompt[None], decoder_input_ids=canvas[None], self_conditioning_logits=last[None]).logits[0]
    mine = logits_of(target, prompt, canvas, last)
    plain = logits_of(DiffusionGemma(random_model(wide=True)), prompt, canvas, last)
    assert (mine - theirs).norm() < 1e-3 * theirs.norm()
    assert (mine - plain).norm() > 0.02 * plain.norm()
    for layer in target.model.model.encoder.language_model.layers.modules():  # planted: what rounds inputs is lost
        if "forward" in vars(layer) and hasattr(layer, "quantization_scheme"):
            del layer.forward
    assert (logits_of(target, prompt, canvas, last) - theirs).norm() > 2e-3 * theirs.norm()
    found = quantisation_of(AutoConfig.from_pretrained(tmp_path))
    assert found is not None
    assert found.weights.startswith("8-bit float" if scheme == "FP8_DYNAMIC" else "4-bit float")
    assert found.inputs


EXPERT = "model.decoder.layers.0.experts.1.up_proj"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({f"{EXPERT}.weight_packed": None, f"{EXPERT}.weight_scale": None}, f"lacks {EXPERT}"),
        ({f"{EXPERT}.weight_packed": None}, f"lacks {EXPERT}.weight_packed"),
        ({"model.decoder.layers.0.self_attn.q_proj.input_global_scale": None}, "lacks .*q_proj.input_global_scale"),
        ({"model.decoder.norm.weight": None}, "lacks model.decoder.norm.weight"),
        ({"model.decoder.layers.0.experts.scale": torch.ones(1)}, "has model.decoder.layers.0.experts.scale"),
        (
            {"model.encoder.language_model.layers.0.self_attn.q_proj.weight_packed": torch.zeros(1)},
            "differ, where the model shares one weight",
        ),
    ],
)
def test_a_file_with_experts_one_by_one_that_is_not_whole_is_refused(
    change: dict[str, torch.Tensor | None], said: str, tmp_path: Path
) -> None:
    experts_apart(tmp_path, "NVFP4", "decoder")
    tensors = load_file(tmp_path / "model.safetensors")
    for name, value in change.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    if "model.decoder.norm.weight" in change:
        tensors.pop("model.encoder.language_model.norm.weight", None)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=said):
        load_target(tmp_path, torch.float32, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"), [("encoder.language_model.layers.0.layer_scalar", "lacks"), ("extra", "has")]
)
def test_missing_and_unknown_weights_are_refused(name: str, said: str, tmp_path: Path) -> None:
    """The scalars of both modes are weights of their own, whatever else they share."""
    compressed_gemma(tmp_path, "FP8_DYNAMIC", once=True)
    tensors = load_file(tmp_path / "model.safetensors")
    if tensors.pop(f"model.{name}", None) is None:
        tensors[f"model.{name}"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{said} model\.{name}"):
        load_target(tmp_path, torch.float32, "cpu")
