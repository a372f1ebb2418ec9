"""FP8 and NVFP4 codes in bf16 matmuls: the results of the decoded weights to the bit, in the memory of the file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tests.quantised as made
from tests.conftest import byte_tokenizer
from tests.diffusion_gemma import logits_of, made_up, random_model
from tests.tiny import random_prompts
from volley import DiffusionParams, Engine, SamplingParams, native
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_cache import BlockTable
from volley.memory.kv_store import make_store
from volley.models.diagnosis import diagnose
from volley.models.layers.accelerate import accelerate, weight_bytes
from volley.models.layers.experts import CodedExperts
from volley.models.layers.fused import FusedLayer
from volley.models.layers.products import RoundedInputs, codes_of
from volley.models.quantised.small_floats import decode
from volley.models.targets import loading
from volley.models.targets.diffusion import load_target
from volley.models.targets.diffusion_gemma import DiffusionGemma
from volley.models.targets.target import Target

pytestmark = [
    pytest.mark.skipif(not native.has_dot_products, reason="needs kernels that widen codes fast"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


SAVED: dict[str, made.Save] = {
    **{scheme: made.compressed(scheme) for scheme in ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "NVFP4A16")},
    "fp8 of DeepSeek": made.save_fp8,
    "fp8 of Mistral": lambda model, folder: made.save_whole_fp8(model, folder, "weight_scale_inv", "activation_scale"),
}


def coded(folder: Path) -> Target:
    """A bf16 target whose layers keep their codes, as diffusion models are loaded."""
    model = loading.load_causal_lm(folder, torch.bfloat16)
    assert loading.keep_codes(model, folder) == 28
    accelerate(model, release=True)
    return Target(model)


@pytest.mark.parametrize("name", SAVED)
def test_codes_are_the_decoded_weights_to_the_bit(name: str, tmp_path: Path) -> None:
    """Decoded in fp32 and rounded once: in bf16 transformers rounds the scales of FP8 as well."""
    folder = made.saved(tmp_path, SAVED[name])
    model = loading.load_causal_lm(folder, torch.bfloat16)
    weights = {
        key: value.bfloat16() for key, value in loading.load_causal_lm(folder, torch.float32).state_dict().items()
    }
    assert loading.keep_codes(model, folder) == 28
    for key, module in model.named_modules():
        if not isinstance(module, nn.Linear) or key == "lm_head":
            continue
        forward = vars(module).get("forward")
        if isinstance(forward, RoundedInputs):
            found = forward.product.weight()
        else:
            ((codes, _),) = codes_of([module], "bf16")
            found = native.Product(module.weight, None, "bf16", codes_of([module])).weight()
            assert codes.format.name in ("FP8", "NVFP4")
        assert torch.equal(found, weights[f"{key}.weight"]), key


@pytest.mark.parametrize("name", ["NVFP4A16", "fp8 of DeepSeek"])
def test_answers_and_logits_are_those_of_decoded_weights(name: str, tmp_path: Path) -> None:
    folder = made.saved(tmp_path, SAVED[name])
    small, large = coded(folder), Target.from_pretrained(folder, device="cpu")
    tokens, rows = torch.arange(20, 43), torch.arange(23)
    both = []
    for target in (small, large):
        store = make_store("auto", target.kv_shapes, 32, target.dtype, target.device)
        with torch.inference_mode():
            both.append(target.forward(RaggedBatch([Segment(BlockTable(8, range(4)), 0, 23)], tokens), store, rows))
    assert torch.equal(*both)
    prompts, params = random_prompts(3, vocab=300), SamplingParams(max_tokens=20, ignore_eos=True)
    together = [one.token_ids for one in Engine(small).generate(prompts, params)]
    alone = [next(iter(Engine(small).generate([prompt], params))).token_ids for prompt in prompts]
    assert together == alone == [one.token_ids for one in Engine(large).generate(prompts, params)]


@pytest.mark.parametrize("name", ["NVFP4A16", "NVFP4", "FP8_DYNAMIC", "fp8 of DeepSeek"])
def test_it_takes_the_memory_of_the_file(name: str, tmp_path: Path) -> None:
    folder = made.saved(tmp_path, SAVED[name])
    tensors = load_file(folder / "model.safetensors")
    in_file = sum(value.nbytes for key, value in tensors.items())
    held = weight_bytes(coded(folder).model)
    assert held <= 1.15 * in_file
    assert held < 0.75 * weight_bytes(Target.from_pretrained(folder, device="cpu").model)


@pytest.mark.parametrize(("name", "weights"), [("NVFP4A16", "int4"), ("FP8_DYNAMIC", "int8")])
def test_weights_of_an_autoregressive_target_are_taken_by_name(name: str, weights: Any, tmp_path: Path) -> None:
    """The head is not in codes in the file, and is rounded anew."""
    folder = made.saved(tmp_path, SAVED[name])
    assert diagnose(folder).facts["its codes"] == f"the kernels of --weights {weights} compute with them as they are"
    target = Target.from_pretrained(folder, device="cpu", weights=weights)
    layer = target.model.get_submodule("model.layers.0")
    forward = vars(layer).get("forward") or vars(layer.get_submodule("self_attn.q_proj"))["forward"]
    product = forward.weights.project if isinstance(forward, FusedLayer) else forward.product
    assert {of.name for of in product.formats} == {"NVFP4" if weights == "int4" else "FP8"}
    prompts, params = random_prompts(3, vocab=300), SamplingParams(max_tokens=12)
    together = [one.token_ids for one in Engine(target).generate(prompts, params)]
    assert together == [next(iter(Engine(target).generate([prompt], params))).token_ids for prompt in prompts]


def test_what_the_kernels_cannot_hold_stays_decoded() -> None:
    codes, scale = torch.zeros(32, 96, dtype=torch.float8_e4m3fn), torch.ones(1)
    assert decode({"weight": codes, "weight_scale": scale}) is None, "96 inputs are no multiple of 64"
    assert decode({"weight": codes[:, :64], "weight_scale": scale}) is not None
    assert decode({"weight": codes[:, :64].float(), "weight_scale": scale}) is None
    assert decode({"weight": codes[:, :64], "weight_scale": torch.ones(5)}) is None
    assert decode({"weight_packed": torch.zeros(32, 32, dtype=torch.uint8), "weight_scale": torch.ones(32, 4)}) is None


def gemma(folder: Path, scheme: str) -> Path:
    """Experts that are coded one by one, with room for groups of codes."""
    model = random_model(wide=True, expert_size=64).requires_grad_(False)
    made.save_by_expert(model, scheme, folder, ["re:.*vision.*", "re:.*router.*", "re:.*self_conditioning.*"])
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "NVFP4"])
def test_a_diffusion_gemma_computes_with_its_codes(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = gemma(tmp_path, scheme)
    target = load_target(folder, torch.bfloat16, "cpu")
    with monkeypatch.context() as patch:
        patch.setattr("volley.models.targets.diffusion_gemma.keep_codes", lambda *_: 0)
        large = load_target(folder, torch.bfloat16, "cpu")
    assert isinstance(target, DiffusionGemma)
    assert isinstance(large, DiffusionGemma)
    forwards = [vars(module).get("forward") for module in target.model.modules()]
    assert sum(isinstance(own, CodedExperts) for own in forwards) == 2
    assert sum(isinstance(own, RoundedInputs) for own in forwards) >= 2 * 7 - 1
    assert weight_bytes(target.model) < 0.75 * weight_bytes(large.model)
    prompt, canvas, last = made_up(11)
    mine, theirs = (logits_of(own, prompt, canvas, last) for own in (target, large))
    assert (mine - theirs).norm() < 0.05 * theirs.norm(), "sums of the same weights in bf16"
    params = SamplingParams(
        max_tokens=20, seed=1, ignore_eos=True, temperature=1.0, diffusion=DiffusionParams(max_steps=3)
    )
    prompts = [prompt.tolist(), prompt.tolist()[:5], prompt.tolist()[2:]]
    together = [one.token_ids for one in Engine(target).generate(prompts, params)]
    alone = [next(iter(Engine(target).generate([own], params))).token_ids for own in prompts]
    assert together == alone, "a canvas does not depend on the others"
