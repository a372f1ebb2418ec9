"""The walk of the AitherOS document by its own commands: serve, calibrate over the API, restart, certify."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
import torch

from tests.serve.running import wait_until
from volley import Engine, SamplingParams
from volley.files import REFERENCE
from volley.models.drafters.drafter import Drafter
from volley.models.targets.target import load_tokenizer
from volley.train.data import encode_rows, read_rows

TARGET, DRAFTER = REFERENCE / "target", REFERENCE / "drafter"
BLOCK = 8
PROMPT = [{"role": "user", "content": "Write a Python function to implement a red-black tree"}]
LENGTH = 120
VARIABLES = {
    "VOLLEY_TARGET": str(TARGET),
    "VOLLEY_POLICY": "feedback",
    "VOLLEY_DENOISING_STEPS": "4",
    "VOLLEY_DRAFT_TEMPERATURE": "1.0",
    "VOLLEY_DTYPE": "float32",
    "VOLLEY_THREADS": "1",
    "VOLLEY_PORT": "0",
}


def volley(*words: object) -> None:
    """Run a command to its end."""
    command = [sys.executable, "-m", "volley.cli", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@contextmanager
def server(log: Path, **variables: str) -> Iterator[httpx.Client]:
    """Start ``volley serve`` by variables alone, and stop it by SIGTERM."""
    env = {**os.environ, **VARIABLES, **variables}
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-m", "volley.cli", "serve"], stderr=file, env=env)
    try:
        wait_until(lambda: '"listening"' in log.read_text() or process.poll() is not None)
        url = json.loads(log.read_text().splitlines()[0])["url"]
        with httpx.Client(base_url=url, timeout=120) as client:
            yield client
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def blocks(client: httpx.Client) -> Counter[int]:
    """Decoding cycles so far by tokens verified, anchor included."""
    name = "volley:spec_decode_block_size_total{"
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(name)]
    return Counter({int(line.split('size="')[1].split('"')[0]): int(float(line.split()[-1])) for line in lines})


def answer(client: httpx.Client) -> tuple[list[int], list[int], Counter[int]]:
    """Return the tokens of a greedy answer, the tokens that each cycle gained, and the cycles by tokens verified."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": PROMPT, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True, "stream": True}
    tokens, so_far, before = list[int](), list[int](), blocks(client)
    body |= {"stream_options": usage, "return_token_ids": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                so_far.append(chunk["usage"]["completion_tokens"])
                tokens += next((choice.get("token_ids") or [] for choice in chunk["choices"]), [])
    return tokens, [b - a for a, b in pairwise(so_far) if b > a], blocks(client) - before


def by_the_rule(gains: list[int]) -> tuple[list[int], Counter[int]]:
    """Return the drafted tokens of each cycle if blocks shrink below 60 % and grow above 90 %, and the cycles by size."""
    size, left, drafted = BLOCK - 1, LENGTH - 1, list[int]()
    for gain in gains:
        drafted.append(min(size, left - 1))
        if drafted[-1]:
            rate = (gain - 1) / drafted[-1]
            size = min(max(size + (rate > 0.9) - (rate < 0.6), 1), BLOCK - 1)
        left -= gain
    return drafted, Counter(1 + own for own in drafted)


@pytest.mark.slow
def test_the_documents_commands_from_beginning_to_end(tmp_path: Path) -> None:
    plain = Engine.from_pretrained(TARGET, None, dtype=torch.float32)
    (expected,) = plain.generate([PROMPT], SamplingParams(max_tokens=LENGTH, ignore_eos=True))

    # An uncalibrated drafter costs, and changes nothing: its blocks shrink to one drafted token.
    torch.manual_seed(1)
    Drafter(Drafter.from_pretrained(DRAFTER).config).save_pretrained(tmp_path / "uncalibrated")
    rows = tmp_path / "responses.jsonl"
    with server(tmp_path / "first.log", VOLLEY_DRAFTER=str(tmp_path / "uncalibrated")) as client:
        tokens, gains, sizes = answer(client)
        assert tokens == expected.token_ids
        assert sizes == by_the_rule(gains)[1]
        assert sizes[2] > 0.8 * sizes.total()
        uncalibrated = LENGTH / len(gains)
        assert uncalibrated < 1.3

        # Calibration: 600 answers of the running server to built-in prompts of six kinds, at the document's temperature.
        url = str(client.base_url).rstrip("/")
        collect = ("collect", "--endpoint", f"{url}/v1", "--prompts", "builtin", "--samples", 3)
        volley(*collect, "--temperatures", 0.7, "--max-tokens", 6, "--out", rows)
        answers = list(read_rows([rows]))
        assert len(answers) == 600
        assert len({row["messages"][0]["content"] for row in answers}) == 200
        question, response = answers[0]["messages"]
        (document,) = encode_rows(load_tokenizer(TARGET), answers[:1], 256, set())
        prompt = client.post("/tokenize", json={"messages": [question]}).json()["tokens"]
        text = client.post("/tokenize", json={"prompt": response["content"]}).json()["tokens"]
        assert document.response_start == len(prompt)
        assert document.token_ids.tolist()[: len(prompt) + len(text)] == prompt + text, "the server's own tokens"
    train = ("train", "--target", TARGET, "--data", rows, "--out", tmp_path / "run", "--init", DRAFTER, "--keep-shape")
    volley(
        *train,
        "--max-steps",
        2,
        "--tokens-per-batch",
        256,
        "--dtype",
        "float32",
    )

    # A restart with what was learnt: the same answer in fewer cycles, and blocks that shrink and grow again.
    with server(tmp_path / "second.log", VOLLEY_DRAFTER=str(tmp_path / "run")) as client:
        tokens, gains, sizes = answer(client)
    drafted, by_size = by_the_rule(gains)
    assert tokens == expected.token_ids
    assert sizes == by_size
    assert any(a > b for a, b in pairwise(drafted[:-1]))
    assert any(a < b for a, b in pairwise(drafted[:-1]))
    assert LENGTH / len(gains) > 2 * uncalibrated

    pair = ("--target", TARGET, "--drafter", tmp_path / "run")
    volley("certify", *pair, "--bias", 0.4, "--max-tokens", 8, "--out", tmp_path / "certificate")
    assert json.loads((tmp_path / "certificate" / "certificate.json").read_text())["verdict"] == "lossless"
