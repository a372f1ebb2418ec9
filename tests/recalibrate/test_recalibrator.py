"""A server that recalibrates: what it keeps, when training stops, how drafters are swapped, and what it refuses."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import TinyPair
from tests.engine.test_reload import other_drafter
from tests.serve.running import MODEL, Running, Tiny, running, wait_until
from volley import Engine
from volley.errors import ConfigError
from volley.memory.device import Device
from volley.models.checkpoints.formats import write_checkpoint
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.export import export
from volley.models.layers.fingerprint import drafter_fingerprint
from volley.models.targets.sharded import ShardedTarget
from volley.recalibrate import recalibrator
from volley.recalibrate.options import RecalibrateConfig
from volley.recalibrate.recalibrator import Recalibrator
from volley.recalibrate.reservoir import entries, read
from volley.recalibrate.state import BASE, Learnt
from volley.serve.config import ServeConfig
from volley.serve.service import Service
from volley.tensors import load_tensors

SCRIPT = """
    import json, os, sys, time
    folder = json.loads(sys.argv[1])["folder"]
    with open(folder + "/pid.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(folder + "/pid.new", folder + "/pid")
    while os.path.exists(folder + "/wait"):
        time.sleep(0.01)
    print('{"event": "started"}', flush=True)
    while not os.path.exists(folder + "/die"):
        time.sleep(0.01)
        if os.path.exists(folder + "/events"):
            lines = open(folder + "/events").readlines()
            os.remove(folder + "/events")
            for line in lines:
                print(line.strip(), flush=True)
"""
"""Stands for the training process: says what the test has written for it."""


@pytest.fixture(scope="module")
def tiny(tiny_pair: TinyPair) -> Tiny:
    return Tiny(tiny_pair)


class Learning:
    """A server with a scripted training process."""

    def __init__(self, tiny: Tiny, tiny_pair: TinyPair, tmp_path: Path) -> None:
        self.tiny, self.pair, self.folder = tiny, tiny_pair, tmp_path / "kept"
        self.script = tmp_path / "training.py"
        self.script.write_text(textwrap.dedent(SCRIPT))
        self.program = (sys.executable, "-S", str(self.script))

    def make(self, service: Service, engine: Engine, **changes: Any) -> Recalibrator:
        # at a lower priority, the training would starve beside other tests on two cores
        usual = {
            "recalibrate": self.folder,
            "recalibrate_idle": 0.05,
            "recalibrate_requests": "all",
            "recalibrate_nice": 0,
        }
        config = RecalibrateConfig(**{**usual, **changes})
        return Recalibrator(service, engine, config, str(self.pair.target), program=self.program)

    @contextmanager
    def server(self, **changes: Any) -> Iterator[Running]:
        engine = Engine.from_pretrained(self.tiny.target, self.pair.drafter, policy="fixed")

        def prepare(service: Service) -> None:
            service.background_tasks.append(self.make(service, engine, **changes))

        with running(engine, prepare) as server:
            yield server
            server.settle()

    def tell(self, *events: dict[str, Any]) -> None:
        text = "".join(json.dumps(event) + "\n" for event in events)
        (self.folder / "events.new").write_text(text)
        (self.folder / "events.new").rename(self.folder / "events")

    def candidate(self, name: str = "rounds/000001/full", **changes: Any) -> dict[str, Any]:
        """A drafter with other weights, and the verdict that lets it through."""
        drafter = other_drafter(Drafter.from_pretrained(self.pair.drafter))
        drafter.fc.weight.data *= changes.get("round", 1) + 1
        drafter.save_pretrained(self.folder / name)
        event = {"event": "judged", "round": 1, "folder": name, "kind": "full", "trained_until": 7, "swap": True}
        learnt = self.learnt
        event |= {"base": learnt.base, "before": learnt.current.folder}
        figures = {"gain": 0.5, "error": 0.1, "tau": 3.0, "tau_before": 2.0, "tau_base": 2.0, "rows": 40, "reason": ""}
        return {**event, **figures, **changes}

    @property
    def learnt(self) -> Learnt:
        found = Learnt.load(self.folder)
        assert found is not None
        return found

    def serves(self, server: Running, name: str) -> bool:
        wanted = drafter_fingerprint(Drafter.from_pretrained(self.folder / name))
        assert server.engine.drafter is not None
        return drafter_fingerprint(server.engine.drafter) == wanted


@pytest.fixture
def learning(tiny: Tiny, tiny_pair: TinyPair, tmp_path: Path) -> Learning:
    return Learning(tiny, tiny_pair, tmp_path)


@pytest.mark.slow
def test_answers_are_kept_unless_the_client_says_no(learning: Learning, caplog: pytest.LogCaptureFixture) -> None:
    with learning.server() as server:
        server.chat("Keep this", max_tokens=8, temperature=0.5, ignore_eos=True)
        server.chat("Not this", max_tokens=8, ignore_eos=True, recalibrate=False)
        server.chat("Too short", max_tokens=1, ignore_eos=True)
        server.complete("And this", max_tokens=8, n=2, temperature=0, ignore_eos=True)
        server.post("responses", {"input": "Nor this", "recalibrate": False, "max_output_tokens": 8})
        wait_until(lambda: len(entries(learning.folder)) == 3)
        rows = list(read(learning.folder, entries(learning.folder)))
        prompts = [server.engine.tokenizer.decode(row.prompt) for row in rows]
        assert "Keep this" in prompts[0]
        assert prompts[1:] == ["And this", "And this"]
        assert [(len(row.response), row.temperature) for row in rows] == [(8, 0.5), (8, 0.0), (8, 0.0)]
        assert len({row.entry.client for row in rows}) == 1
        script = server.client.get("/dashboard/dashboard.js").text
        for name in set(re.findall(r'"(recalibration_\w+?)(?:_total)?"', script)):
            assert f"volley:{name}" in server.client.get("/metrics").text, "the dashboard reads it"
        wait_until(lambda: server.metrics()["volley:recalibration_rows"] == 3)
        seen = server.metrics()
        assert seen["volley:recalibration_tokens"] == sum(row.entry.tokens for row in rows)
    assert "Keep this" not in caplog.text


@pytest.mark.slow
def test_with_asked_only_what_clients_offer_is_kept(learning: Learning) -> None:
    assert RecalibrateConfig().recalibrate_requests == "asked", "nobody's answers are kept who has not said so"
    with learning.server(recalibrate_requests="asked") as server:
        server.complete("Silent", max_tokens=4, ignore_eos=True)
        server.complete("Offered", max_tokens=4, ignore_eos=True, recalibrate=True)
        wait_until(lambda: len(entries(learning.folder)) > 0)
        (row,) = read(learning.folder, entries(learning.folder))
        assert server.engine.tokenizer.decode(row.prompt) == "Offered"


@pytest.mark.slow
def test_keys_tell_clients_apart_and_are_not_kept(learning: Learning, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alpha-key\nbeta-key\n")
    engine = Engine.from_pretrained(learning.tiny.target, learning.pair.drafter)

    def prepare(service: Service) -> None:
        service.background_tasks.append(learning.make(service, engine))

    with running(engine, prepare=prepare, api_key_file=keys) as server:
        for key in ("alpha-key", "beta-key", " beta-key"):
            body = {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
            server.post("completions", body, headers={"Authorization": f"Bearer {key}"})
        wait_until(lambda: len(entries(learning.folder)) == 3)
    found = [entry.client for entry in entries(learning.folder)]
    assert len(set(found)) == 2
    assert b"alpha" not in b"".join(path.read_bytes() for path in learning.folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_a_better_drafter_takes_over_between_steps_and_is_there_after_a_restart(learning: Learning) -> None:
    want = learning.tiny.answer("Hello", max_tokens=40, ignore_eos=True)
    body = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    with learning.server() as server:
        learning.tell({"event": "ready"}, learning.candidate())
        wait_until(lambda: learning.serves(server, "rounds/000001/full"))
        assert server.complete("Hello", **body).json()["choices"][0]["text"] == want
        wait_until(lambda: server.metrics().get("volley:recalibration_swaps_total") == 1)
        seen = server.metrics()
        assert seen["volley:recalibration_candidates_total"] == 1
        assert seen["volley:recalibration_gain"] == 0.5
        assert seen["volley:recalibration_drift"] == 0
    learnt = learning.learnt
    assert (learnt.current.folder, learnt.current.trained_until, learnt.seen_round) == ("rounds/000001/full", 7, 1)
    assert learnt.previous is not None
    assert learnt.previous.tau == 2.0
    with learning.server() as server:
        assert learning.serves(server, "rounds/000001/full")
        assert server.complete("Hello", **body).json()["choices"][0]["text"] == want
        back = learning.candidate(round=2, folder=BASE, kind=BASE, tau=2.5, tau_before=1.5)
        Drafter.from_pretrained(learning.pair.drafter).save_pretrained(learning.folder / BASE)
        learning.tell(back)
        wait_until(lambda: (learning.learnt.swaps, learning.learnt.roll_backs) == (2, 1))
        assert learning.serves(server, BASE)


@pytest.mark.slow
def test_a_learnt_drafter_that_cannot_be_warmed_up_gives_way_to_the_given_one(
    learning: Learning, monkeypatch: pytest.MonkeyPatch
) -> None:
    with learning.server() as server:
        learning.tell(learning.candidate())
        wait_until(lambda: learning.serves(server, "rounds/000001/full"))

    def fail(_: Engine) -> None:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(recalibrator, "warm_up", fail)
    with learning.server() as server:
        assert learning.learnt.current.folder == BASE
        assert learning.serves(server, BASE)


@pytest.mark.slow
def test_a_head_that_is_not_the_targets_is_refused_at_the_start(learning: Learning, tmp_path: Path) -> None:
    target = str(learning.pair.target)
    checkpoint = export(
        learning.pair.drafter, tmp_path / "part", "zlab", target=target, draft_vocab_size=40, counts=[*range(260)]
    )
    learning.pair = learning.pair._replace(drafter=tmp_path / "part")
    with learning.server() as server:
        assert learning.serves(server, BASE)
    checkpoint.tensors["lm_head.weight"] *= 2
    write_checkpoint(tmp_path / "own", checkpoint, "zlab")
    learning.pair = learning.pair._replace(drafter=tmp_path / "own")
    for _ in range(2):
        with pytest.raises(ConfigError, match="a head of its own, and training uses the target's"), learning.server():
            pass


@pytest.mark.slow
def test_another_given_drafter_begins_anew(learning: Learning, tmp_path: Path) -> None:
    with learning.server() as server:
        learning.tell(learning.candidate())
        wait_until(lambda: learning.serves(server, "rounds/000001/full"))
    other = tmp_path / "other"
    other_drafter(Drafter.from_pretrained(learning.pair.drafter)).save_pretrained(other)
    learning.pair = learning.pair._replace(drafter=other)
    with learning.server() as server:
        assert learning.serves(server, BASE)
    learnt = learning.learnt
    assert (learnt.current.folder, learnt.seen_round) == (BASE, 1)


def reload(server: Running) -> bool:
    """Reload the drafter as SIGUSR1 does."""
    return asyncio.run_coroutine_threadsafe(server.service.reload_drafter(), server.service.worker.loop).result(30)


@pytest.mark.slow
def test_a_reload_begins_anew_from_the_operators_drafter(learning: Learning, tmp_path: Path) -> None:
    """Also where what was learnt serves; a verdict about the drafter of before swaps nothing in, and one of today does."""
    folder = tmp_path / "given"
    shutil.copytree(learning.pair.drafter, folder)
    learning.pair = learning.pair._replace(drafter=folder)
    want = learning.tiny.answer("Hello", max_tokens=40, ignore_eos=True)
    body = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    with learning.server() as server:
        first = learning.learnt.base
        learning.tell(learning.candidate())
        wait_until(lambda: learning.learnt.current.folder == "rounds/000001/full")
        late = learning.candidate("rounds/000002/full", round=2)
        torch.manual_seed(7)
        Drafter(Drafter.from_pretrained(folder).config).save_pretrained(folder)
        assert reload(server)
        wait_until(lambda: learning.learnt.base != first)
        assert learning.learnt.current.folder == BASE
        assert learning.serves(server, BASE)
        assert learning.learnt.base == drafter_fingerprint(Drafter.from_pretrained(folder))
        learning.tell(late)
        wait_until(lambda: learning.learnt.seen_round == 2)
        assert learning.serves(server, BASE), "it was judged against another drafter"
        learning.tell(learning.candidate("rounds/000003/full", round=3))
        wait_until(lambda: learning.serves(server, "rounds/000003/full"))
        assert server.complete("Hello", **body).json()["choices"][0]["text"] == want
        assert reload(server), "the same drafter again: what was learnt of it is set aside"
        wait_until(lambda: learning.serves(server, BASE))
        wait_until(lambda: learning.learnt.current.folder == BASE)
        assert server.complete("Hello", **body).json()["choices"][0]["text"] == want


def copied_drafter(learning: Learning, tmp_path: Path) -> tuple[Path, Path]:
    """The drafter's folder, and a copy of it that ``learning`` serves from now on."""
    whole, folder = learning.pair.drafter, tmp_path / "given"
    shutil.copytree(whole, folder)
    learning.pair = learning.pair._replace(drafter=folder)
    return whole, folder


def reload_without_learning(learning: Learning, server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """The drafter that is on disk now serves, and the training process ends."""
    assert reload(server)
    wait_until(lambda: "the new drafter serves as it is" in caplog.text)
    wait_until(lambda: state_of(learning.folder) == "gone")
    assert server.complete("Hello", max_tokens=4, ignore_eos=True).status_code == 200


@pytest.mark.slow
def test_a_reloaded_drafter_that_cannot_be_trained_serves_as_it_is(
    learning: Learning, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, folder = copied_drafter(learning, tmp_path)
    with learning.server() as server:
        wait_until(lambda: (learning.folder / "pid").exists())
        export(whole, folder, "zlab", target=str(learning.pair.target), with_embeddings=True)
        reload_without_learning(learning, server, caplog)
        (learning.folder / "pid").unlink()
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        assert reload(server)
        wait_until(lambda: (learning.folder / "pid").exists())


@pytest.mark.slow
def test_a_reloaded_drafter_that_the_disk_does_not_take_serves_as_it_is(
    learning: Learning, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No verdict about the drafter of before counts any more; a restart with that one has all of it again."""
    whole, folder = copied_drafter(learning, tmp_path)
    with learning.server() as server:
        wait_until(lambda: (learning.folder / "pid").exists())
        weights = learning.folder / BASE / "model.safetensors"
        weights.unlink()
        (weights / "nothing can be written here").mkdir(parents=True)
        other_drafter(Drafter.from_pretrained(folder)).save_pretrained(folder)
        reload_without_learning(learning, server, caplog)
        shutil.rmtree(weights)
    learning.pair = learning.pair._replace(drafter=whole)
    with learning.server() as server:
        assert learning.serves(server, BASE)


@pytest.mark.slow
def test_a_state_that_cannot_be_written_stops_nothing(learning: Learning, caplog: pytest.LogCaptureFixture) -> None:
    """A full disk: the better drafter serves, and the next verdicts are heard."""
    with learning.server() as server:
        learning.tell(learning.candidate())
        wait_until(lambda: server.metrics().get("volley:recalibration_swaps_total") == 1)
        second = learning.candidate("rounds/000002/full", round=2)
        state = learning.folder / "state.json"
        state.unlink()
        (state / "nothing can be written here").mkdir(parents=True)
        learning.tell(second)
        wait_until(lambda: learning.serves(server, "rounds/000002/full"))
        wait_until(lambda: server.metrics()["volley:recalibration_failures_total"] >= 2)
        assert "what serves cannot be noted" in caplog.text
        shutil.rmtree(state)
        learning.tell({"event": "failed", "round": 3, "reason": "it could not"})
        wait_until(lambda: state.exists() and learning.learnt.seen_round == 3)
        assert learning.learnt.current.folder == "rounds/000002/full"


@pytest.mark.slow
def test_a_torn_candidate_is_refused_and_one_that_is_not_better_is_counted(learning: Learning) -> None:
    with learning.server() as server:
        before = server.engine.drafter
        torn, weak = learning.candidate("rounds/000001/full"), learning.candidate("rounds/000002/full", round=2)
        (learning.folder / "rounds/000001/full/model.safetensors").write_bytes(b"torn")
        failed = {"event": "failed", "round": 3, "reason": "it could not"}
        learning.tell(torn, {**weak, "swap": False, "tau_before": 1.0}, failed)
        wait_until(lambda: server.metrics()["volley:recalibration_failures_total"] == 2)
        seen = server.metrics()
        assert seen["volley:recalibration_candidates_total"] == 2
        assert seen["volley:recalibration_swaps_total"] == 0
        assert seen["volley:recalibration_drift"] == 0.5
        assert server.engine.drafter is before
    learnt = learning.learnt
    assert (learnt.seen_round, learnt.swaps) == (3, 0)


def state_of(folder: Path) -> str:
    """The training process's, as Linux says it: T is stopped."""
    pid = int((folder / "pid").read_text())
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


@pytest.mark.slow
def test_training_stops_while_anybody_waits_for_an_answer(learning: Learning) -> None:
    with learning.server(recalibrate_idle=1.0) as server:
        wait_until(lambda: (learning.folder / "pid").exists())
        assert state_of(learning.folder) != "T"
        body = {"prompt": "Hello", "n": 8, "max_tokens": 900, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
            wait_until(lambda: state_of(learning.folder) == "T")  # a stop takes hold when the process is given a core
            assert 'volley:recalibration_training{model_name="tiny"} 0.0' in server.client.get("/metrics").text
        wait_until(lambda: state_of(learning.folder) in "SR")
        assert 'volley:recalibration_training{model_name="tiny"} 1.0' in server.client.get("/metrics").text
    assert state_of(learning.folder) == "gone"


@pytest.mark.slow
def test_training_is_not_stopped_before_it_knows_its_server(learning: Learning) -> None:
    """A process stopped earlier would stay stopped for ever if the server is killed."""
    learning.folder.mkdir()
    (learning.folder / "wait").touch()
    with learning.server() as server:
        wait_until(lambda: (learning.folder / "pid").exists())
        worker = server.service.worker
        worker.held += 1
        worker.loop.call_soon_threadsafe(worker.on_held[0], worker.held)
        assert server.complete("Hello", max_tokens=4).status_code == 200, "so the loop has called"
        assert state_of(learning.folder) != "T"
        (learning.folder / "wait").unlink()
        wait_until(lambda: state_of(learning.folder) == "T")
        worker.held -= 1


@pytest.mark.slow
def test_training_for_another_target_than_is_served_is_refused(
    learning: Learning, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whose files were replaced under the server."""
    replaced = tmp_path / "target"
    shutil.copytree(learning.pair.target, replaced)
    file = replaced / "model.safetensors"
    tensors = load_tensors(file)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name] + 1}, file, metadata={"format": "pt"})
    learning.pair = learning.pair._replace(target=replaced)
    learning.program = recalibrator.PROGRAM
    with learning.server() as server:
        wait_until(lambda: "nothing is trained" in caplog.text)
        assert server.metrics()["volley:recalibration_failures_total"] == 1
    reasons = [record.fields["reason"] for record in caplog.records if "nothing is trained" in record.message]  # type: ignore[attr-defined]
    assert reasons == [f"the files of {replaced} are not those that the server runs; restart it"]


@pytest.mark.slow
def test_a_training_process_that_dies_is_counted_and_serving_goes_on(learning: Learning) -> None:
    with learning.server() as server:
        (learning.folder / "die").touch()
        wait_until(lambda: server.metrics()["volley:recalibration_failures_total"] >= 1)
        assert server.complete("Hello", max_tokens=4).status_code == 200


@pytest.mark.slow
def test_a_training_process_that_cannot_be_understood_is_ended_and_counted(
    learning: Learning, caplog: pytest.LogCaptureFixture
) -> None:
    with learning.server() as server:
        wait_until(lambda: (learning.folder / "pid").exists())
        (learning.folder / "events").write_text("no event\n")
        wait_until(lambda: server.metrics()["volley:recalibration_failures_total"] == 1)
        assert state_of(learning.folder) == "gone"
        assert "the training process has ended" in caplog.text
        assert server.complete("Hello", max_tokens=4).status_code == 200


@pytest.mark.slow
def test_a_disk_that_takes_no_more_stops_keeping_and_not_serving(
    learning: Learning, caplog: pytest.LogCaptureFixture
) -> None:
    with learning.server() as server:
        rows = learning.folder / "rows"
        shutil.rmtree(rows)
        rows.write_text("nothing can be written below a file")
        for _ in range(3):
            assert server.complete("Hello", max_tokens=4, ignore_eos=True).status_code == 200
        wait_until(lambda: server.metrics()["volley:recalibration_dropped_total"] == 3)
        rows.unlink()
        server.complete("Hello", max_tokens=4, ignore_eos=True)
        wait_until(lambda: len(entries(learning.folder)) == 1)
    assert caplog.text.count("answers cannot be kept") == 1


@pytest.mark.slow
def test_what_cannot_be_recalibrated_is_refused_with_the_remedy(learning: Learning, tmp_path: Path) -> None:
    engine = Engine.from_pretrained(learning.tiny.target, learning.pair.drafter)
    with learning.server(), pytest.raises(ConfigError, match="another server recalibrates"):
        learning.make(Service(engine, ServeConfig(), MODEL), engine)
    plain = Engine(learning.tiny.target, block_size=1)
    with pytest.raises(ConfigError, match="there is no drafter to recalibrate"):
        learning.make(Service(plain, ServeConfig(), MODEL), plain)
    service = Service(engine, ServeConfig(), MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recalibrator, "find_device", lambda _: Device("cuda", 2**30))
        with pytest.raises(ConfigError, match=r"training needs some 2 GiB of the GPU .* say with --kv-mib"):
            Recalibrator(service, engine, RecalibrateConfig(recalibrate=tmp_path / "x"), str(learning.tiny.target))
    divided = SimpleNamespace(drafter=engine.drafter, target=object.__new__(ShardedTarget))
    with pytest.raises(ConfigError, match="leave out --recalibrate or --tensor-parallel"):
        Recalibrator(service, cast(Engine, divided), RecalibrateConfig(recalibrate=tmp_path / "x"), "target")
    with pytest.raises(ConfigError, match=r"converted from"):
        Recalibrator(service, engine, RecalibrateConfig(recalibrate=tmp_path / "x"), "model.gguf")
    with pytest.raises(ConfigError, match="reservoir_tokens is 0"):
        RecalibrateConfig(reservoir_tokens=0)


HURRIED = """
from dataclasses import replace
from volley.cli import main
from volley.recalibrate import recalibrator
attach = recalibrator.attach
pace = dict(recalibrate_tokens=500, recalibrate_steps=40, recalibrate_learning_rate=2e-2, recalibrate_idle=0.1)
pace |= dict(recalibrate_nice=0)
recalibrator.attach = lambda service, engine, config, target: attach(service, engine, replace(config, **pace), target)
main()
"""
"""The command line with a short round of training."""


@pytest.mark.slow
def test_serve_recalibrates_and_takes_its_training_along_when_it_is_killed(tiny_pair: TinyPair, tmp_path: Path) -> None:
    """The whole: traffic, a round of training in a process of its own, a swap, a kill."""
    log, folder = tmp_path / "log", tmp_path / "kept"
    command = [sys.executable, "-c", HURRIED, "serve", "--target", str(tiny_pair.target), "--port", "0"]
    command += ["--drafter", str(tiny_pair.drafter), "--threads", "1", "--dtype", "float32", "--policy", "fixed"]
    command += ["--recalibrate", str(folder), "--recalibrate-requests", "all"]

    def logged(event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as out, subprocess.Popen(command, stderr=out, env=environment) as process:
        try:
            wait_until(lambda: logged("listening"), 300)
            (url,) = [line["url"] for line in logged("listening")]
            body = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
            numbers, end = count(), time.monotonic() + 600
            while not logged("a drafter took over"):  # which answers judge is drawn: a round may end without a verdict
                assert time.monotonic() < end, log.read_text()
                for _ in range(10):
                    prompts = [f"{number} of" for number in islice(numbers, 8)]
                    answered = httpx.post(f"{url}/v1/completions", json={**body, "prompt": prompts}, timeout=60)
                    assert answered.status_code == 200
                rest = time.monotonic() + 30  # training stands still while anybody waits for an answer
                while time.monotonic() < rest and not logged("a drafter took over"):
                    time.sleep(0.1)
            wait_until(lambda: Learnt.load(folder).swaps > 0)
            learnt = Learnt.load(folder)
            process.send_signal(signal.SIGUSR1)
            wait_until(lambda: logged("a drafter was reloaded"))
            wait_until(lambda: Learnt.load(folder).current.folder == BASE)
            children = subprocess.run(
                ["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True, check=True
            )
            (child,) = map(int, children.stdout.split())
            process.send_signal(signal.SIGKILL)
            process.wait(20)
            wait_until(lambda: not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text())
        finally:
            process.kill()
    assert (learnt.current.kind, learnt.current.folder[-5:]) == ("full", "/full")
