"""What is said of exactness before a target is loaded is what the engine finds once it is."""

import logging
from pathlib import Path

import pytest
import torch
from transformers import Cohere2Config, StableLmConfig, StableLmForCausalLM
from typer.testing import CliRunner

from tests import hybrid
from tests.conftest import byte_tokenizer
from tests.models.families import FUSED, OTHERS
from tests.models.gguf.files import bpe_tokenizer, random_model, write_model
from tests.tiles import needs_kernels
from tests.tiny import SHAPE, VOCAB
from volley import Engine
from volley.cli import app
from volley.engine.exactness import foresee_exactness
from volley.files import REFERENCE
from volley.models.diagnosis import diagnose

FAMILIES = {**FUSED, **OTHERS}


@needs_kernels
def test_the_bundled_target_is_exact(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "volley"):
        engine = Engine.from_pretrained()
    assert engine.inexact is None
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
    assert engine.inexact is not None
    assert f"answers are not exact: {engine.inexact}" in caplog.text


@needs_kernels
def test_a_quantised_file_and_what_it_becomes(tmp_path: Path) -> None:
    model = random_model("qwen3", hidden_size=64, intermediate_size=128, head_dim=16)
    path = write_model(tmp_path / "model.gguf", model, "qwen3", "Q4_0", tokenizer=bpe_tokenizer())
    found = diagnose(path)
    assert (found.title, found.problems) == ("a target of type qwen3", [])
    assert found.facts["weights"].startswith("Q4_0 exact in int4, groups of 32 where volley's kernels run")
    assert foresee_exactness(path) == "yes, with int4 weights"
    assert Engine.from_pretrained(path).inexact is None
