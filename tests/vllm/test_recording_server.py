"""A vLLM server that records, and a training that asks it for features: prompts in chunks, side by side, some preempted."""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.vllm.running import metric, running
from volley.cli import app
from volley.errors import ConfigError, MismatchError
from volley.files import REFERENCE
from volley.train.documents import Document
from volley.train.features import FrozenTarget, OnlineFeatures, ServerFeatures

pytest.importorskip("vllm")

TAPS = (1, 9, 17)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "volley.cli", "serve", "--engine", "vllm", str(REFERENCE / "target")]
    command += ["--record", str(folder / "features"), "--taps", "1,9,17", "--record-final"]
    command += ["--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", str(2**27)]
    command += ["--block-size", "32", "--num-gpu-blocks-override", "14", "--max-num-seqs", "8"]
    command += ["--max-num-batched-tokens", "64", "--long-prefill-token-threshold", "16"]
    with running(command, folder / "log") as url:
        yield url


def make_rows(count: int) -> list[dict[str, list[int]]]:
    rng = random.Random(0)
    return [
        {
            "prompt_token_ids": rng.choices(range(100, 8000), k=rng.randint(1, 80)),
            "response_token_ids": rng.choices(range(100, 8000), k=rng.randint(20, 120)),
        }
        for _ in range(count)
    ]


def test_features_are_those_of_the_target_here(server: str, folder: Path) -> None:
    target = FrozenTarget(str(REFERENCE / "target"), torch.float32, torch.device("cpu"))
    rows = [row["prompt_token_ids"] + row["response_token_ids"] for row in make_rows(12)]
    documents = [Document(torch.tensor(row, dtype=torch.int32), 1) for row in rows]
    documents.append(Document(torch.arange(100, 355, dtype=torch.int32), 1))  # as long as the server takes
    local = OnlineFeatures(target, TAPS, with_final=True)

    def ask(layer_ids: tuple[int, ...] = TAPS, longest: int = 255) -> Any:
        return ServerFeatures(target, layer_ids, True, f"{server}/v1", folder / "features", longest)

    found = ask()(documents, range(len(documents)))
    expected = local(documents, range(len(documents)))
    assert metric(server, "num_preemptions_total") > 0
    assert metric(server, "request_success_total") == len(documents), "nothing was asked for twice"
    for row, document in enumerate(documents):
        for one, other in ((found.taps, expected.taps), (found.final, expected.final)):
            ours, theirs = other[row, : len(document)], one[row, : len(document)]
            torch.testing.assert_close(theirs, ours, rtol=2**-7, atol=1e-3 * float(ours.abs().max()))
    assert len(list((folder / "features").iterdir())) == len(documents)
    with pytest.raises(MismatchError, match="with --taps 1,9,17"):
        ask(layer_ids=(1, 9))(documents[:1], [0])
    with pytest.raises(ConfigError, match="takes 255"):
        ask(longest=256)


def test_a_training_that_asks_it(server: str, folder: Path, tmp_path: Path) -> None:
    """It begins from random weights: the server has no layers of the target to copy."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows(16)))
    losses: list[list[float]] = []
    for out, source in (("here", []), ("there", ["--feature-server", f"{server}/v1"])):
        source += ["--feature-dir", str(folder / "features")] if source else []
        options = ["--target", str(REFERENCE / "target"), "--data", str(tmp_path / "rows.jsonl"), "--taps", "1,9,17"]
        options += ["--max-steps", "3", "--log-steps", "1", "--tokens-per-batch", "400", "--num-layers", "1"]
        options += ["--soft-targets", "0.5", "--eval-prompts", "0", "--eval-share", "0", "--dtype", "float32"]
        options += ["--init", "random"]
        result = CliRunner().invoke(app, ["train", *options, "--out", str(tmp_path / out), *source])
        assert result.exit_code == 0, result.output
        log = [json.loads(line) for line in (tmp_path / out / "log.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in log if row["kind"] == "train"])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
