"""Load on a server: what is counted, in both loops, and what a server that fails looks like."""

import asyncio
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.conftest import TinyPair
from tests.serve.running import Running, Tiny, running
from tests.test_cli import run
from volley.bench.load import Level, LoadConfig, Sample, percentiles, run_level, run_load, to_markdown
from volley.errors import ConfigError, EndpointError
from volley.prompts import Conversation

PROMPTS = [Conversation(f"p/{i}", ({"role": "user", "content": text},)) for i, text in enumerate(("Hello", "Bye"))]


@pytest.fixture(scope="module")
def server(tiny_pair: TinyPair) -> Iterator[Running]:
    tiny = Tiny(tiny_pair)
    for prompt in PROMPTS:
        tiny.answer(list(prompt.messages), max_tokens=20)
    with running(tiny.engine(policy="fixed", max_running=8), max_waiting=0) as server:
        yield server


def test_tokens_of_a_canvas_come_at_once() -> None:
    """So the time of each is that of the whole answer; otherwise the first token's is left out."""
    one_by_one = Sample(started=0.0, first=1.0, total=3.0, gaps=[], tokens=5)
    assert one_by_one.seconds_per_token == 0.5
    assert replace(one_by_one, has_canvases=True).seconds_per_token == 0.6


def test_closed_and_open_loops(server: Running) -> None:
    seen: list[tuple[str, int]] = []
    config = LoadConfig(url=server.url, concurrencies=(1, 3), rates=(200.0,), requests=7, max_tokens=20)
    levels = run_load(config, PROMPTS, lambda *progress: seen.append(progress))
    assert [level.label for level in levels] == ["1 at once", "3 at once", "200 a second"]
    assert seen[:7] == [("1 at once", done) for done in range(1, 8)]
    for level in levels:
        summary = level.summary()
        assert summary["requests"] == 7
        assert summary["errors"] == 0
        assert summary["output_tokens_per_second"] == pytest.approx(140 / level.seconds)
        assert summary["acceptance_length"] > 1.5
        for sample in level.samples:
            assert 0 < sample.first <= sample.total
            assert sample.tokens == 20
            assert sum(sample.gaps) <= sample.total
    one_after_another = levels[0].samples
    assert all(a.started + a.total <= b.started for a, b in itertools.pairwise(one_after_another))
    assert to_markdown(levels).count("\n") == 5


def test_open_loop_arrivals_are_exponential(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[float] = []
    inner = random.Random.expovariate
    monkeypatch.setattr(random.Random, "expovariate", lambda self, rate: drawn.append(inner(self, rate)) or drawn[-1])
    (level,) = run_load(LoadConfig(url=server.url, rates=(50.0,), requests=20, max_tokens=1), PROMPTS)
    starts = sorted(sample.started for sample in level.samples)
    assert starts[-1] >= sum(drawn[:-1]) * 0.9
    assert 0.2 < sum(drawn) < 0.9


@pytest.mark.slow
def test_errors_are_counted_and_left_out_of_the_times(server: Running) -> None:
    config = LoadConfig(url=server.url + "/v1/", rates=(5000.0,), requests=30, max_tokens=200, raw=True)
    (level,) = run_load(config, PROMPTS)
    summary = level.summary()
    assert 0 < summary["errors"] < 30, "8 fit, the rest is refused"
    assert all("HTTP 429" in sample.error for sample in level.samples if sample.error)


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(EndpointError, match="does not list its models"):
        run_load(LoadConfig(url="http://127.0.0.1:9", concurrencies=(1,)), PROMPTS)
    with pytest.raises(EndpointError, match="did not answer"):
        run_load(LoadConfig(url="http://127.0.0.1:9", concurrencies=(1,), model="m"), PROMPTS)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"url": "localhost:80"}, "is not a URL"),
        ({"url": "http://h", "rates": (0.0,)}, "more than 0 requests a second"),
        ({"url": "http://h", "concurrencies": (0,)}, "at least 1"),
        ({"url": "http://h", "requests": 0}, "at least 1"),
    ],
)
def test_bad_options_are_named(bad: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoadConfig(**bad)  # type: ignore[arg-type]


METRICS = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0"}} {0}.0
vllm:spec_decode_num_drafts_total{{engine="1"}} 5.0
vllm:spec_decode_num_drafts_created{{engine="0"}} 1.79e+09
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {1}.0
"""


def test_acceptance_is_counted_by_vllms_own_counters() -> None:
    """On a server that says in no answer how long acceptances were."""
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if request.url.path == "/metrics":
            count = asked.count("/v1/chat/completions")
            return httpx.Response(200, text=METRICS.format(2 * count, 5 * count))
        return httpx.Response(200, text='data: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: [DONE]\n\n')

    async def level() -> Level:
        levels: list[Level] = []
        config = LoadConfig(url="http://server", model="m", requests=4)
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            await run_level(config, client, [{}], "closed", 2, lambda *_: None, levels)
        return levels[0]

    assert asyncio.run(level()).summary()["acceptance_length"] == 1 + 5 / 2


def test_percentiles() -> None:
    assert percentiles([float(i) for i in range(101)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([]) == {"p50": 0.0, "p90": 0.0, "p99": 0.0}


def test_the_command(server: Running, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "Hello"}\n')
    table, errors = run(
        "bench", "--server", server.url, "--datasets", file, "--concurrency", 2, "--requests", 4, "--max-tokens", 8,
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert "| 2 at once | 4 | 0 |" in table
    assert "2 at once: 4/4" in errors
    saved = json.loads((tmp_path / "out" / "load.json").read_text())
    assert len(saved["levels"][0]["samples"]) == 4
    assert (tmp_path / "out" / "load.md").exists()
