"""vLLM's server is certified as a black box: alone it passes, with drafts its CPU build's known fault is found, and volley's
plugin repairs that."""

import json
import sys
from pathlib import Path

import pytest

from tests.vllm.running import running
from volley.certify.certificate import Certificate, certify_server
from volley.certify.options import CertifyConfig
from volley.files import REFERENCE

pytest.importorskip("vllm")

PROMPTS = [
    "Question: Tom has 3 apples and buys 5 more. How many apples does he have?\nAnswer:",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "To list all files in a directory",
    "import numpy as np\n\n",
]
QUICK = CertifyConfig(bias=0.1, max_tokens=16, prompts_used=4)

STARTS = 8
DRAFTING = {"method": "dflash", "model": str(REFERENCE / "drafter-dflash"), "num_speculative_tokens": 7}


def certify(log: Path, *arguments: str) -> Certificate:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(REFERENCE / "target")]
    command += ["--served-model-name", "reference", "--dtype", "float32", "--enforce-eager", "--max-logprobs", "20"]
    command += ["--max-model-len", "512", "--kv-cache-memory-bytes", str(2**27), *arguments]
    with running(command, log) as url:
        certificate = certify_server(f"{url}/v1", PROMPTS, QUICK)
    print(json.dumps(certificate.to_json(), indent=1))
    return certificate


def test_vllm_alone_passes(tmp_path: Path) -> None:
    certificate = certify(tmp_path / "log")
    assert [check.name for check in certificate.failed] == []
    assert {"greedy", "sampled", "penalties"} <= {check.name for check in certificate.checks if check.judged}


def test_drafts_pass_with_the_plugin(tmp_path: Path) -> None:
    certificate = certify(tmp_path / "log", "--speculative-config", json.dumps(DRAFTING))
    assert [check.name for check in certificate.failed] == []
    (sampled,) = [check for check in certificate.checks if check.name == "sampled"]
    assert sampled.judged


def test_the_fault_of_sampled_drafts_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification reads temperatures that were never written, so how large the bias is differs from start to start: one of a
    few shows it. In a pass without drafts top_k breaks the server down, which is another fault."""
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    for start in range(STARTS):
        certificate = certify(tmp_path / f"log-{start}", "--speculative-config", json.dumps(DRAFTING))
        failed = {check.name for check in certificate.failed}
        assert {"greedy", "prefix cache", "concurrency 8"} <= {check.name for check in certificate.checks} - failed
        assert certificate.verdict == "not lossless"
        (sampled,) = [check for check in certificate.checks if check.name == "sampled"]
        if sampled.p_value is not None and not sampled.passed:  # its tokens are not the target's; it did not break down
            return
    pytest.fail(
        f"{STARTS} servers drew tokens from the target's distribution; is the fault of vLLM's CPU build repaired?"
    )
