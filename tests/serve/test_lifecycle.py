"""Clients that go, time that runs out, requests that break, signals: what is left afterwards is an idle server."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.conftest import TinyPair
from tests.serve.running import Running, Tiny, running, wait_until
from volley.engine.step import Step
from volley.errors import ParallelError
from volley.params import SamplingParams
from volley.results import GenerationStats, TextChunk
from volley.serve.answer import AnswerResponse
from volley.serve.parsing import PlainText
from volley.serve.replies import ChatDialect
from volley.serve.worker import End, Job, Piece, Stopped

LONG = {"max_tokens": 900, "ignore_eos": True, "temperature": 0}


def begin(server: Running, *, stream: bool = True, **body: Any) -> httpx.Response:
    """A request whose answer has begun."""
    body = {"messages": [{"role": "user", "content": "Hello"}], **LONG, **body, "stream": stream}
    while True:
        request = server.client.build_request("POST", "/v1/chat/completions", json=body)
        response = server.client.send(request, stream=True)
        if response.status_code != 504:  # its time was over before it had a first token
            assert response.status_code == 200
            return response
        response.close()


def test_a_client_that_goes_frees_its_pages(server: Running) -> None:
    response = begin(server, n=3)
    lines = response.iter_lines()  # kept: closing it closes the response
    next(lines)
    wait_until(lambda: server.engine.snapshot().pages_used > 0)
    response.close()
    server.settle()
    metrics = server.metrics()
    assert metrics['volley:request_success_total{finished_reason="abort"}'] >= 3
    assert metrics["volley:num_requests_running"] == 0


def test_a_client_that_does_not_wait_for_its_answer(server: Running) -> None:
    body = {"prompt": "Hello", **LONG}
    with pytest.raises(httpx.ReadTimeout):
        server.post("completions", body, timeout=httpx.Timeout(30, read=0.15))
    server.settle()


@pytest.mark.slow
def test_a_request_that_takes_too_long(tiny: Tiny) -> None:
    with running(tiny.engine(), request_timeout=0.25) as server:
        response = server.chat("Hello", **LONG)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "timeout"
        lines = list(begin(server).iter_lines())
        assert json.loads(lines[-4].removeprefix("data: "))["error"]["code"] == "timeout"
        assert lines[-2] == "data: [DONE]"
        server.settle()
        wait_until(lambda: server.chat("Hello", max_tokens=1).status_code == 200)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_stops_reading_holds_nothing(stream: bool) -> None:
    """Nothing can be sent any more, not even that time is over: the job is given up all the same."""
    given_up: list[Job] = []

    async def never(*_: Any) -> Any:
        await asyncio.Event().wait()

    async def answer_it() -> Job:
        job = Job([[1, 2]], [SamplingParams()])
        job.events.put_nowait(Piece(0, [TextChunk("a", [1], from_draft=False)], []))
        job.events.put_nowait(End(0, "stop", GenerationStats()))
        dialect = ChatDialect("m", str, bytes_of=lambda token: None, parsers=[PlainText()])
        worker = SimpleNamespace(abort=given_up.append)
        response = AnswerResponse(
            worker,  # type: ignore[arg-type]
            job,
            dialect,
            stream=stream,
            timeout=0.1,
            started=time.monotonic(),
            last_words_seconds=0.1,
        )
        await asyncio.wait_for(response({"type": "http"}, never, never), 5)
        return job

    job = asyncio.run(answer_it())
    assert given_up[0] is job


@pytest.mark.slow
def test_one_broken_request_does_not_touch_the_others(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.engine()
    inner = engine.core.runner.forward

    def forward(step: Step) -> None:
        if any(work.request.params.top_k == 13 and work.request.num_output > 3 for work in step.works):
            raise RuntimeError("a planted bug")
        inner(step)

    monkeypatch.setattr(engine.core.runner, "forward", forward)
    want = tiny.answer([{"role": "user", "content": "Hello"}], max_tokens=120)
    with running(engine) as server:
        answers: list[httpx.Response] = []
        ask = [{}, {"top_k": 13}, {"top_k": 13, "stream": True}, {}]
        threads = [
            threading.Thread(
                target=lambda b=body: answers.append(server.chat("Hello", **{**LONG, "max_tokens": 120}, **b))
            )
            for body in ask
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        whole = [answer for answer in answers if answer.headers["content-type"] == "application/json"]
        good = [answer.json()["choices"][0]["message"]["content"] for answer in whole if answer.status_code == 200]
        assert good == [want] * 2
        (bad,) = [answer for answer in whole if answer.status_code != 200]
        assert bad.status_code == 500
        assert "planted" not in bad.text
        (streamed,) = [answer for answer in answers if answer not in whole]
        assert '"type":"server_error"' in streamed.text
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert server.metrics()["volley:request_errors_total"] == 2
        server.settle()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_dead_engine_is_not_alive(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    """Wrong page books cannot be repaired, and some errors are no exceptions: liveness says so, and clients get an answer."""
    engine = tiny.engine()

    def wrong() -> None:
        raise AssertionError("page 3 has 2 references")

    def fail(step: Step) -> None:
        raise error

    monkeypatch.setattr(engine.core.runner, "forward", fail)
    monkeypatch.setattr(engine, "check_integrity", wrong)
    with running(engine) as server:
        assert server.client.get("/health").status_code == 200
        assert server.chat("Hello").json()["error"]["code"] == "engine_dead", "a request on its way"
        wait_until(lambda: not server.service.worker.is_alive)
        swapped = server.service.worker.swap(tiny.drafter)
        assert isinstance(swapped.exception(timeout=5), Stopped), "a reload does not wait for ever"
        for path in ("/health", "/ready"):
            assert server.client.get(path).status_code == 503
        assert server.client.get("/health").json()["status"] == "the engine has stopped"
        assert server.chat("Hello").json()["error"]["code"] == "engine_dead"


@pytest.mark.slow
def test_a_server_ends_when_its_processes_are_out_of_step(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.engine()

    def lose(step: Step) -> None:
        raise ParallelError("rank 1 was lost")

    monkeypatch.setattr(engine.core.runner, "forward", lose)
    with running(engine) as server:
        assert server.chat("Hello").status_code == 503
        server.thread.join(10)
        assert not server.thread.is_alive()


@pytest.mark.slow
def test_draining_finishes_what_runs_and_refuses_the_rest(tiny: Tiny) -> None:
    with running(tiny.engine()) as server:
        untaught = [{"role": "user", "content": "What nothing was taught to answer"}]
        lines = begin(server, messages=untaught, max_tokens=600).iter_lines()
        next(lines)
        server.server.drain()
        ready = server.client.get("/ready")
        assert ready.status_code == 503
        assert server.client.get("/health").status_code == 200
        refused = server.chat("Hello")
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        rest = list(lines)
        assert json.loads(rest[-4].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert rest[-2] == "data: [DONE]"
        server.thread.join(10)
        assert not server.thread.is_alive()


@pytest.mark.slow
def test_draining_does_not_wait_for_ever(tiny: Tiny) -> None:
    with running(tiny.engine(), shutdown_timeout=0.2) as server:
        lines = begin(server).iter_lines()
        next(lines)
        server.server.drain()
        rest = list(lines)
        assert json.loads(rest[-4].removeprefix("data: "))["error"]["code"] == "shutting_down"
        server.thread.join(10)
        assert not server.thread.is_alive()


@pytest.mark.slow
def test_the_command_serves_and_obeys_sigterm(tiny_pair: TinyPair, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\n\nfirst\nsecond\n")
    command = [sys.executable, "-m", "volley.cli", "serve", "--port", "0", "--threads", "1", "--dtype", "float32"]
    command += ["--target", str(tiny_pair.target), "--drafter", str(tiny_pair.drafter), "--api-key-file", str(keys)]
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen([*command, "--served-model-name", "mine"], stderr=file, env={**os.environ})
    try:
        wait_until(lambda: '"listening"' in log.read_text() or process.poll() is not None, 300)
        url = json.loads(log.read_text().splitlines()[0])["url"]
        headers = {"Authorization": "Bearer second"}
        with httpx.Client(base_url=url, headers=headers, timeout=30) as client:
            body = {"model": "mine", "prompt": "a secret text", "ignore_eos": True, "max_tokens": 300, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                assert list(lines)[-2] == "data: [DONE]"
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    (served,) = [entry for entry in entries if entry["event"] == "request"]
    assert served["completion_tokens"] == 300
    assert served["status"] == 200
    assert "secret" not in log.read_text()


def test_metrics_count_what_happened(tiny: Tiny) -> None:
    prompt = [{"role": "user", "content": "Hello"}]
    tiny.answer(prompt, max_tokens=24)
    with running(tiny.engine(policy="fixed")) as server:
        usage = server.chat("Hello", temperature=0, max_tokens=24).json()["usage"]
        server.settle()
        answered = 'volley:http_requests_total{path="/v1/chat/completions",status="200"}'
        wait_until(lambda: answered in server.metrics())  # it is counted once the answer is sent
        seen = server.metrics()
        assert seen["volley:generation_tokens_total"] == 24
        assert seen["volley:prompt_tokens_total"] == usage["prompt_tokens"]
        details = usage["completion_tokens_details"]
        accepted = seen["volley:spec_decode_num_accepted_tokens_total"]
        assert accepted == details["accepted_prediction_tokens"]
        drafted = seen["volley:spec_decode_num_draft_tokens_total"]
        assert drafted == accepted + details["rejected_prediction_tokens"]
        per_position = [
            seen.get(f'volley:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}', 0) for i in range(5)
        ]
        assert sum(per_position) == accepted
        assert per_position == sorted(per_position, reverse=True)
        tau = seen["volley:decoding_cycle_tokens_total"] / seen["volley:decoding_cycles_total"]
        assert tau == pytest.approx(details["acceptance_length"], abs=1e-3)
        assert seen["volley:time_to_first_token_seconds_count"] == 1
        assert seen["volley:draft_seconds_total"] > 0
        assert seen["volley:verify_seconds_total"] > 0
        assert seen[answered] == 1
