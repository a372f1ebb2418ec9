"""Every architecture: same tokens and logits as transformers."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.gguf.converted import EVERY, random_model
from tests.models.gguf.files import VOCAB, write_matrices, write_model
from tests.tiny import greedy
from volley import Engine, SamplingParams
from volley.errors import CheckpointError, UnsupportedModelError
from volley.models.gguf.architectures import ARCHITECTURES
from volley.models.gguf.codes import describe
from volley.models.gguf.file import GGUFFile
from volley.models.gguf.model import load_model, open_model
from volley.models.layers.products import codes_of
from volley.models.targets.target import Target
from volley.native import blocks
from volley.native.packing import Codes, StoredBlocks

PROMPTS = [[5, 9, 17, 33, 8], list(range(40, 75))]


def decoded(stored: Codes | StoredBlocks) -> torch.Tensor:
    if isinstance(stored, StoredBlocks):
        return blocks.decode(stored.format.name, stored.blocks, torch.float32)
    return stored.dense()


def test_every_architecture_is_tested() -> None:
    assert {architecture for architecture, *_ in EVERY.values()} == ARCHITECTURES.keys()


@pytest.mark.parametrize("case", EVERY)
def test_logits_and_weights_are_transformers(tmp_path: Path, case: str) -> None:
    model = random_model(case)
    loaded = load_model(write_model(tmp_path / "model.gguf", model, EVERY[case][0]), torch.float32)
    assert type(loaded) is type(model)
    for name, weight in model.state_dict().items():
        assert torch.allclose(loaded.state_dict()[name], weight, atol=1e-6), name
    loaded.load_state_dict(model.state_dict())  # where one was added and taken away again, the last bit differs
    ids = torch.randint(VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(loaded(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY)
def test_answers_are_transformers(tmp_path: Path, case: str) -> None:
    model = random_model(case)
    path = write_model(tmp_path / "model.gguf", model, EVERY[case][0])
    engine = Engine(Target(load_model(path, torch.float32)))
    answers = [result.token_ids for result in engine.generate(PROMPTS, SamplingParams(max_tokens=20))]
    assert answers == [greedy(model, prompt, 20) for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY)
def test_codes_are_those_of_the_file(tmp_path: Path, case: str) -> None:
    """Whatever was done to the order of their rows. Weights whose columns are in another order are rounded."""
    path = write_matrices(tmp_path / "model.gguf", random_model(case), EVERY[case][0], "Q8_0")
    model, unread = open_model(path, torch.bfloat16, "int8")
    dense, found = load_model(path, torch.float32), 0
    for name, module in model.named_modules():
        if name.endswith(("in_proj_qkvz", "linear_attn.out_proj", "kv_b_proj")):
            unread.fill(module, coded=False)
            if not module.weight.is_meta and hasattr(module, "stored_codes"):
                rounded, weight = module.stored_codes().dense(), dense.get_submodule(name).weight
                assert (rounded - weight).abs().max() < 0.01 * weight.abs().max()
                continue
        if source := getattr(module, "stored_codes", None):
            stored, found = source().rows(slice(None)), found + 1
            assert torch.equal(decoded(stored), dense.get_submodule(name).weight), name
    assert found > 10


def test_layers_that_predict_further_tokens_are_not_used(tmp_path: Path) -> None:
    model = random_model("qwen35")
    further = {"blk.5.nextn.eh_proj.weight": torch.ones(64, 128), "blk.5.attn_norm.weight": torch.ones(64)}
    keys = {"block_count": 6, "nextn_predict_layers": 1}
    loaded = load_model(write_model(tmp_path / "model.gguf", model, "qwen35", keys=keys, extra=further), torch.float32)
    assert loaded.state_dict().keys() == model.state_dict().keys()


def test_a_file_of_before_latent_attention_was_absorbed(tmp_path: Path) -> None:
    """The file holds keys and values of each head as one weight, and the sizes of heads under other names."""
    model = random_model("deepseek2")
    own, weights = model.config, model.state_dict()
    names = [f"blk.{layer}.attn_{part}_b.weight" for layer in range(own.num_hidden_layers) for part in "kv"]
    joined = {
        f"blk.{layer}.attn_kv_b.weight": weights[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
        for layer in range(own.num_hidden_layers)
    }
    keys = {
        "attention.head_count_kv": own.num_attention_heads,
        "attention.key_length": own.qk_nope_head_dim + own.qk_rope_head_dim,
        "attention.value_length": own.v_head_dim,
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
    }
    further = {**dict.fromkeys(names), **joined}
    loaded = load_model(
        write_model(tmp_path / "model.gguf", model, "deepseek2", keys=keys, extra=further), torch.float32
    )
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("is_joined", [True, False])
def test_keys_and_values_of_latents_are_rounded_where_they_lie_apart(tmp_path: Path, is_joined: bool) -> None:
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    model = random_model("deepseek2", **sizes)
    weights, further = model.state_dict(), dict[str, Any]()
    for layer in range(model.config.num_hidden_layers if is_joined else 0):
        further |= dict.fromkeys(f"blk.{layer}.attn_{part}_b.weight" for part in "kv")
        further[f"blk.{layer}.attn_kv_b.weight"] = weights[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
    path = write_matrices(tmp_path / "model.gguf", model, "deepseek2", "Q8_0", extra=further)
    file = GGUFFile(path)
    assert ("rounded" in describe(file, "int8")) == (not is_joined)
    opened, unread = open_model(path, torch.bfloat16, "int8")
    layer = opened.get_submodule("model.layers.1.self_attn.kv_b_proj")
    unread.fill(layer, coded=False)
    (found, _), *_ = codes_of([layer], "int8")
    own = decoded(found.rows(slice(0, 256)))
    dense = load_model(path, torch.float32).get_parameter("model.layers.1.self_attn.kv_b_proj.weight")
    assert torch.equal(own, dense) == is_joined
    assert (own - dense).abs().max() < 0.01 * dense.abs().max()


@pytest.mark.parametrize(
    ("case", "keys", "message"),
    [
        (
            "granite",
            {"rope.scaling.finetuned": False},
            r"granite\.rope\.scaling\.finetuned is False, which is not supported",
        ),
        (
            "gemma3",
            {"attn_logit_softcapping": 30.0},
            r"gemma3\.attn_logit_softcapping is 30\.0, .* does not read this key",
        ),
        ("qwen35", {"attention.value_length": 16}, r"attention\.value_length is 16 with heads of 32; only equal sizes"),
        ("olmo2", {"attention.head_count_kv": [2, 2, 1]}, r"head_count_kv differs between layers \(\[2, 2, 1\]\)"),
        ("smollm3", {"expert_weights_scale": 2.0}, r"smollm3\.expert_weights_scale is 2\.0"),
    ],
)
def test_what_is_not_read_is_refused(tmp_path: Path, case: str, keys: dict[str, Any], message: str) -> None:
    path = write_model(tmp_path / "model.gguf", random_model(case), EVERY[case][0], keys=keys)
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(path, torch.float32)


@pytest.mark.parametrize(
    ("case", "tensor"),
    [("phi3 for long contexts", "rope_factors_short.weight"), ("qwen2moe", "blk.0.ffn_down_exps.weight")],
)
def test_a_tensor_that_the_config_needs_is_missed(tmp_path: Path, case: str, tensor: str) -> None:
    path = write_model(tmp_path / "model.gguf", random_model(case), EVERY[case][0], extra={tensor: None})
    with pytest.raises(CheckpointError, match=f"has no tensor {re.escape(tensor)}; fetch or convert it again"):
        load_model(path, torch.float32)
