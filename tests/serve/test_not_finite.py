"""Requests whose logits are not finite: an error for each, whole and streamed, a metric, and others that go on."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tests.conftest import TinyPair
from tests.serve.running import Running, running
from volley import Engine
from volley.models.targets.target import Target

NO_BAD: dict[str, object] = {"max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def spoilt(tiny_pair: TinyPair) -> Iterator[Running]:
    """A server of a target for which the activations of the letter Z are NaN."""
    target = Target.from_pretrained(tiny_pair.target, dtype=torch.float32)
    assert target.tokenizer is not None
    (bad,) = target.tokenizer.encode("Z", add_special_tokens=False)

    def spoil(_: object, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output.masked_fill((given[0] == bad).unsqueeze(-1), torch.nan)

    target.model.get_input_embeddings().register_forward_hook(spoil)
    NO_BAD["logit_bias"] = {str(bad): -100}
    with running(Engine(target)) as server:
        yield server
        server.settle()


def test_a_spoilt_request_is_a_server_error(spoilt: Running) -> None:
    before = spoilt.metrics().get("volley:request_not_finite_total", 0)
    for reply in (spoilt.complete("a Z b", **NO_BAD), spoilt.chat("a Z b", **NO_BAD)):
        assert reply.status_code == 500
        error = reply.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "not_finite")
        assert "not finite" in error["message"]
    metrics = spoilt.metrics()
    assert metrics["volley:request_not_finite_total"] == before + 2
    assert metrics['volley:request_success_total{finished_reason="error"}'] == before + 2


@pytest.mark.parametrize("begins", [False, True])
def test_in_a_stream_the_error_is_an_event(spoilt: Running, begins: bool) -> None:
    """The bad logits are those of the first token, or those behind a Z that the request was made to write."""
    bias = {token: -value for token, value in NO_BAD["logit_bias"].items()}  # type: ignore[attr-defined]
    body = {**NO_BAD, "prompt": "ab", "logit_bias": bias} if begins else {**NO_BAD, "prompt": "a Z b"}
    with spoilt.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        text = reply.read().decode()
        assert reply.status_code == (200 if begins else 500)
    if not begins:
        assert json.loads(text)["error"]["code"] == "not_finite"
        return
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert json.loads(events[0])["choices"][0]["text"] == "Z"
    assert json.loads(events[-2])["error"]["code"] == "not_finite"
    assert events[-1] == "[DONE]"


def test_others_beside_it_and_after_it_are_answered_as_before(spoilt: Running) -> None:
    prompts = ["one " * size for size in (1, 5, 9, 20)]
    want = [spoilt.complete(prompt, **NO_BAD).json()["choices"][0]["text"] for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        bad = [pool.submit(spoilt.complete, "a Z b " * size, **NO_BAD) for size in (1, 7)]
        good = [pool.submit(spoilt.complete, prompt, **NO_BAD) for prompt in prompts]
    assert [reply.result().json()["choices"][0]["text"] for reply in good] == want
    assert {reply.result().status_code for reply in bad} == {500}
    assert [spoilt.complete(prompt, **NO_BAD).json()["choices"][0]["text"] for prompt in prompts] == want


def test_all_choices_of_a_request_end_with_it(spoilt: Running) -> None:
    reply = spoilt.post(
        "completions", {"prompt": ["good", "a Z b", "fine"], "n": 2, **NO_BAD, "temperature": 1, "max_tokens": 40}
    )
    assert reply.status_code == 500
    spoilt.settle()


@pytest.mark.slow
def test_a_stop_string_that_spells_a_special_token_over_http(tiny_pair: TinyPair) -> None:
    target = Target.from_pretrained(tiny_pair.target, dtype=torch.float32)
    assert target.tokenizer is not None
    specials = [(token, own.content) for token, own in target.tokenizer.added_tokens_decoder.items() if own.special]
    token, content = next(pair for pair in specials if pair[0] not in target.stop_token_ids)
    with running(Engine(target)) as server:
        for skips in (True, False):
            body = {"max_tokens": 6, "stop": [content], "logit_bias": {str(token): 100}, "skip_special_tokens": skips}
            (choice,) = server.complete("ab", **body).json()["choices"]
            assert (choice["finish_reason"], choice["text"]) == ("stop", "")
