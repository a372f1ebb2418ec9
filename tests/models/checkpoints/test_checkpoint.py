"""Drafter checkpoints: z-lab's format, and every way in which one can be wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.tiny import drafter_config, random_drafter
from volley.errors import CheckpointError, ConfigError
from volley.models.checkpoints.checkpoint import DrafterConfig, HeadConfig
from volley.models.drafters.drafter import Drafter
from volley.tensors import load_tensors, save_tensors

# As published for Qwen3-8B (docs of the z-lab checkpoint), block size at the top.
PUBLISHED: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def without(key: str, raw: dict[str, Any] = PUBLISHED) -> dict[str, Any]:
    return {k: v for k, v in raw.items() if k != key}


def with_dflash(**changes: Any) -> dict[str, Any]:
    dflash = {**PUBLISHED["dflash_config"], **changes}
    return {**PUBLISHED, "dflash_config": {k: v for k, v in dflash.items() if v is not None}}


def test_a_published_config_is_understood() -> None:
    config = DrafterConfig.from_json(PUBLISHED)
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert (config.block_size, config.mask_token_id, config.num_target_layers) == (16, 151669, 36)
    assert (config.rope_theta, config.rope_scaling, config.sliding_window) == (1_000_000, None, None)


def test_block_size_may_stand_in_either_place() -> None:
    newer = {**without("block_size"), "dflash_config": {**PUBLISHED["dflash_config"], "block_size": 10}}
    assert DrafterConfig.from_json(newer).block_size == 10
    assert DrafterConfig.from_json(PUBLISHED).block_size == 16


@given(
    layers=st.integers(1, 3),
    block_size=st.integers(2, 16),
    taps=st.lists(st.integers(-1, 3), min_size=1, max_size=4),
    theta=st.sampled_from([1e4, 1e6]),
    sliding=st.booleans(),
    scaling=st.sampled_from([None, {"rope_type": "linear", "factor": 2.0}]),
)
def test_configs_survive_a_round_trip(layers, block_size, taps, theta, sliding, scaling) -> None:  # type: ignore[no-untyped-def]
    config = drafter_config(
        num_hidden_layers=layers,
        block_size=block_size,
        target_layer_ids=tuple(taps),
        rope_theta=theta,
        rope_scaling=scaling,
        sliding_window=8 if sliding else None,
        layer_types=("sliding_attention",) * layers if sliding else (),
    )
    assert DrafterConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_sliding_windows_of_newer_checkpoints() -> None:
    config = DrafterConfig.from_json(with_dflash(use_swa=True, swa_window_size=64))
    assert config.layer_types == ("sliding_attention",) * 5
    assert config.sliding_window == 64


def test_an_unused_sliding_window_is_ignored() -> None:
    assert DrafterConfig.from_json({**PUBLISHED, "sliding_window": 4096}).sliding_window is None


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({**PUBLISHED, "hiden_size": 1}, "unknown drafter config key 'hiden_size'; did you mean 'hidden_size'"),
        (with_dflash(target_layers_ids=[1]), "unknown dflash_config key 'target_layers_ids'; did you mean 'target_lay"),
        (with_dflash(target_layer_ids=None), "lacks 'target_layer_ids'; these cannot be guessed"),
        (with_dflash(mask_token_id=None), "lacks 'mask_token_id'"),
        (without("block_size"), "lacks 'block_size'"),
        (without("head_dim", without("num_target_layers")), "lacks 'head_dim', 'num_target_layers'"),
        (without("dflash_config"), "has no 'dflash_config'"),
        (with_dflash(projector_type="maze"), "projector_type is 'maze'; volley reads"),
        (with_dflash(selector_rank=4), "lacks 'selector_top_k'; a selector has a rank and a number of candidates"),
        (with_dflash(conv_kernel_size=2), "conv_kernel_size and conv_group_size belong together"),
        (with_dflash(target_layer_ids=[1, 36]), r"target_layer_ids \[1, 36\] do not all lie in a target of 36 layers"),
        (with_dflash(target_layer_ids=[-2]), "do not all lie in a target"),
        (with_dflash(target_layer_ids=[]), "target_layer_ids is empty"),
        (with_dflash(mask_token_id=151936), "mask_token_id 151936 is outside the vocabulary of 151936"),
        (with_dflash(use_swa=True), "sliding_window is not set"),
        ({**PUBLISHED, "block_size": 1}, "a block needs an anchor and at least one slot"),
        ({**PUBLISHED, "hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({**PUBLISHED, "layer_types": ["full_attention"]}, "layer_types has 1 entries for 5 layers"),
        ({**PUBLISHED, "attention_bias": "yes"}, "attention_bias is 'yes'; it must be true or false"),
    ],
)
def test_wrong_configs_are_named(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DrafterConfig.from_json(raw)


@pytest.mark.parametrize("head", [None, HeadConfig(type="residual", rank=5, candidates=7)])
def test_a_saved_drafter_loads_as_it_was(tmp_path: Path, head: HeadConfig | None) -> None:
    drafter = random_drafter(head=head)
    drafter.save_pretrained(tmp_path)
    loaded = Drafter.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.config == drafter.config
    for name, weight in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight.bfloat16().float()), name
    names = load_tensors(tmp_path / "model.safetensors").keys()
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.q_norm.weight"} < names
    assert not any("embed" in name or "lm_head" in name or "inv_freq" in name for name in names)
    assert sum(name.startswith("head.") for name in names) == (0 if head is None else 3)


def save(folder: Path) -> dict[str, Tensor]:
    random_drafter().save_pretrained(folder)
    return load_tensors(folder / "model.safetensors")


def load_with(folder: Path, weights: dict[str, Tensor]) -> None:
    save_tensors(folder / "model.safetensors", weights)
    Drafter.from_pretrained(folder)


def test_missing_and_unknown_weights_are_named(tmp_path: Path) -> None:
    weights = save(tmp_path)
    weights["layers.0.mlp.bias"] = weights.pop("fc.weight")
    with pytest.raises(CheckpointError, match=r"missing fc\.weight; unknown layers\.0\.mlp\.bias; .* belong together"):
        load_with(tmp_path, weights)


def test_misshapen_weights_are_named(tmp_path: Path) -> None:
    weights = save(tmp_path)
    weights["norm.weight"] = torch.ones(31)
    with pytest.raises(CheckpointError, match=r"norm\.weight has shape \[31\], config\.json says \[32\]"):
        load_with(tmp_path, weights)


@pytest.mark.parametrize("kept", [0, 5, 200, -1])
def test_truncated_weights_are_a_clear_error(tmp_path: Path, kept: int) -> None:
    save(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        Drafter.from_pretrained(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist; give a folder"):
        Drafter.from_pretrained(tmp_path)
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not exist"):
        Drafter.from_pretrained(tmp_path)
