"""A server's acceptance by position, beside the expected one."""

from pathlib import Path

import httpx
import pytest
import torch
from typer.testing import CliRunner

from tests.doctor.answers import QUESTIONS, TARGET, write_answers
from tests.serve.running import running
from volley import Engine
from volley.cli import app
from volley.doctor.counters import Counters, parse_counters, read_counters
from volley.doctor.diagnosis import Doctor
from volley.errors import InputError
from volley.files import REFERENCE

DRAFTER = REFERENCE / "drafter-dflash"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_answers(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture(scope="module")
def physician(rows: Path) -> Doctor:
    return Doctor(TARGET, DRAFTER, [rows])


def sample(name: str, value: float, program: str = "volley", **labels: object) -> str:
    named = ",".join(f'{key}="{label}"' for key, label in {"model_name": "m", **labels}.items())
    return f"{program}:spec_decode_num_{name}_total{{{named}}} {value}\n"


def test_positions_are_shares_of_the_drafts_that_reached_them() -> None:
    text = sample("drafts", 200.0) + sample("accepted_tokens_per_pos", 150.0, position=0)
    text += sample("accepted_tokens_per_pos", 30.0, position=1) + sample("accepted_tokens_per_pos", 5.0, position=2)
    reached = [sample("draft_tokens_per_pos", count, position=at) for at, count in enumerate((200.0, 60.0, 10.0))]
    assert parse_counters(text + "".join(reached), "here") == Counters(200, [0.75, 0.5])  # 10 drafts are too few
    vllms = text.replace("volley:", "vllm:")
    whole = sample("draft_tokens", 600.0, "vllm")
    assert parse_counters(vllms + whole, "here") == Counters(200, [0.75, 0.15, 0.025])
    with pytest.raises(InputError, match=r"drafts of different lengths .*--policy fixed"):
        parse_counters(vllms + sample("draft_tokens", 450.0, "vllm"), "here")


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(InputError, match="counted 0 drafts, too few"):
        parse_counters("# nothing\n", "here")
    two = sample("drafts", 50.0) + sample("drafts", 50.0).replace('"m"', '"n"')
    with pytest.raises(InputError, match=r"2 models \(m, n\); ask a server of one"):
        parse_counters(two, "here")
    with pytest.raises(InputError, match="name a server like"):
        read_counters("http://127.0.0.1:9")


@pytest.mark.slow
def test_a_server_of_the_pair_has_the_expected_curve(rows: Path, physician: Doctor) -> None:
    engine = Engine.from_pretrained(drafter=DRAFTER, dtype=torch.float32, policy="fixed")
    with running(engine) as server:
        for question in QUESTIONS:
            body = {"messages": [{"role": "user", "content": question}], "max_tokens": 40, "temperature": 0}
            httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
        counters = read_counters(f"{server.url}/v1")
        given = ["doctor", "--target", TARGET, "--drafter", str(DRAFTER), "--data", str(rows), "--no-decode"]
        output = CliRunner().invoke(app, [*given, "--metrics", server.url]).output
    assert counters.acceptance == pytest.approx(physician.as_it_is.acceptance[: len(counters.acceptance)], abs=0.06)
    assert "served acceptance" not in output
    assert f"kept by position: {counters.acceptance[0]:.2f}" in output


@pytest.mark.slow
def test_a_server_that_keeps_less_is_named(physician: Doctor) -> None:
    poor = Counters(500, [share / 2 for share in physician.as_it_is.acceptance])
    assert [finding.name for finding in physician.examine(counters=poor).findings] == ["served acceptance"]
