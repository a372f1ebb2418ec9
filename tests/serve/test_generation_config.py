"""A model's own sampling defaults in the server: in force where a request says nothing."""

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import GenerationConfig

from tests.serve.running import Running, Tiny, running
from tests.serve.test_openai_client import CHAT
from volley.serve.protocol import CompletionRequest

OWN = {"do_sample": True, "temperature": 0.8, "top_k": 5, "repetition_penalty": 1.3, "max_new_tokens": 7}


@pytest.fixture(scope="module", autouse=True)
def _own(tiny: Tiny) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny.target.model, "generation_config", GenerationConfig(**OWN))
        yield


@pytest.fixture(scope="module")
def server(tiny: Tiny, _own: None) -> Iterator[Running]:
    with running(tiny.engine()) as server:
        yield server
        server.settle()


def text(server: Running, **body: Any) -> str:
    response = server.post("chat/completions", {"messages": CHAT, "seed": 3, **body})
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def test_fields_that_a_request_leaves_out_are_the_models(server: Running, tiny: Tiny) -> None:
    own = {"temperature": 0.8, "top_k": 5, "repetition_penalty": 1.3}
    assert text(server) == tiny.answer(CHAT, seed=3, max_tokens=7, **own)
    assert text(server, temperature=None, top_k=None) == text(server)
    assert text(server, max_tokens=12) == tiny.answer(CHAT, seed=3, max_tokens=12, **own)
    completed = server.complete("Hello", seed=3).json()["choices"][0]["text"]
    assert completed == tiny.answer("Hello", seed=3, max_tokens=16, **own)
    response = server.post("responses", {"input": CHAT, "seed": 3}).json()
    assert response["output"][0]["content"][0]["text"] == text(server)
    assert (response["temperature"], response["top_p"]) == (0.8, 1.0)


@pytest.mark.parametrize("given", [{"temperature": 1.0}, {"top_k": 0}, {"repetition_penalty": 1.0}, {"top_p": 0.4}])
def test_a_field_of_the_request_wins(server: Running, tiny: Tiny, given: dict[str, Any]) -> None:
    """Even one with the value that it would have without a default of the model's."""
    own = {"temperature": 0.8, "top_k": 5, "repetition_penalty": 1.3} | given
    assert text(server, **given) == tiny.answer(CHAT, seed=3, max_tokens=7, **own)
    response = server.post("responses", {"input": CHAT, "seed": 3, **given}).json()
    assert response["output"][0]["content"][0]["text"] == text(server, **given)


def test_drafts_have_the_temperature_that_a_request_gives_them(server: Running) -> None:
    asked = CompletionRequest(prompt="Hello", temperature=1.0, draft_temperature=0.25).sampling(4, None)
    assert (asked.temperature, asked.draft_temperature) == (1.0, 0.25)
    assert CompletionRequest(prompt="Hello").sampling(4, None).draft_temperature is None
    assert server.complete("Hello", draft_temperature=-1).json()["error"]["param"] == "draft_temperature"
    assert server.complete("Hello", seed=3, draft_temperature=0).status_code == 200


@pytest.mark.slow
def test_none_goes_without(tiny: Tiny) -> None:
    with running(tiny.engine(), generation_config="none") as server:
        assert text(server, max_tokens=12) == tiny.answer(CHAT, seed=3, max_tokens=12, temperature=1.0)
        server.settle()


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "want"), [("auto", {"temperature": 0.8, "top_k": 5}), ("none", {})])
def test_the_log_says_what_is_in_force(
    tiny: Tiny, caplog: pytest.LogCaptureFixture, choice: str, want: dict[str, Any]
) -> None:
    with caplog.at_level("INFO", "volley.serve"), running(tiny.engine(), generation_config=choice):
        pass
    (record,) = [record for record in caplog.records if record.message == "listening"]
    told = {"repetition_penalty": 1.3, "max_tokens": 7} | want if want else {}
    assert record.fields["sampling"] == told  # type: ignore[attr-defined]
