"""Initial settings follow from the target's config alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, GptOssConfig, Qwen3Config, Qwen3MoeConfig

from tests.models.gguf.converted import random_model
from tests.models.gguf.files import write_model
from volley import native
from volley.errors import CheckpointError, ConfigError
from volley.train.options import TrainConfig
from volley.train.presets import FAMILIES, learning_rate_for, preset_for, read_preset, training_dtype, with_preset


def test_a_published_shape_comes_out_of_its_targets_config() -> None:
    """Qwen3-8B's drafter: five layers, taps 1, 9, 17, 25 and 33, blocks of 16, 6e-4 (DFlash §A.1)."""
    config = Qwen3Config(hidden_size=4096, num_hidden_layers=36, intermediate_size=12288)
    preset = preset_for(config)
    assert (preset.family, preset.num_layers, preset.block_size) == ("Qwen3", 5, 16)
    assert preset.taps == (1, 9, 17, 25, 33)
    assert (preset.learning_rate, preset.intermediate_size) == (6e-4, 12288)


@pytest.mark.parametrize(
    ("width", "rate", "optimizer"), [(64, 0.029, "muon"), (256, 0.0040, "muon"), (2048, 8.8e-4, "adamw")]
)
def test_narrow_drafters_begin_with_muon_at_a_rate_of_its_own(width: int, rate: float, optimizer: str) -> None:
    preset = preset_for(Qwen3Config(hidden_size=width, num_hidden_layers=8))
    assert preset.optimizer == optimizer
    assert preset.learning_rate == pytest.approx(rate, rel=0.05)


def test_experts_get_a_dense_width_and_shallow_targets_few_layers() -> None:
    experts = preset_for(Qwen3MoeConfig(hidden_size=2048, num_hidden_layers=48, num_experts=128))
    assert (experts.num_layers, experts.intermediate_size) == (8, 3 * 2048)
    assert preset_for(GptOssConfig(num_hidden_layers=24)).block_size == 8
    shallow = preset_for(Gemma3TextConfig(num_hidden_layers=5, hidden_size=64))
    assert (shallow.family, shallow.num_layers, shallow.taps) == ("Gemma", 1, (1, 2))


def test_the_papers_recipe_is_a_preset() -> None:
    """Its sizes hold for any target; what is given goes before them."""
    target = Qwen3Config(hidden_size=256, num_hidden_layers=20)
    given: dict[str, Any] = {"target": "t", "data": ("d",), "out": "o", "preset": "paper"}
    found = with_preset(TrainConfig(**given), target, torch.device("cpu"))
    assert (found.anchors_per_sequence, found.max_length, found.block_size, found.num_layers) == (512, 3072, 16, 5)
    assert (found.optimizer, found.learning_rate, found.loss_decay, found.epochs) == ("adamw", 6e-4, "decay", 6)
    own = with_preset(TrainConfig(**given, anchors_per_sequence=8, epochs=1), target, torch.device("cpu"))
    assert (own.anchors_per_sequence, own.epochs, own.max_length) == (8, 1, 3072)
    usual = with_preset(TrainConfig(**{**given, "preset": None}), target, torch.device("cpu"))
    assert (usual.anchors_per_sequence, usual.num_layers, usual.optimizer) == (None, 2, "muon")
    with pytest.raises(ConfigError, match=r"unknown preset 'papers'.*paper"):
        with_preset(TrainConfig(**{**given, "preset": "papers"}), target, torch.device("cpu"))


def test_the_learning_rate_falls_with_the_width() -> None:
    assert [learning_rate_for(width) for width in (64, 256, 4096)] == [5.9e-3, 2.8e-3, 6e-4]
    assert len({name for family in FAMILIES for name in family.model_types}) == sum(
        len(f.model_types) for f in FAMILIES
    )


def test_a_preset_is_derived_for_whatever_may_be_a_target(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", random_model("llama"), "llama")
    assert read_preset(str(tmp_path / "model.gguf")).family == "Llama"
    assert read_preset("reference-diffusion").family == "Qwen3"
    with pytest.raises(CheckpointError, match=r"is no folder here; give one with config\.json, or a hub name"):
        read_preset(str(tmp_path / "nothing"))


@pytest.mark.parametrize(("width", "on_a_fast_cpu"), [(64, "float32"), (256, "bfloat16"), (1024, "bfloat16")])
def test_products_are_in_the_faster_type(width: int, on_a_fast_cpu: str) -> None:
    cpu = torch.device("cpu")
    slow = "float32" if width <= 512 else "bfloat16"
    assert training_dtype("auto", width, cpu) == getattr(torch, on_a_fast_cpu if native.has_dot_products else slow)
    assert training_dtype("auto", width, torch.device("cuda")) == torch.bfloat16
    assert training_dtype("float32", width, cpu) == torch.float32
