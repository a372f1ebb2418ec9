"""A drafter is replaced while requests run: answers stay, and a bad drafter is refused."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import TinyPair
from tests.engine.test_reload import other_drafter
from tests.serve.running import MODEL, Running, Tiny, running, wait_until
from volley import Engine, SamplingParams
from volley.models.drafters.draft_model import load_drafter
from volley.models.drafters.drafter import Drafter
from volley.serve.config import ServeConfig
from volley.serve.service import Service
from volley.serve.worker import End, Event, Failure, Job


@pytest.fixture
def from_folder(tiny: Tiny, tiny_pair: TinyPair, tmp_path: Path) -> Iterator[tuple[Running, Path]]:
    folder = tmp_path / "drafter"
    shutil.copytree(tiny_pair.drafter, folder)
    engine = Engine.from_pretrained(tiny.target, folder, policy="fixed")
    with running(engine) as server:
        yield server, folder
        server.settle()


def reload(server: Running) -> bool:
    return asyncio.run_coroutine_threadsafe(server.service.reload_drafter(), server.service.worker.loop).result(30)


@pytest.mark.slow
def test_a_server_reloads_its_drafter_under_load(from_folder: tuple[Running, Path], tiny: Tiny) -> None:
    server, folder = from_folder
    want = tiny.answer("Hello", max_tokens=200, ignore_eos=True)
    found: list[str] = []

    def ask() -> None:
        body = {"model": MODEL, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        found.append(server.complete("Hello", **body).json()["choices"][0]["text"])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.engine.snapshot().running == 4)
    other_drafter(Drafter.from_pretrained(folder)).save_pretrained(folder)
    before = server.engine.drafter
    assert reload(server)
    assert server.engine.drafter is not before
    for thread in threads:
        thread.join()
    assert found == [want] * 4
    server.service.worker.loop.call_soon_threadsafe(server.server.reload)  # as the signal does
    wait_until(lambda: server.metrics()['volley:drafter_reloads_total{result="done"}'] == 2)
    now = server.engine.drafter
    (folder / "model.safetensors").write_bytes(b"torn")
    assert not reload(server)
    assert server.engine.drafter is now
    seen = server.metrics()
    assert seen['volley:drafter_reloads_total{result="refused"}'] == 1
    assert server.complete("Hello", model=MODEL, max_tokens=4).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("is_stopping", [False, True])
def test_a_swap_that_nobody_waits_for_any_more_is_left_out(tiny: Tiny, tiny_pair: TinyPair, is_stopping: bool) -> None:
    """The worker lives on; one that stops tells the others so."""
    engine = tiny.engine()
    worker = Service(engine, ServeConfig(), MODEL).worker
    drafter, job = load_drafter(tiny_pair.drafter, tiny.target, "bf16"), Job([[4, 5]], [SamplingParams(max_tokens=1)])

    async def events() -> list[Event]:
        if is_stopping:
            worker.stop_soon()
        assert worker.swap(drafter).cancel()
        worker.submit(job)
        worker.start(asyncio.get_running_loop())
        found = [await job.events.get()]
        while not isinstance(found[-1], End | Failure):
            found.append(await job.events.get())
        worker.stop_soon()
        return found

    last = asyncio.run(asyncio.wait_for(events(), 20))[-1]
    assert isinstance(last, Failure if is_stopping else End)
    assert worker.fatal is None
    assert engine.drafter is tiny.drafter


def test_without_a_folder_there_is_nothing_to_reload(server: Running) -> None:
    assert not reload(server)


@pytest.mark.slow
def test_sigusr1_reloads_and_a_terminal_that_closes_ends_the_server(tiny_pair: TinyPair, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "volley.cli", "serve", "--target", str(tiny_pair.target), "--port", "0"]
    command += ["--drafter", str(tiny_pair.drafter), "--served-model-name", MODEL, "--threads", "1"]

    def entries() -> list[dict[str, object]]:
        return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]

    def logged(event: str) -> bool:
        return any(entry["event"] == event for entry in entries())

    def with_a_terminal() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup would have it ignored

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        log.open("w") as out,
        subprocess.Popen(command, stderr=out, env=environment, preexec_fn=with_a_terminal) as process,
    ):
        try:
            wait_until(lambda: logged("listening"), 300)
            (url,) = [entry["url"] for entry in entries() if entry["event"] == "listening"]
            process.send_signal(signal.SIGUSR1)
            wait_until(lambda: logged("a drafter was reloaded"))
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200
            process.send_signal(signal.SIGHUP)
            assert process.wait(20) == -signal.SIGHUP
        finally:
            process.kill()
