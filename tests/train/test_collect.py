import json
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.forks import Forked
from tests.serve.running import wait_until
from tests.train.runs import write_rows
from volley.errors import ConfigError, EndpointError, InputError
from volley.params import SamplingParams
from volley.results import GenerationResult, GenerationStats
from volley.train.collect import CollectConfig, EngineSource, Progress, collect, make_jobs
from volley.train.endpoint import EndpointSource


class FakeTokenizer:
    chat_template = "{% if enable_thinking %}think{% endif %}"

    def apply_chat_template(self, messages: list[dict[str, str]], enable_thinking: bool = True, **_: Any) -> str:
        return "".join(f"{m['role'][0]}:{m['content']};" for m in messages) + ("" if enable_thinking else "<no>")

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


class FakeEngine:
    """Echoes the prompt's length and the temperature; counts batches."""

    tokenizer = FakeTokenizer()

    def __init__(self, die_after: int | None = None) -> None:
        self.batches: list[int] = []
        self.left = die_after

    def room(self, num_prompt: int, params: SamplingParams) -> int:
        return 1000

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> Iterator[GenerationResult]:
        self.batches.append(len(prompts))
        for prompt, one in zip(prompts, params, strict=True):
            if self.left is not None:
                if self.left == 0:
                    raise KeyboardInterrupt
                self.left -= 1
            text = f"{len(prompt)}@{one.temperature}"
            yield GenerationResult(text, list(text.encode()), "stop", GenerationStats(len(prompt), len(text)))


def asking(folder: Path, *rows: dict[str, Any], **options: Any) -> CollectConfig:
    prompts = (str(write_rows(folder / "prompts.jsonl", list(rows))),)
    return CollectConfig(**{"prompts": prompts, "out": folder / "o.jsonl", **options})


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_openai_messages_with_their_circumstances(tmp_path: Path) -> None:
    config = asking(tmp_path, {"prompt": "hi"}, {"turns": ["a", "b"]}, system="S", thinking=False, max_tokens=9)
    seen: list[Progress] = []
    summary = collect(config, EngineSource(FakeEngine(), "tiny", thinking=False), seen.append)
    one, two, three = rows_of(config.out)
    assert [m["role"] for m in one["messages"]] == ["system", "user", "assistant"]
    assert bytes(one["prompt_token_ids"]) == b"s:S;u:hi;<no>"
    assert bytes(one["response_token_ids"]).decode() == one["messages"][-1]["content"] == "13@0.0"
    assert (one["thinking"], one["temperature"], one["finish_reason"], one["model"]) == ("off", 0.0, "stop", "tiny")
    assert len(one["chat_template"]) == 16
    assert [m["content"] for m in two["messages"]] == ["S", "a", "12@0.0"]
    assert [m["content"] for m in three["messages"]] == ["S", "a", "12@0.0", "b", "25@0.0"]
    assert bytes(three["prompt_token_ids"]) == b"s:S;u:a;a:12@0.0;u:b;<no>"
    assert [(row["turn"], row["turns"], row["key"]) for row in (two, three)] == [(1, 2, two["key"]), (2, 2, two["key"])]
    assert (summary.finished, summary.total, summary.output_tokens) == (2, 2, 18)
    assert [p.finished for p in seen] == [0, 1, 2]


def test_temperatures_cycle_over_prompts_and_samples(tmp_path: Path) -> None:
    jobs = make_jobs(asking(tmp_path, *({"prompt": f"{i}"} for i in range(3)), temperatures=(0, 0.7), samples=3))
    assert [job.params.temperature for job in jobs] == [0, 0.7, 0, 0.7, 0, 0.7, 0, 0.7, 0]
    assert len({job.key for job in jobs}) == len({job.params.seed for job in jobs}) == 9


