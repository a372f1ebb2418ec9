"""A server is certified as a black box: a lossless one passes, and one that forgets a parameter is caught."""

import json
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tests.certify.faults import TopPIgnored, answer_by
from tests.conftest import TinyPair
from tests.serve.running import Tiny, running
from volley import Engine, __version__
from volley.certify import checks
from volley.certify.certificate import Certificate, certify_server
from volley.certify.checks import TIE, Check, Questions, greedy_params
from volley.certify.options import CertifyConfig
from volley.certify.subject import NotOffered, Reply, ServerFailure, ServerSubject, TooBusy
from volley.cli import app
from volley.errors import EndpointError
from volley.params import SamplingParams

PROMPTS = ["Once upon a time", "The cat sat on", "Two birds fly over", "Rain fell while"]
QUICK = CertifyConfig(bias=0.45, max_tokens=12, prompts_used=4)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tokens of the tiny target are parts of characters: more rounds would only take longer."""
    monkeypatch.setattr("volley.certify.sampled.MOST_ROUNDS", 10)


@pytest.fixture(scope="module")
def tiny(tiny_pair: TinyPair) -> Tiny:
    return Tiny(tiny_pair)


@pytest.mark.slow
def test_a_lossless_server_passes_beside_plain_decoding(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("volley.certify.sampled.MOST_ROUNDS", 60)
    asked = tmp_path / "prompts.jsonl"
    several = [f"{text} {more}".strip() for text in PROMPTS for more in ("", "and", "then")]  # for seeds to be judged
    asked.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in several))
    with running(tiny.engine(policy="fixed")) as server, running(tiny.plain) as plain:
        args = [
            "certify",
            f"{server.url}/v1",
            "--plain",
            f"{plain.url}/v1",
            "--prompts",
            str(asked),
            "--out",
            str(tmp_path),
        ]
        result = CliRunner().invoke(app, [*args, "--bias", "0.45", "--max-tokens", "12"])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "certificate.json").read_text())
    assert found["verdict"] == "lossless"
    outcomes = {check["name"]: check["outcome"] for check in found["checks"]}
    for name in ("greedy", "sampled", "sampled at T = 0.6", "seeds"):
        assert outcomes[name] == "passed"
    assert outcomes["prefix cache"] == "passed"
    facts = {check["name"]: check["facts"] for check in found["checks"]}
    assert facts["prefix cache"]["cached_tokens"] > 1000
    assert 0 < facts["sampled at T = 0.6"]["finds"] < 1
    assert facts["sampled at T = 0.6"]["power"] == 0.9
    told = {"version": __version__, "plain_version": __version__, "top_logprobs": 20, "tie": TIE}
    assert told.items() <= found["subject"].items()


@pytest.mark.slow
def test_a_server_that_forgets_top_p_is_caught(tiny: Tiny) -> None:
    engine = tiny.engine(policy="fixed")
    answer_by(engine, TopPIgnored(engine.config))
    with running(engine) as server:
        assert certify_server(f"{server.url}/v1", PROMPTS, QUICK, say=lambda _: None).finding == "top_p is ignored"


@pytest.mark.slow
def test_a_server_that_breaks_down_has_failed_what_it_was_asked(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over one parameter, and then over everything."""
    ask = ServerSubject.ask

    def break_down(self: ServerSubject, prompts: Any, params: Any, concurrency: int = 1) -> list[Reply]:
        if isinstance(params, SamplingParams) and params.top_k:
            raise ServerFailure("HTTP 500")
        return ask(self, prompts, params, concurrency)

    monkeypatch.setattr(ServerSubject, "ask", break_down)
    monkeypatch.setattr("volley.certify.sampled.MOST_ROUNDS", 1)
    few = CertifyConfig(bias=0.45, max_tokens=8, prompts_used=2)
    with running(tiny.plain) as server:
        found = certify_server(f"{server.url}/v1", PROMPTS, few, say=lambda _: None)
        assert [check.name for check in found.failed] == ["top_k"]
        assert "the server broke down: HTTP 500" in found.failed[0].detail
        assert found.finding == "top_k: the server breaks down"
        assert found.checks[-1].name == "seeds", "the others were made"
        monkeypatch.setattr(ServerSubject, "is_there", lambda self: False)
        gone = certify_server(f"{server.url}/v1", PROMPTS, few, say=lambda _: None)
    assert gone.checks[-1].name == "top_k"


def test_nobody_there() -> None:
    with pytest.raises(EndpointError, match="is an OpenAI-compatible server there"):
        certify_server("http://127.0.0.1:9/v1", PROMPTS, QUICK)


