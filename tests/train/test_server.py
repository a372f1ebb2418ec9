"""Features from a server that records. The server is a stub that records with the same target: what is read must be the same."""

import json
import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from volley.errors import CheckpointError, ConfigError, EndpointError, MismatchError
from volley.models.drafters.recorded import Recorded, recorded_path, save_recorded
from volley.train.documents import Document
from volley.train.features import FrozenTarget, OnlineFeatures, ServerFeatures
from volley.train.loop import train
from volley.train.options import TrainConfig
from volley.vllm import features as server_module

from ..conftest import TinyPair
from .runs import tiny_run, weights

TAPS = (0, 2)


class Stub:
    """Completions and models as vLLM answers them; ``record`` is called for every prompt."""

    def __init__(self, record: Callable[[list[int]], None]) -> None:
        self.record = record
        self.prompts: list[list[int]] = []
        self.status = 200
        self.models: dict[str, Any] = {"data": [{"id": "tiny", "max_model_len": 1024}]}
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.answer(stub.models)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.path == "/v1/completions"
                assert (body["model"], body["max_tokens"]) == ("tiny", 1)
                for prompt in body["prompt"] if stub.status == 200 else []:
                    stub.prompts.append(prompt)
                    stub.record(prompt)
                self.answer({"choices": []})

            def answer(self, body: dict[str, Any]) -> None:
                self.send_response(stub.status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))

    def __enter__(self) -> "Stub":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture(scope="module")
def target(tiny_pair: TinyPair) -> FrozenTarget:
    return FrozenTarget(str(tiny_pair.target), torch.float32, torch.device("cpu"))