def test_an_interrupted_run_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i}"} for i in range(20)] + [{"turns": ["x", "y"]}]
    whole = asking(tmp_path, *rows, rows[0], out=tmp_path / "whole.jsonl", temperatures=(0, 1))
    collect(whole, EngineSource(FakeEngine(), "tiny", batch=8))
    torn = replace(whole, out=tmp_path / "torn.jsonl")
    with pytest.raises(KeyboardInterrupt):
        collect(torn, EngineSource(FakeEngine(die_after=11), "tiny", batch=8))
    with torn.out.open("ab") as out:
        first_turn, second_turn = whole.out.read_bytes().splitlines(keepends=True)[-2:]
        out.write(first_turn + second_turn[:40])  # a write cut short by kill -9
    engine = FakeEngine()
    summary = collect(torn, EngineSource(engine, "tiny", batch=8))
    assert (summary.skipped, summary.finished, summary.total) == (11, 11, 22)
    assert sorted(torn.out.read_text().splitlines()) == sorted(whole.out.read_text().splitlines())
    assert collect(torn, EngineSource(engine, "tiny")).finished == 0
    assert engine.batches == [4, 4, 3, 1], "two turns: half as many conversations are begun"


def test_a_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    config = asking(tmp_path, {"prompt": "x"})
    collect(config, EngineSource(FakeEngine(), "tiny"))
    with pytest.raises(ConfigError, match="holds responses of 'tiny', not of 'other'"):
        collect(config, EngineSource(FakeEngine(), "other"))
    with pytest.raises(ConfigError, match=r"cannot be written .*; name another file as out"):
        collect(replace(config, out=tmp_path), EngineSource(FakeEngine(), "tiny"))
    config.out.write_text('{"prompt": "precious"}\n')
    with pytest.raises(InputError, match="line 1 was not written by volley collect"):
        collect(config, EngineSource(FakeEngine(), "tiny"))
    assert config.out.read_text() == '{"prompt": "precious"}\n'