def test_a_busy_server_is_asked_again_and_not_called_broken(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([429, 503, 200, 503, 429])
    monkeypatch.setattr("volley.certify.subject.PATIENCE", 1.2)

    def respond(request: httpx.Request) -> httpx.Response:
        return httpx.Response(next(answers), json={"data": [{"id": "m"}]}, headers={"retry-after": "0"})

    monkeypatch.setattr(
        "volley.certify.subject.httpx.Client", partial(httpx.Client, transport=httpx.MockTransport(respond))
    )
    with closing(ServerSubject("http://h/v1")) as subject:
        assert subject.model == "m"
        monkeypatch.setattr("volley.certify.subject.PATIENCE", 0.6)
        with pytest.raises(TooBusy, match="HTTP 429"):
            subject.ask(PROMPTS[:1], greedy_params(4))


@pytest.mark.parametrize("most", [20, 5, 1, 0])
def test_a_server_that_gives_fewer_log_probabilities_is_asked_for_these(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/version":
            return httpx.Response(404, headers={"server": "another"})
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "m", "max_model_len": 512}]})
        if json.loads(request.content)["logprobs"] > most:
            return httpx.Response(400)
        logprobs = {"tokens": ["a"], "top_logprobs": [{"a": -0.1}]}
        return httpx.Response(200, json={"choices": [{"text": "a", "logprobs": logprobs}], "usage": {}})

    monkeypatch.setattr(
        "volley.certify.subject.httpx.Client", partial(httpx.Client, transport=httpx.MockTransport(respond))
    )
    with closing(ServerSubject("http://h/v1")) as subject:
        subject.find_top("Hello")
        assert (subject.top, subject.context_length, subject.software()) == (most or 20, 512, {"server": "another"})
        if most:
            assert subject.ask(["Hello"], greedy_params(4))[0].cached is None


def test_chats_are_encoded_whole_for_a_pair_and_refused_for_a_server(
    tiny: Tiny, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
    asked = tmp_path / "prompts.jsonl"
    asked.write_text(json.dumps({"messages": messages}) + "\n")
    given: list[list[int]] = []

    def certified(engine: Engine, prompts: list[list[int]], *_: Any) -> Certificate:
        given.extend(prompts)
        return Certificate({}, [], {})

    monkeypatch.setattr("volley.certify.certificate.certify_pair", certified)
    args = ["certify", "--prompts", str(asked), "--out", str(tmp_path)]
    CliRunner().invoke(app, [*args, "--target", str(tiny_pair.target), "--drafter", str(tiny_pair.drafter)])
    assert given == [tiny.plain.encode(messages)]
    refused = CliRunner().invoke(app, [*args, "http://127.0.0.1:9/v1"])
    assert "give rows of 'prompt', or certify the pair here" in str(refused.exception)


@pytest.mark.slow
def test_what_a_busy_server_does_not_answer_is_not_judged(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = ServerSubject.ask

    def turn_away(self: ServerSubject, prompts: Any, params: Any, concurrency: int = 1) -> list[Reply]:
        if concurrency == 32:
            raise TooBusy("HTTP 429")
        return ask(self, prompts, params, concurrency)

    monkeypatch.setattr(ServerSubject, "ask", turn_away)
    with running(tiny.plain) as server:
        found = certify_server(f"{server.url}/v1", PROMPTS, QUICK, say=lambda _: None)
    outcomes = {check.name: check.outcome for check in found.checks}
    assert outcomes["concurrency 32"] == "not judged"
    assert "FAILED" not in outcomes.values()


@pytest.mark.slow
def test_a_field_that_plain_decoding_ignores_as_well_is_not_offered(tiny: Tiny) -> None:
    verdicts = []
    for plain_ignores in (True, False):
        engine, plain = tiny.engine(policy="fixed"), tiny.engine(policy="fixed:1")
        for each in (engine, *([plain] if plain_ignores else [])):
            answer_by(each, TopPIgnored(each.config))
        with running(engine) as server, running(plain) as beside:
            urls = (f"{one.url}/v1" for one in (server, beside))
            found = certify_server(next(urls), PROMPTS, QUICK, plain=next(urls), say=lambda _: None)
        verdicts.append({check.name: check.outcome for check in found.checks}["top_p"])
    assert verdicts == ["not judged", "FAILED"]


@pytest.mark.slow
@pytest.mark.parametrize("refusal", [TooBusy("HTTP 429"), NotOffered("HTTP 400")])
def test_plain_decoding_that_does_not_answer_excuses_no_server(
    tiny: Tiny, refusal: EndpointError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(questions: Questions, name: str, **_: Any) -> Check:
        if questions.plain is questions.subject:
            raise refusal
        return Check(name, False, "planted")

    monkeypatch.setattr(checks, "check_narrow", check)
    few = CertifyConfig(bias=0.45, max_tokens=8, prompts_used=1)
    with running(tiny.plain) as server:
        url = f"{server.url}/v1"
        found = certify_server(url, PROMPTS, few, plain=url, say=lambda _: None)
    assert {"top_k", "top_p"} <= {check.name for check in found.failed}


@pytest.mark.slow
def test_few_sampled_tokens_decide_nothing(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("volley.certify.sampled.MOST_ROUNDS", 1)
    with running(tiny.plain) as server:
        few = CertifyConfig(bias=0.01, max_tokens=8, prompts_used=2)
        found = certify_server(f"{server.url}/v1", PROMPTS, few, say=lambda _: None)
    outcomes = {check.name: check.outcome for check in found.checks}
    assert outcomes["sampled"] == "not judged"
    assert found.verdict == "undecided"
