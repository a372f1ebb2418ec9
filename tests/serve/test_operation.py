"""Deadlines of clients, keys, and the memory that is held."""

import threading

import pytest

from tests.conftest import TinyPair
from tests.serve.running import MODEL, Running, Tiny, running
from volley import SamplingParams
from volley.engine import capacity
from volley.engine.memory import graph_bytes
from volley.memory.device import Device
from volley.serve.config import ServeConfig
from volley.serve.service import Service


def test_a_client_may_set_a_deadline(server: Running) -> None:
    long = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 900, "ignore_eos": True, "n": 8}
    response = server.post("chat/completions", long, headers={"x-request-timeout": "0.05"})
    assert response.status_code == 504
    assert "0.05 s" in response.json()["error"]["message"]
    server.settle()
    for wrong in ("soon", "-1", "nan"):
        response = server.post("chat/completions", long, headers={"x-request-timeout": wrong})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "x-request-timeout"


def test_a_deadline_holds_while_a_request_is_prepared(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()

    def waits(*_: object, **__: object) -> str:
        is_over.wait(60)
        return "Hello"

    monkeypatch.setattr("volley.serve.template.ChatTemplate.render", waits)
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    try:
        response = server.post("chat/completions", chat, headers={"x-request-timeout": "0.05"})
    finally:
        is_over.set()
    assert response.status_code == 504
    server.settle()


@pytest.mark.slow
def test_a_full_server_prepares_nothing_more(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tiny.engine(max_running=1), max_waiting=0) as server:
        body = {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 900,
            "ignore_eos": True,
            "stream": True,
        }
        with server.client.stream("POST", "/v1/chat/completions", json=body) as held:
            next(held.iter_lines())
            monkeypatch.delattr("volley.serve.template.ChatTemplate.render")
            assert server.post("chat/completions", body).status_code == 429


@pytest.mark.parametrize(
    "path", ["/health", "/ping", "/ready", "/version", "/metrics", "/v1/models", f"/v1/models/{MODEL}"]
)
def test_load_balancers_may_ask_without_a_body(server: Running, path: str) -> None:
    asked, head = server.client.get(path), server.client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == asked.headers["content-type"]
    assert asked.content


def test_the_memory_that_is_held(server: Running, tiny_pair: TinyPair) -> None:
    held = {
        part: server.metrics()[f'volley:memory_bytes{{part="{part}"}}']
        for part in ("target", "drafter", "kv", "draft_kv")
    }
    assert held["target"] == sum(weight.nbytes for weight in server.engine.target.model.parameters())
    holds = server.engine.snapshot()
    assert held["kv"] == holds.num_pages * 16 * 4 * 2 * 2 * 8 * 4, "layers, K and V, heads, sizes, bytes"
    assert held["draft_kv"] > 0
    assert held["drafter"] > 0


@pytest.mark.slow
def test_graphs_are_captured_before_a_server_listens(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cuda_graphs" not in Service(tiny.engine(), ServeConfig(), MODEL).memory
    monkeypatch.setattr(capacity, "find_device", lambda _: Device("cuda"))
    engine = tiny.engine(max_running=2, policy="fixed")
    service = Service(engine, ServeConfig(), MODEL)
    assert engine.core.runner.passes is not None
    decoding = engine.core.runner.passes.num_graphs
    assert decoding == service.memory["cuda_graphs"] == 22, "of one request, of two, and of their prompts"
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert engine.core.runner.passes.num_graphs == decoding
    assert service.memory["cuda_graphs_seconds"] >= 0
    assert {"target_mib", "kv_mib", "graphs_mib"} <= service.memory.keys()
    graphs = service.metrics.memory.labels("graphs")
    graphs.set(0)
    service.metrics.state(engine)
    assert graphs._value.get() == graph_bytes(engine.core) > 0
