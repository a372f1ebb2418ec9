"""The model of a server: found by its name, and refused once its engine has died."""

import pytest

from tests.serve.running import MODEL, Tiny, running
from volley.engine.step import Step

ASK = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}


def test_a_name_that_is_not_there(tiny: Tiny) -> None:
    with running(tiny.engine(policy="fixed")) as server:
        cards = server.client.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == [MODEL] == [server.client.get(f"/v1/models/{MODEL}").json()["id"]]
        assert server.post("completions", ASK).status_code == 200, "a request need not name it"
        for unknown in (
            server.post("completions", {"model": "tinny", **ASK}),
            server.client.post("/tokenize", json={"model": "tinny", "prompt": "Hello"}),
            server.client.get("/v1/models/tinny"),
            server.client.get("/tokenizer_info?model=tinny"),
        ):
            assert unknown.status_code == 404
            assert f"did you mean {MODEL!r}?" in unknown.json()["error"]["message"]


def test_an_engine_that_dies(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(step: Step) -> None:
        raise KeyboardInterrupt("not even an exception")

    with running(tiny.engine(policy="fixed")) as server:
        monkeypatch.setattr(server.engine.core.runner, "forward", broken)
        assert server.post("completions", {"model": MODEL, **ASK}).status_code == 503
        assert server.post("completions", {"model": MODEL, **ASK}).json()["error"]["code"] == "engine_dead"
        health = server.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "the engine has stopped")
        assert server.client.get("/ready").status_code == 503
