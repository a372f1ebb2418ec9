"""Exactness that is foreseen before a target is loaded equals what the engine finds then."""

import logging
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    GemmaConfig,
    SmolLM3Config,
    StableLmConfig,
    StableLmForCausalLM,
)
from typer.testing import CliRunner

from tests import hybrid
from tests.conftest import byte_tokenizer
from tests.models.families import COMMON, FUSED, OTHERS
from tests.models.gguf.converted import random_model
from tests.models.gguf.files import bpe_tokenizer, write_matrices, write_model
from tests.tiles import needs_kernels
from tests.tiny import SHAPE, VOCAB
from volley import Engine
from volley.cli import app
from volley.engine.exactness import foresee_exactness
from volley.files import REFERENCE
from volley.models.description import Diagnosis, describe_target
from volley.models.diagnosis import diagnose

FAMILIES = {**FUSED, **OTHERS}


@needs_kernels
def test_the_bundled_target_is_exact(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "volley"):
        engine = Engine.from_pretrained()
    assert engine.core.inexact is None
    assert "answers are exact: " in caplog.text
    assert foresee_exactness(REFERENCE / "target") == "yes, with bf16 weights"


@pytest.mark.parametrize(("shared", "begins"), [(2, "no: "), (3, "not known before it is loaded (")])
def test_another_family_is_not(tmp_path: Path, shared: int, begins: str) -> None:
    config = Cohere2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=shared,
        head_dim=16,
        architectures=["Cohere2ForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    assert foresee_exactness(tmp_path).startswith(begins)


def test_recurrent_layers_are_not(tmp_path: Path) -> None:
    hybrid.CONFIGS["lfm2"]().save_pretrained(tmp_path)
    assert foresee_exactness(tmp_path) == "no: PyTorch's operations run its recurrent layers"


@needs_kernels
@pytest.mark.parametrize(("model_type", "begins"), [("qwen3_moe", "yes, with bf16"), ("qwen2_moe", "no: not all of ")])
def test_experts_are_unless_some_are_shared(tmp_path: Path, model_type: str, begins: str) -> None:
    FAMILIES[model_type]().save_pretrained(tmp_path)
    assert foresee_exactness(tmp_path).startswith(begins)


def test_layers_that_would_be_refused_are_a_problem(tmp_path: Path) -> None:
    config = StableLmConfig(**SHAPE, vocab_size=260, num_hidden_layers=2)
    StableLmForCausalLM(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    found = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert found.exit_code == 1
    assert "wrong: StableLmAttention does not get the keywords" in found.stdout


def test_in_fp32_the_log_says_why_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "volley"):
        engine = Engine.from_pretrained(dtype=torch.float32, device="cpu")
    assert engine.core.inexact is not None
    assert f"answers are not exact: {engine.core.inexact}" in caplog.text


@needs_kernels
def test_a_quantised_file_and_what_it_becomes(tmp_path: Path) -> None:
    model = random_model("qwen3", hidden_size=64, intermediate_size=128, head_dim=16)
    path = write_model(tmp_path / "model.gguf", model, "qwen3", "Q4_0", tokenizer=bpe_tokenizer())
    found = diagnose(path)
    assert (found.title, found.problems) == ("a target of type qwen3", [])
    assert found.facts["weights"].startswith("Q4_0 exact in int4, groups of 32 where volley's kernels run")
    assert foresee_exactness(path) == "yes, with int4 weights"
    assert Engine.from_pretrained(path).core.inexact is None


def tried(path: Path) -> Diagnosis:
    """Description by the config's class and by trying layers."""
    found = diagnose(path)
    found.facts["answers are exact to the bit"] = foresee_exactness(path)
    return found


@needs_kernels
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
def test_a_header_alone_says_the_same_as_trying_layers(tmp_path: Path, family: str, kind: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, **({} if family == "qwen2" else {"head_dim": 32})}
    path = write_model(tmp_path / "model.gguf", random_model(family, **sizes), family, kind)
    assert describe_target(path) == tried(path)


CONVERTED = {
    "gemma": lambda: GemmaConfig(**COMMON, head_dim=16),
    "gemma2": FUSED["gemma2"],
    "gemma3": FUSED["gemma3_text"],
    "smollm3": lambda: SmolLM3Config(**{**COMMON, "num_hidden_layers": 5}),
    "granite": FUSED["granite"],
    "olmo2": FUSED["olmo2"],
    "olmo3": FUSED["olmo3"],
}


@needs_kernels
@pytest.mark.parametrize("family", CONVERTED)
def test_so_do_headers_of_other_families(tmp_path: Path, family: str) -> None:
    model = AutoModelForCausalLM.from_config(CONVERTED[family]())
    architecture = "olmo2" if family == "olmo3" else family
    path = write_matrices(tmp_path / "model.gguf", model, architecture, "Q8_0")
    assert describe_target(path) == tried(path)


@pytest.mark.parametrize("changes", [{"intermediate_size": 96}, {"hidden_size": 64, "head_dim": 24}])
def test_layers_of_unusual_sizes_are_tried(tmp_path: Path, changes: dict[str, int]) -> None:
    model = random_model("qwen3", **{"intermediate_size": 128, "head_dim": 16, **changes})
    assert describe_target(write_model(tmp_path / "model.gguf", model, "qwen3")) is None


def test_a_faulty_file_is_left_to_the_diagnosis(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", random_model("qwen3", head_dim=16), "qwen3")
    path.write_bytes(path.read_bytes()[:200])
    assert describe_target(path) is None
