"""llama.cpp's server is certified as a black box, drafting and not."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.llamacpp.running import EXACT, SERVER, llama_server
from tests.models.gguf.files import write_model
from volley.certify.certificate import Certificate, certify_server
from volley.certify.options import CertifyConfig
from volley.files import REFERENCE
from volley.models.drafters.export import export
from volley.tensors import load_tensors, save_tensors

pytestmark = [
    pytest.mark.llamacpp,
    pytest.mark.skipif(not SERVER.exists(), reason="llama.cpp is not built; run make peers"),
]
PROMPTS = [
    "Question: Tom has 3 apples and buys 5 more. How many apples does he have?\nAnswer:",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "To list all files in a directory",
    "import numpy as np\n\n",
]
QUICK = CertifyConfig(bias=0.1, max_tokens=20, prompts_used=4)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The bundled target and its drafter in fp32."""
    folder = tmp_path_factory.mktemp("files")
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE / "target")
    model = AutoModelForCausalLM.from_pretrained(REFERENCE / "target", dtype=torch.float32)
    target = write_model(folder / "target.gguf", model, "qwen3", tokenizer=tokenizer)
    tensors = load_tensors(REFERENCE / "drafter-dflash" / "model.safetensors")
    (folder / "drafter").mkdir()
    save_tensors(folder / "drafter" / "model.safetensors", {key: tensor.float() for key, tensor in tensors.items()})
    (folder / "drafter" / "config.json").write_bytes((REFERENCE / "drafter-dflash" / "config.json").read_bytes())
    export(folder / "drafter", folder / "drafter.gguf", "gguf", target=str(target))
    return target, folder / "drafter.gguf"


def certify(log: Path, *arguments: str) -> Certificate:
    with llama_server(log, *arguments, *EXACT) as client:
        said: list[str] = []
        certificate = certify_server(f"{client.base_url}/v1", PROMPTS, QUICK, say=said.append)
    print("\n".join(said))
    return certificate


def test_a_server_that_drafts_passes(files: tuple[Path, Path], tmp_path: Path) -> None:
    target, drafter = files
    drafting = ["-md", str(drafter), "--spec-type", "draft-dflash", "--spec-draft-n-max", "7"]
    certificate = certify(tmp_path / "log", "-m", str(target), *drafting)
    assert [check.name for check in certificate.failed] == []