def test_a_full_disk_ends_it_and_what_was_written_counts(tmp_path: Path) -> None:
    config = asking(tmp_path, *({"prompt": f"{i}"} for i in range(9)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        with pytest.raises(ConfigError, match=r"cannot be written .*; make room and run the same command again"):
            collect(config, EngineSource(FakeEngine(), "tiny"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    summary = collect(config, EngineSource(FakeEngine(), "tiny"))
    assert summary.finished + summary.skipped == len(rows_of(config.out)) == 9
    assert summary.skipped > 0


def test_prompts_longer_than_the_context_are_counted_not_fatal(tmp_path: Path) -> None:
    config = asking(tmp_path, {"prompt": "x" * 50}, {"prompt": "x"})
    source = EngineSource(FakeEngine(), "tiny", most_tokens=30)
    summary = collect(config, source)
    assert (summary.finished, summary.failed) == (1, 1)
    (refusal,) = source.refusals
    assert refusal.startswith("1 prompts do not fit in 30 tokens")


def test_an_answer_has_the_tokens_that_there_is_room_for(tmp_path: Path) -> None:
    config, seen = asking(tmp_path, {"prompt": "xx"}, {"prompt": "x" * 13}, max_tokens=20), []

    class Engine(FakeEngine):
        def room(self, num_prompt: int, params: SamplingParams) -> int:
            return max(0, (18 - num_prompt) // 4 * 4)  # of canvases

        def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> Iterator[GenerationResult]:
            seen.extend((len(prompt), one.max_tokens) for prompt, one in zip(prompts, params, strict=True))
            return super().generate(prompts, params)

    assert collect(config, EngineSource(Engine(), "tiny", most_tokens=18)).failed == 1
    assert seen == [(5, 12)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": ()}, "no prompts"),
        ({"samples": 0}, "samples is 0"),
        ({"samples": 2}, "2 samples at temperature 0 are the same text"),
        ({"temperatures": ()}, "temperatures is empty"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"prompts": ("gsm8k",)}, "gsm8k is kept for evaluation; training datasets are gsm8k-train, mbpp-train"),
    ],
)
def test_unusable_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CollectConfig(**{"prompts": ("p.jsonl",), "out": Path("o"), **options})


def test_a_template_must_exist_and_know_the_switch() -> None:
    engine = FakeEngine()
    engine.tokenizer = FakeTokenizer()
    engine.tokenizer.chat_template = "plain"
    with pytest.raises(ConfigError, match="no thinking switch"):
        EngineSource(engine, "tiny", thinking=True)
    engine.tokenizer.chat_template = ""
    base = EngineSource(engine, "tiny")
    assert base.chat_template is False


class StubEndpoint(ThreadingHTTPServer):
    """Answers chat completions; ``script(n, body)`` may return a status to fail the n-th request with."""

    daemon_threads = True

    def __init__(self, script: Callable[[int, dict[str, Any]], int | None] = lambda n, body: None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script, self.lock = script, threading.Lock()
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.models = ["stub-model"]
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def handle_error(self, *_: Any) -> None:
        """Clients leave when a run ends."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: StubEndpoint

    def log_message(self, *_: Any) -> None: ...

    def reply(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        if status == 429:
            self.send_header("retry-after", "0")
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.keys.add(self.headers.get("authorization"))
            status = self.server.script(len(self.server.bodies), body)
        if status == -1:
            self.close_connection = True
            return
        if status is not None:
            self.reply(status, {"error": "as told"})
            return
        if self.path.endswith("/completions") and "prompt" in body:
            choice = {"text": f" and {body['prompt']}", "finish_reason": "stop"}
            self.reply(200, {"choices": [choice], "usage": {"completion_tokens": 2}})
            return
        last = body["messages"][-1]["content"]
        message = {"role": "assistant", "content": f"re: {last}"}
        if last == "think":
            message["reasoning_content"] = "hm"
        choice = {"message": message, "finish_reason": "length"}
        self.reply(200, {"choices": [choice], "usage": {"completion_tokens": 5}})


@pytest.fixture
def serve() -> Iterator[Callable[..., StubEndpoint]]:
    servers: list[StubEndpoint] = []

    def start(*args: Any) -> StubEndpoint:
        servers.append(StubEndpoint(*args))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
        server.thread.join()


def source_of(server: StubEndpoint, **options: Any) -> EndpointSource:
    options = {"backoff_seconds": 0.001, "concurrency": 4, **options}
    return EndpointSource(server.url, **options)


def test_an_endpoint_that_fails_now_and_then_still_answers_everything(
    tmp_path: Path, serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    failures = {1: 503, 2: 429, 5: -1, 7: 500}
    server = serve(lambda n, body: failures.get(n))
    rows = [{"prompt": f"{i}"} for i in range(12)] + [{"turns": ["a", "b"]}]
    config = asking(tmp_path, *rows, max_tokens=7, top_k=3)
    source = source_of(server, api_key="secret", thinking=True)
    summary = collect(config, source)
    assert (summary.finished, summary.failed, summary.output_tokens) == (13, 0, 70)
    assert any("HTTP 503" in line and "trying again" in line for line in caplog.messages)
    found = {row["messages"][0]["content"]: row for row in rows_of(config.out) if row["turn"] == row["turns"]}
    assert found["3"]["messages"][-1] == {"role": "assistant", "content": "re: 3"}
    assert [m["content"] for m in found["a"]["messages"]] == ["a", "re: a", "b", "re: b"]
    row = found["3"]
    assert (row["model"], row["chat_template"], row["finish_reason"]) == ("stub-model", True, "length")
    body = server.bodies[0]
    assert (body["model"], body["max_tokens"], body["top_k"]) == ("stub-model", 7, 3)
    assert body["chat_template_kwargs"] == {"enable_thinking": True}
    assert server.keys == {"Bearer secret"}
    assert collect(config, source).finished == 0


def test_an_endpoint_that_takes_reasoning_out_of_its_answers_is_refused(tmp_path: Path, serve: Any) -> None:
    """The rest is not what the target writes behind the prompt."""
    config = asking(tmp_path, {"prompt": "think"})
    with pytest.raises(EndpointError, match="without a reasoning parser, ask with --no-thinking"):
        collect(config, source_of(serve()))


def test_a_base_model_is_sent_prompts_as_they_are(tmp_path: Path, serve: Any) -> None:
    source = source_of(serve(), raw=True)
    config = asking(tmp_path, {"prompt": "Once"})
    assert collect(config, source).finished == 1
    (row,) = rows_of(config.out)
    assert (row["messages"][-1]["content"], row["chat_template"]) == (" and Once", False)
    chat = asking(tmp_path, {"turns": ["a", "b"]}, out=tmp_path / "p.jsonl")
    with pytest.raises(InputError, match="is a chat; a model without a chat template takes single prompts"):
        collect(chat, source)


def test_a_lasting_failure_is_an_error_and_a_second_run_goes_on(tmp_path: Path, serve: Any) -> None:
    server = serve(lambda n, body: None if n <= 5 else 503)
    rows = [{"prompt": f"{i}"} for i in range(10)]
    config = asking(tmp_path, *rows)
    with pytest.raises(EndpointError, match=r"HTTP 503 .*attempt 3 of 3.*run the same command again"):
        collect(config, source_of(server, concurrency=1, retries=2))
    assert len(rows_of(config.out)) == 5
    server.script = lambda n, body: None
    summary = collect(config, source_of(server))
    assert (summary.skipped, summary.finished) == (5, 5)
    assert Counter(row["messages"][0]["content"] for row in rows_of(config.out)) == Counter(str(i) for i in range(10))


def test_refused_prompts_are_counted_and_a_wall_of_refusals_stops(tmp_path: Path, serve: Any) -> None:
    server = serve(lambda n, body: 400 if body["messages"][-1]["content"] == "3" else None)
    rows = [{"prompt": f"{i}"} for i in range(30)]
    config = asking(tmp_path, *rows)
    summary = collect(config, source_of(server, model="named", retries=0))
    assert (summary.finished, summary.failed) == (29, 1)
    server.script = lambda n, body: 422
    config = replace(config, out=tmp_path / "p.jsonl")
    with pytest.raises(EndpointError, match="every prompt so far was refused"):
        collect(config, source_of(server, retries=0))


def test_hopeless_endpoints_say_what_to_check(tmp_path: Path, serve: Any) -> None:
    server = serve(lambda n, body: 401)
    config = asking(tmp_path, {"prompt": "x"})
    with pytest.raises(EndpointError, match=r"HTTP 401.*API key"):
        collect(config, source_of(server))
    assert len(server.bodies) == 1
    server.models = ["a", "b"]
    with pytest.raises(ConfigError, match="serves a, b; say which with --model"):
        source_of(server)
    with pytest.raises(ConfigError, match="not a URL"):
        EndpointSource("localhost:8000")
    with pytest.raises(EndpointError, match="ConnectError"):
        EndpointSource("http://127.0.0.1:9/v1", model="m", retries=0).run(make_jobs(config), lambda job: None)


@pytest.mark.slow
def test_kill_9_loses_nothing_but_the_line_being_written(tmp_path: Path, serve: Any) -> None:
    server = serve(lambda n, body: time.sleep(0.01))
    config = asking(tmp_path, *({"prompt": f"{i}"} for i in range(200)))
    child = Forked(collect, config, source_of(server, model="stub-model", concurrency=2))
    wait_until(lambda: config.out.exists() and config.out.read_bytes().count(b"\n") >= 5, 60)
    child.kill()
    before = config.out.read_bytes().count(b"\n")
    server.script = lambda n, body: None
    summary = collect(config, source_of(server, model="stub-model"))
    assert summary.skipped == before
    assert summary.skipped + summary.finished == 200
    assert len({row["key"] for row in rows_of(config.out)}) == len(rows_of(config.out)) == 200
