"""The benchmark against llama.cpp: what it reads from a server and makes of it. One test runs llama.cpp if it is built."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks import llama_cpp
from benchmarks.contenders import Answer
from benchmarks.llama_cpp import Contender, Measured, Setting, passages
from benchmarks.llama_peer import BINARIES, LlamaRow, Server

built = pytest.mark.skipif(not (BINARIES / "llama-server").exists(), reason="llama.cpp is not built: make peers")


class Completions(BaseHTTPRequestHandler):
    """A stand-in for llama-server: five tokens, two of them accepted from drafts."""

    bodies: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        timings = {"predicted_n": 5, "predicted_ms": 20.0, "draft_n": 6, "draft_n_accepted": 2}
        reply = {"tokens": [body["prompt"][0]] * 5, "timings": timings}
        if body["n_predict"] == 0:
            reply = {"error": {"message": "nothing to predict"}}
        self.send_response(400 if "error" in reply else 200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def bodies() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def stand_in(bodies: list[dict[str, Any]]) -> Iterator[Server]:
    handler = type("Handler", (Completions,), {"bodies": bodies})
    with HTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        server = Server(f"http://127.0.0.1:{http.server_port}", 1)
        yield server
        server.client.close()
        http.shutdown()
        thread.join()


def test_an_answer_of_the_server(stand_in: Server, bodies: list[dict[str, Any]]) -> None:
    answer = stand_in.ask([[7, 8], [9]], 5, 0.0, 3)
    assert answer.tokens == [[7] * 5, [9] * 5]
    assert (answer.gained, answer.passes, answer.decode_seconds) == (8, 4, 0.02)
    assert {body["seed"] for body in bodies} == {3, 4}
    assert all(body["cache_prompt"] is False and body["samplers"] == ["temperature"] for body in bodies)


def test_a_refusal_is_reported(stand_in: Server) -> None:
    with pytest.raises(SystemExit, match=r"answered 400: .*nothing to predict"):
        stand_in.ask([[7]], 0, 0.0, 0)


@pytest.mark.parametrize(
    ("text", "row", "arguments"),
    [
        ("bf16", LlamaRow("bf16"), []),
        ("q4_0+ngram-simple", LlamaRow("q4_0", "ngram-simple"), ["--spec-type", "ngram-simple"]),
        (
            "bf16+dflash:3",
            LlamaRow("bf16", "dflash", 3),
            ["--spec-type", "draft-dflash", "--spec-draft-model", "d.gguf", "--spec-draft-n-max", "3"],
        ),
        (
            "q8_0+dspark:5@16384",
            LlamaRow("q8_0", "dspark", 5, 16384),
            ["--spec-type", "draft-dspark", "--spec-draft-model", "d.gguf", "--spec-draft-n-max", "5"],
        ),
    ],
)
def test_rows_of_llama_cpp(text: str, row: LlamaRow, arguments: list[str]) -> None:
    assert LlamaRow.parse(text) == row
    assert row.arguments(Path("d.gguf")) == arguments


def test_rows_of_volley() -> None:
    rows = llama_cpp.parse_volley([["chains", "policy=fixed:8", "tree_nodes=16"], ["alone", "drafter=null"]])
    assert rows == {"chains": {"policy": "fixed:8", "tree_nodes": 16}, "alone": {"drafter": None}}
    with pytest.raises(SystemExit, match="'fixed' is no KEY=VALUE"):
        llama_cpp.parse_volley([["chains", "fixed"]])
    with pytest.raises(SystemExit, match="'x' is no number"):
        LlamaRow.parse("bf16+dflash:x")
    options = llama_cpp.parse_arguments(["--shape", "none"])
    with pytest.raises(SystemExit, match=r"no drafter for 'mtp'; there are dflash, dspark"):
        llama_cpp.drafter_of(options, LlamaRow.parse("bf16+mtp:3"))


def scripted(speeds: dict[str, list[float]], order: list[str]) -> dict[str, Contender]:
    """Contenders that decode their n-th group of prompts with the n-th speed; the first call is the warm-up."""

    def contender(name: str, own: list[float]) -> Contender:
        calls = iter([1.0, *own])

        def ask(prompts: Any, max_tokens: int, temperature: float, seed: int) -> Answer:
            order.append(name)
            gained = max_tokens - 1
            return Answer([[0] * max_tokens] * len(prompts), 10.0, gained / next(calls), gained, gained // 3)

        return Contender(ask, pid=1)

    return {name: contender(name, own) for name, own in speeds.items()}


def test_rows_take_turns_and_are_compared_group_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "peak_bytes", lambda pid: 3 * 2**20)
    speeds = {
        "llama.cpp bf16": [10.0, 20.0, 40.0],
        "llama.cpp bf16+dflash:3": [20.0, 30.0, 50.0],
        "llama.cpp q8_0": [40.0, 40.0, 40.0],
        "volley plain": [30.0, 60.0, 100.0],
    }
    order: list[str] = []
    options = llama_cpp.parse_arguments(["--max-tokens", "7", "--repeats", "1"])
    measured, saved, setting = Measured(), list[int](), Setting(0, 0.0, 1)
    prompts = [[1], [2], [3]]
    llama_cpp.measure_answers(scripted(speeds, order), setting, prompts, options, measured, lambda: saved.append(1))
    names = list(speeds)
    assert order == names + names + names[1:] + names[:1] + names[2:] + names[:2]
    assert len(saved) == 3
    table = llama_cpp.answers_table(measured, setting)
    assert "× llama.cpp bf16+dflash:3 | × llama.cpp q8_0 |" in table
    assert "| volley plain | 60.0 (45.0–80.0) | 2.00 | 1.50 | 3.00 | 3/3 | 3 |" in table
    assert json.loads(json.dumps(measured.to_json()))["runs"][0]["speed"] == pytest.approx(10.0)


def test_several_at_once_count_all_tokens_and_all_time() -> None:
    answer = Answer([[1] * 10, [1] * 30], 4.0, 1.0, 38, 38)
    assert llama_cpp.Run("row", Setting(0, 0.0, 8), 0, 0, answer).speed == 10
    assert llama_cpp.Run("row", Setting(0, 0.0, 1), 0, 0, answer).speed == 38


def test_passes_have_a_line_each() -> None:
    measured = Measured(passes={"llama.cpp bf16": {1: [0.03, 0.02, 0.04]}, "volley plain, draft": {2: [0.001]}})
    lines = llama_cpp.passes_table(measured).splitlines()
    assert lines[2:] == ["| llama.cpp bf16 | 30.0 |  |  |  |  |  |", "| volley plain, draft |  | 1.0 |  |  |  |  |"]
    assert all(line.count("|") == len(llama_cpp.SIZES) + 2 for line in lines)


def test_passages_are_as_long_as_the_context(tmp_path: Path) -> None:
    """A file that is too short is named wherever it stands among others."""
    short, long = tmp_path / "short.txt", tmp_path / "long.txt"
    short.write_text("a" * 14)
    long.write_text("b" * 100)

    def encode(text: str) -> list[int]:
        return list(text.encode())

    assert passages(encode, [long, short], 3, 10) == [[98] * 10] * 2 + [[97] * 10]
    for files in ([short, long], [long, short]):
        with pytest.raises(SystemExit, match=r"short\.txt holds no 2 passages of 10 tokens; give more text"):
            passages(encode, files, 4, 10)


def test_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.llama_peer.BINARIES", tmp_path)
    with pytest.raises(SystemExit, match="run `make peers`"):
        llama_cpp.check_built()


@built
def test_llama_cpp_says_what_volley_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The whole command on the bundled pair in fp32: same greedy tokens, same accepted lengths at the same depth."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"prompt": "How do I use `tar`?"}\n{"prompt": "Explain lifetimes in Rust."}\n')
    command = (
        f"llama_cpp --shape none --prompts {prompts} --num-prompts 2 --max-tokens 24 --threads 1 --work {tmp_path}"
    )
    command += f" --json {out} --pass-rounds 0 --llama f32 f32+dflash:7 f32+dspark:7@4096"
    command += " --volley plain dtype=float32 drafter=null block_size=1"
    command += " --volley chains dtype=float32 drafter=drafter-dflash policy=fixed:8"
    monkeypatch.setattr(sys, "argv", command.split())
    llama_cpp.main()
    assert "| llama.cpp f32+dflash:7 |" in capsys.readouterr().out
    saved = json.loads(out.read_text())
    answers = {(run["row"], run["group"]): run["answer"] for run in saved["runs"]}
    for group in (0, 1):
        found = {row: answer["tokens"] for (row, own), answer in answers.items() if own == group}
        assert len(found) == 5
        assert all(tokens == found["volley plain"] for tokens in found.values())
        chains, dflash = answers["volley chains", group], answers["llama.cpp f32+dflash:7", group]
        assert (chains["gained"], chains["passes"]) == (dflash["gained"], dflash["passes"])
        dspark = answers["llama.cpp f32+dspark:7@4096", group]
        assert dspark["gained"] > 1.5 * dspark["passes"]
    assert all(memory["peak_bytes"] > 2**24 for memory in saved["memory"])


@built
def test_passes_of_llama_cpp_are_timed(tmp_path: Path) -> None:
    options = llama_cpp.parse_arguments(["--shape", "none", "--llama", "bf16", "--pass-rounds", "2", "--threads", "1"])
    options.work, options.room, options.volley = tmp_path, 256, {}
    llama_cpp.prepare(options)
    measured = Measured()
    llama_cpp.measure_passes(options, measured)
    found = measured.passes["llama.cpp bf16"]
    assert {size: len(times) for size, times in found.items()} == dict.fromkeys(llama_cpp.SIZES, 2)
    assert all(second > 0 for times in found.values() for second in times)
