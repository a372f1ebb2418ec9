"""``VOLLEY_DRAFTER`` and real vLLM: each way to draft, and a server that is given nothing else."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from typer.testing import CliRunner

from tests.vllm.running import metric, running
from volley import Engine, SamplingParams
from volley.cli import app
from volley.files import REFERENCE
from volley.vllm import activation, register
from volley.vllm.activation import NOTHING, configure

pytest.importorskip("vllm")

PROMPT = "Question: Tom has 3 apples and buys 5 more. How many apples does he have?\nAnswer:"
LENGTH = 24


@pytest.fixture(scope="module")
def expected() -> list[int]:
    engine = Engine.from_pretrained(REFERENCE / "target", drafter=None, dtype=torch.float32, block_size=1)
    (answer,) = engine.generate(PROMPT, SamplingParams(max_tokens=LENGTH, ignore_eos=True))
    return answer.token_ids


@pytest.fixture(autouse=True)
def _clean_up() -> Iterator[None]:
    yield
    gc.collect()  # the engine of a test must be gone before the next one is made


@pytest.mark.parametrize(
    ("drafter", "variables", "method"),
    [
        ("reference-dflash", {}, "dflash"),
        ("reference", {"BLOCK_SIZE": "12"}, "custom_class"),
        ("smollm2-135m", {}, None),
    ],
)
def test_each_way(
    drafter: str,
    variables: dict[str, str],
    method: str | None,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's own method, volley's class, and neither: the answers are the target's, and one line says what drafts."""
    from vllm.engine.arg_utils import EngineArgs

    from .test_engine import Run

    monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config)  # undone after the test
    monkeypatch.setenv("VOLLEY_DRAFTER", drafter)
    for name, value in variables.items():
        monkeypatch.setenv(f"VOLLEY_{name}", value)
    said: list[str] = []

    def watched(args: Any, make: Any) -> Any:
        found = configure(args, make)
        said.append(found[1])
        return found

    monkeypatch.setattr(activation, "configure", watched)
    register()
    run = Run(max_num_seqs=4)
    config: Any = run.llm.llm_engine.vllm_config.speculative_config
    assert (config.method if config else None) == method
    (line,) = said
    assert line.startswith(NOTHING) == (method is None)
    assert run.answer([PROMPT], max_tokens=LENGTH) == [expected]
    if config:
        assert config.num_speculative_tokens == int(variables.get("BLOCK_SIZE", "8")) - 1
        assert run.count("spec_decode_num_accepted_tokens") > 0


def test_the_doctor_repeats_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    target = str(REFERENCE / "target")
    monkeypatch.setenv("VOLLEY_DRAFTER", "reference-dflash")
    found = CliRunner().invoke(app, ["doctor", "--vllm", "--target", target])
    assert found.exit_code == 0
    assert "vLLM's built-in dflash, compiled, drafts with" in found.output
    monkeypatch.setenv("VOLLEY_DRAFTER", "smollm2-135m")
    found = CliRunner().invoke(app, ["doctor", "--vllm", "--target", target])
    assert found.exit_code == 1
    assert found.output.startswith(f"{NOTHING}: the drafter was trained for a target whose hidden size is 576")


def test_a_server_that_is_given_nothing_but_the_variable(
    tmp_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own command finds the plugin by its entry point; no option of it is about speculation."""
    monkeypatch.setenv("VOLLEY_DRAFTER", "reference-dflash")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    script = Path(__file__).parents[2] / "benchmarks" / "vllm_command.py"
    command = [sys.executable, str(script), "serve", str(REFERENCE / "target"), "--served-model-name", "reference"]
    command += [
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "256",
        "--kv-cache-memory-bytes",
        str(2**27),
    ]
    with running(command, tmp_path / "log") as url:
        body = {
            "model": "reference",
            "prompt": PROMPT,
            "max_tokens": LENGTH,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        greedy = httpx.post(f"{url}/v1/completions", json={**body, "temperature": 0}, timeout=120).json()
        assert greedy["choices"][0]["token_ids"] == expected
        assert metric(url, "spec_decode_num_accepted_tokens_total") > 0
        sampled = httpx.post(f"{url}/v1/completions", json={**body, "temperature": 1, "top_k": 5}, timeout=120)
        assert len(sampled.json()["choices"][0]["token_ids"]) == LENGTH
    assert "volley: vLLM's built-in dflash, eagerly, drafts with" in (tmp_path / "log").read_text()
