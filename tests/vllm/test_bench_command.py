"""``vllm bench serve``, the command itself, against volley's server."""

import importlib.metadata
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.running import running
from volley.files import REFERENCE

pytest.importorskip("vllm")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vllm_command.py"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    command = [sys.executable, "-c", "import sys; from volley.cli import main; sys.exit(main())", "serve"]
    with running([*command, "--threads", "1", "--block-size", "4"], tmp_path_factory.mktemp("server") / "log") as url:
        yield url


@pytest.mark.parametrize(
    ("backend", "endpoint"),
    [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions"), ("openai-responses", "/v1/responses")],
)
def test_vllms_bench_command_runs_unchanged(
    server: str, tmp_path: Path, backend: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["vllm", "bench", "serve"]
    command += ["--backend", backend, "--endpoint", endpoint, "--base-url", server]
    if backend != "openai-responses":  # which finds the model and its tokenizer by what the server says
        command += ["--model", "volley-reference", "--tokenizer", str(REFERENCE / "target")]
    command += ["--dataset-name", "random", "--ignore-eos"]
    command += ["--temperature", "0", "--top-k", "5", "--repetition-penalty", "1.1"]
    command += ["--random-input-len", "32", "--random-output-len", "16", "--num-prompts", "4"]
    command += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(importlib.metadata, "version", importlib.metadata.version)  # which the script replaces
    runpy.run_path(str(SCRIPT), run_name="__main__")
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (4, 0)
    assert result["total_output_tokens"] == 64, "as many as were asked for"
    assert result["mean_ttft_ms"] > 0
    assert result["spec_decode_num_drafts"] > 0, "it has found the counters of drafts"
    assert 1 <= result["spec_decode_acceptance_length"] <= 4
