"""A family of diffusion models is added by a package's entry point alone, and its canvases are denoised by its rules."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from volley.errors import ConfigError
from volley.files import REFERENCE
from volley.models.targets.families import SDAR, register_family

PAGE = (Path(__file__).parents[3] / "docs" / "extending.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"^## A family of diffusion models\n.*?^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny random model of the type ``llada2_moe``."""
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE / "target")
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    torch.manual_seed(0)
    folder = tmp_path / "llada2"
    Qwen3ForCausalLM(Qwen3Config(**shape, intermediate_size=32, vocab_size=len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    named = {"model_type": "llada2_moe", "architectures": ["LLaDA2ForCausalLM"], "mask_token_id": 3, "block_length": 8}
    (folder / "config.json").write_text(json.dumps(config | named))
    return folder


def generate(folder: Path, python_path: Path) -> subprocess.CompletedProcess[str]:
    code = "from volley.cli import main; main()"
    command = [sys.executable, "-c", code, "generate", "How?", "--target", str(folder), "--max-tokens", "12"]
    path = os.pathsep.join([str(python_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_an_installed_package_adds_a_family_to_the_commands(checkpoint: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "llada2_door-1.dist-info").mkdir(parents=True)
    before = generate(checkpoint, package)
    assert before.returncode != 0
    assert "Register a class for it" in before.stderr
    (package / "llada2_door.py").write_text(EXAMPLE)
    (package / "llada2_door-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: llada2-door\nVersion: 1\n"
    )
    (package / "llada2_door-1.dist-info" / "entry_points.txt").write_text(
        "[volley.families]\nllada2 = llada2_door:register\n"
    )
    after = generate(checkpoint, package)
    assert after.returncode == 0, after.stderr
    assert "tokens a pass" in after.stderr, "canvases are denoised"


def test_a_family_of_volleys_own_is_not_replaced() -> None:
    with pytest.raises(ConfigError, match="register yours under its own model_type"):
        register_family("SDAR", SDAR)
