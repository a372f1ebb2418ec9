"""schemathesis on the server's own OpenAPI document: whatever it makes of it, the server does not fail."""

import contextlib
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from tests.serve.running import Running, Tiny, running

EXAMPLES = 8


@pytest.fixture(scope="module")
def server(tiny: Tiny) -> Iterator[Running]:
    """Short contexts and few requests at once, so that no example asks for much."""
    with running(tiny.engine(num_pages=4, max_running=4), max_waiting=0) as server:
        yield server
        server.settle()


@pytest.mark.slow
@pytest.mark.parametrize("mode", GenerationMode)
def test_no_operation_fails(server: Running, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses: list[int] = []
    for operation in schema.get_all_operations():

        @settings(max_examples=EXAMPLES)
        @given(case=operation.ok().as_strategy(generation_mode=mode))
        def check(case: schemathesis.Case) -> None:
            response = case.call_and_validate(checks=[not_a_server_error], timeout=30)
            statuses.append(response.status_code)

        with contextlib.suppress(Unsatisfiable):  # nothing is wrong with what takes no input
            check()
    if mode == GenerationMode.POSITIVE:
        assert statuses.count(200) > 5
    else:
        assert statuses.count(400) > EXAMPLES


def test_the_document_covers_every_endpoint(server: Running) -> None:
    document = server.client.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/models/{model}",
        "/health",
        "/ping",
        "/ready",
        "/metrics",
        "/version",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
    }
    assert "422" not in document["paths"]["/v1/completions"]["post"]["responses"]
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["properties"]["temperature"]["maximum"] == 2
