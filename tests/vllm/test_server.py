"""vLLM's OpenAI server with volley's proposer, in processes of its own."""

import json
import sys
from collections.abc import Iterator

import httpx
import pytest
import torch

from tests.vllm.running import metric, running, wait_for
from volley import Engine, SamplingParams
from volley.files import REFERENCE
from volley.vllm import PluginOptions, engine_args

pytest.importorskip("vllm")
openai = pytest.importorskip("openai")

PROMPT = "Question: Tom has 3 apples and buys 5 more. How many apples does he have?\nAnswer:"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    args = engine_args(PluginOptions(drafter=str(REFERENCE / "drafter"), policy="goodput"))
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(REFERENCE / "target")]
    command += ["--served-model-name", "reference", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "1024", "--kv-cache-memory-bytes", str(2**27)]
    command += ["--speculative-config", json.dumps(args["speculative_config"])]
    command += ["--additional-config", json.dumps(args["additional_config"])]
    with running(command, tmp_path_factory.mktemp("server") / "log") as url:
        yield url


def test_the_openai_client_is_answered_and_may_vanish(server: str) -> None:
    engine = Engine.from_pretrained(REFERENCE / "target", drafter=None, dtype=torch.float32, block_size=1)
    (expected,) = engine.generate(PROMPT, SamplingParams(max_tokens=60))
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none")

    def ask() -> str:
        answer = client.completions.create(model="reference", prompt=PROMPT, max_tokens=60, temperature=0)
        return str(answer.choices[0].text)

    assert ask() == expected.text
    chat = client.chat.completions.create(
        model="reference", messages=[{"role": "user", "content": "Hello"}], max_tokens=8, temperature=0, stream=True
    )
    assert sum(len(chunk.choices) for chunk in chat) > 1
    assert metric(server, "spec_decode_num_accepted_tokens_total") > 0

    request = {"model": "reference", "prompt": PROMPT, "max_tokens": 900, "temperature": 0, "ignore_eos": True}
    with httpx.stream("POST", f"{server}/v1/completions", json={**request, "stream": True}, timeout=60) as stream:
        lines = stream.iter_lines()
        for _ in range(4):
            next(lines)
        assert metric(server, "num_requests_running") == 1
    wait_for(lambda: metric(server, "num_requests_running") == 0, 20)
    wait_for(lambda: metric(server, "kv_cache_usage_perc") == 0, 20)
    assert ask() == expected.text