@pytest.fixture
def stub(target: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setattr(server_module, "LOOKS", (0.0, 0.0))
    local = OnlineFeatures(target, TAPS, with_final=True)
    lock = threading.Lock()

    def record(prompt: list[int]) -> None:
        with lock:
            features = local([document(prompt)], [0])
            assert features.final is not None
            taps, final = features.taps[0].bfloat16(), features.final[0].bfloat16()
            save_recorded(recorded_path(tmp_path / "shared", prompt), Recorded(TAPS, taps, final))

    with Stub(record) as running:
        yield running


def document(token_ids: Sequence[int]) -> Document:
    return Document(torch.tensor(token_ids, dtype=torch.int32), 1)


def source(stub: Stub, target: FrozenTarget, folder: Path, with_final: bool = True, **changes: Any) -> ServerFeatures:
    options = {"layer_ids": TAPS, "url": stub.url, "directory": folder / "shared", "longest": 9, **changes}
    return ServerFeatures(target, with_final=with_final, **options)


def test_what_is_read_is_what_the_target_computes(stub: Stub, target: FrozenTarget, tmp_path: Path) -> None:
    rng = random.Random(0)
    for with_final in (True, False):
        local, remote = OnlineFeatures(target, TAPS, with_final), source(stub, target, tmp_path, with_final)
        leftover = set((tmp_path / "shared").glob("*"))
        for _ in range(10):
            lengths = [rng.randint(2, 12) for _ in range(rng.randint(1, 5))]
            documents = [document([rng.randrange(260) for _ in range(length)]) for length in lengths]
            documents += rng.choices(documents, k=rng.randint(0, 2))  # some are the same
            expected, found = (ask(documents, range(len(documents))) for ask in (local, remote))
            assert found.taps.shape == expected.taps.shape
            assert (found.final is not None) == with_final
            files = {recorded_path(tmp_path / "shared", one.token_ids) for one in documents}
            assert files >= set((tmp_path / "shared").iterdir()) - leftover, "what was read before is removed"
            for row, one in enumerate(documents):
                assert_rounded(found.taps[row, : len(one)], expected.taps[row, : len(one)])
                if found.final is not None and expected.final is not None:
                    assert_rounded(found.final[row, : len(one)], expected.final[row, : len(one)])


def assert_rounded(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=2**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_that_runs_elsewhere_keeps_its_ends_and_its_identity(tiny_pair: TinyPair, dtype: torch.dtype) -> None:
    whole, ends = (
        FrozenTarget(str(tiny_pair.target), dtype, torch.device("cpu"), with_layers=layers) for layers in (True, False)
    )
    assert ends.fingerprint == whole.fingerprint
    assert torch.equal(ends.head, whole.head)
    assert torch.equal(ends.embed(torch.arange(9)), whole.embed(torch.arange(9)))
    assert {name for name, _ in ends.model.named_parameters()} == {"model.embed_tokens.weight", "model.norm.weight"}


@pytest.mark.slow
@pytest.mark.parametrize("features", ["online", "cache"])
def test_training_with_a_server_is_training_with_the_target(
    stub: Stub, tiny_pair: TinyPair, tmp_path: Path, features: str
) -> None:
    options = tiny_run(tiny_pair.target, tmp_path, soft_targets=0.5, features=features, init="random")
    asking = {**options, "feature_server": stub.url, "feature_dir": str(tmp_path / "shared")}
    found = []
    for out, chosen in (("here", options), ("there", asking)):
        train(TrainConfig(**{**chosen, "out": str(tmp_path / out)}))
        found.append(weights(tmp_path / out))
        report = json.loads((tmp_path / out / "training_report.json").read_text())
        found[-1]["held-out loss"] = torch.tensor(report["held_out"]["loss"])
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, atol=2e-3, rtol=0.02, msg=name)
    assert stub.prompts


@pytest.mark.slow
def test_when_the_server_is_gone_the_run_goes_on_with_another(
    stub: Stub, target: FrozenTarget, tiny_pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = tiny_run(tiny_pair.target, tmp_path, log_steps=1, save_steps=1, max_steps=6, epochs=99, eval_share=0.0)
    options["feature_dir"] = str(tmp_path / "shared")
    record = stub.record

    def last(prompt: list[int]) -> None:
        if "step 4 " in capsys.readouterr().out:
            stub.status = 503
        record(prompt)

    stub.record = last
    with pytest.raises(EndpointError, match="HTTP 503"):
        train(TrainConfig(**options, feature_server=stub.url))
    left = list((tmp_path / "shared").iterdir())
    assert left, "what a run was asking for when it ended"
    for path in left:
        path.write_bytes(b"of another target")
    with Stub(record) as moved:
        train(TrainConfig(**options, feature_server=moved.url))
    assert "going on from step 4" in capsys.readouterr().out
    with Stub(lambda _: None) as forgetful, pytest.raises(EndpointError, match="there are no features"):
        source(forgetful, target, tmp_path)([document(stub.prompts[0])], [0])


def test_processes_that_ask_for_the_same_document_all_find_it(
    stub: Stub, target: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "LOOKS", (0.0, 0.01, 0.1))
    everyone = threading.Barrier(4)
    found: list[torch.Tensor] = []

    def ask() -> None:
        asking = source(stub, target, tmp_path)
        for first in range(5, 10):
            everyone.wait(10)
            features = asking([document([first, 6, 7]), document([7, first])], [0, 1])
            found.append(features.taps)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20


def test_a_server_that_is_not_one(stub: Stub, target: FrozenTarget, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="write it like http://127"):
        source(stub, target, tmp_path, url="localhost:8000")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        command = rf"volley serve --engine vllm TARGET --record {tmp_path}/shared --taps 0,2 --record-final"
        with pytest.raises(EndpointError, match=rf"does not answer \(ConnectError .*start it with `{command}`"):
            source(stub, target, tmp_path, url=url)
    stub.models = {"object": "list"}
    with pytest.raises(EndpointError, match="lists no model"):
        source(stub, target, tmp_path)
    stub.status = 404
    with pytest.raises(EndpointError, match=r"HTTP 404.*must be vLLM's OpenAI server"):
        source(stub, target, tmp_path)


def test_a_document_that_is_too_long_for_the_server(stub: Stub, target: FrozenTarget, tmp_path: Path) -> None:
    source(stub, target, tmp_path, longest=1023)
    with pytest.raises(ConfigError, match=r"has 1024 tokens and http.* takes 1023; start it with --max-model-len 1025"):
        source(stub, target, tmp_path, longest=1024)


def test_what_is_recorded_elsewhere_or_otherwise(stub: Stub, target: FrozenTarget, tmp_path: Path) -> None:
    def ask(**changes: Any) -> None:
        source(stub, target, tmp_path, **changes)([document([5, 6, 7])], [0])

    with pytest.raises(MismatchError, match=r"records layers \[0, 2\], and .* taps \[1\].*with --taps 0,2"):
        ask(layer_ids=(1,))
    with pytest.raises(EndpointError, match=r"answers, and there are no features in .*/other.*must see the folder"):
        ask(directory=tmp_path / "other")
    path = recorded_path(tmp_path / "shared", [5, 6, 7])
    stub.record = lambda _: save_recorded(path, Recorded(TAPS, torch.zeros(3, 64), None))
    with pytest.raises(MismatchError, match=r"does not record the final states.*--record-final"):
        ask()
    stub.record = lambda _: save_recorded(path, Recorded(TAPS, torch.zeros(3, 2 * 48), None))
    with pytest.raises(MismatchError, match="serve the same target"):
        ask(with_final=False)

    def rubbish(_: list[int]) -> None:
        path.write_bytes(b"rubbish")

    stub.record = rubbish
    with pytest.raises(CheckpointError, match="not a file of recorded features"):
        ask()
    stub.status = 500
    with pytest.raises(EndpointError, match="HTTP 500"):
        ask()


def test_what_the_server_lost_is_asked_for_again(stub: Stub, target: FrozenTarget, tmp_path: Path) -> None:
    record, dropped = stub.record, []

    def forgetful(prompt: list[int]) -> None:
        if prompt[0] == 5 and prompt not in dropped:
            dropped.append(prompt)
        else:
            record(prompt)

    stub.record = forgetful
    source(stub, target, tmp_path)([document([5, 6, 7]), document([6, 7])], [0, 1])
    assert stub.prompts == [[5, 6, 7], [6, 7], [5, 6, 7]]
