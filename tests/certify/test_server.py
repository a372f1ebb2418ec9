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
from volley.certify import checks
from volley.certify.certificate import certify_server
from volley.certify.checks import Check, Questions, greedy_params
from volley.certify.options import CertifyConfig
from volley.certify.subject import NotOffered, Reply, ServerFailure, ServerSubject, TooBusy
from volley.cli import app
from volley.errors import EndpointError
from volley.types import SamplingParams

PROMPTS = ["Once upon a time", "The cat sat on", "Two birds fly over", "Rain fell while"]
QUICK = CertifyConfig(bias=0.45, max_tokens=12, prompts_used=4)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tokens of the tiny target are parts of characters: more rounds would only take longer."""
    monkeypatch.setattr("volley.certify.sampled.MOST_ROUNDS", 10)


@pytest.fixture(scope="module")
def tiny(tiny_pair: TinyPair) -> Tiny:
    return Tiny(tiny_pair)


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
    for name in ("greedy", "sampled", "sampled at T = 0.6", "n", "seeds", "json"):
        assert outcomes[name] == "passed"
    assert "<h1>lossless</h1>" in (tmp_path / "certificate.html").read_text()


def test_a_server_that_forgets_top_p_is_caught(tiny: Tiny) -> None:
    engine = tiny.engine(policy="fixed")
    answer_by(engine, TopPIgnored(engine.config))
    with running(engine) as server:
        assert certify_server(f"{server.url}/v1", PROMPTS, QUICK, say=lambda _: None).finding == "top_p is ignored"


def test_a_server_may_refuse_several_answers(tiny: Tiny) -> None:
    with running(tiny.plain) as server, closing(ServerSubject(f"{server.url}/v1", None, None)) as subject:
        assert subject.choices(PROMPTS[0], greedy_params(4), 1000) is None
        found = subject.choices(PROMPTS[0], greedy_params(4), 2)
        assert found is not None
        assert len(found) == 2


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
        assert found.checks[-1].name == "json", "the others were made"
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
            subject.choices(PROMPTS[0], greedy_params(4), 2)


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


def test_few_sampled_tokens_decide_nothing(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("volley.certify.sampled.MOST_ROUNDS", 1)
    with running(tiny.plain) as server:
        few = CertifyConfig(bias=0.01, max_tokens=8, prompts_used=2)
        found = certify_server(f"{server.url}/v1", PROMPTS, few, say=lambda _: None)
    outcomes = {check.name: check.outcome for check in found.checks}
    assert outcomes["sampled"] == "not judged"
    assert found.verdict == "undecided"
