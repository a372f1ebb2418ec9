"""A diffusion language model behind the server, asked by OpenAI's client."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests import tiny
from tests.conftest import byte_tokenizer
from tests.procedures.test_denoising import BOTH_WAYS
from tests.serve.browser import BROWSER, open_page
from tests.serve.running import MODEL, Running, running
from volley import DiffusionParams, Engine, SamplingParams
from volley.models.targets.block_diffusion import BlockDiffusion
from volley.models.targets.families import JOINT
from volley.models.targets.target import Target
from volley.procedures.denoising import diffusion_of
from volley.procedures.request import Request
from volley.results import GenerationStats
from volley.serve.metrics import Metrics

OWN = {"canvas_length": 8, "threshold": 0.3}
PROMPT = "Hello there"


def engine_of(family: BlockDiffusion, **options: Any) -> Engine:
    hf = tiny.eager_model(tiny.target_config(vocab_size=260, num_hidden_layers=2))
    return Engine(Target(hf, byte_tokenizer(), replace(family, mask_token_id=3)), page_size=8, **options)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of(BOTH_WAYS)


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Running]:
    with running(engine) as server:
        yield server
        server.settle()


def answer(engine: Engine, **changes: object) -> str:
    values = {"max_tokens": 30, "temperature": 0.8, "seed": 4, "diffusion": DiffusionParams(**OWN), **changes}  # type: ignore[arg-type]
    (result,) = Engine(engine.target, page_size=8).generate(PROMPT, SamplingParams(**values))  # type: ignore[arg-type]
    return result.text


def test_answers_whole_and_streamed_are_the_engines(client: OpenAI, engine: Engine) -> None:
    want = answer(engine)
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 30, "temperature": 0.8, "seed": 4}
    whole = client.completions.create(**asked, extra_body={"diffusion": OWN})  # type: ignore[call-overload]
    assert whole.choices[0].text == want
    details = whole.usage.completion_tokens_details
    assert details.denoising_steps > 0
    assert details.tokens_per_pass == pytest.approx(30 / details.denoising_steps, abs=1e-4)
    stream = client.completions.create(**asked, stream=True, extra_body={"diffusion": OWN})  # type: ignore[call-overload]
    pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == want
    assert len(pieces) <= 6, "text comes a block at a time"


def test_drafts_arrive_if_asked_for_and_never_as_text(client: OpenAI, engine: Engine) -> None:
    own = {**OWN, "stream_drafts": True}
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 30, "temperature": 0.8, "seed": 4, "stream": True, "n": 2}
    options = {"stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(**asked, **options, extra_body={"diffusion": own}))  # type: ignore[call-overload]
    drafts = [chunk.draft for chunk in chunks if hasattr(chunk, "draft")]
    assert {draft["index"] for draft in drafts} == {0, 1}
    assert all(chunk.choices == [] for chunk in chunks if hasattr(chunk, "draft"))
    assert any("░" in draft["text"] and None in draft["token_ids"] for draft in drafts)
    assert all(len(draft["token_ids"]) <= 8 for draft in drafts)
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices and chunk.choices[0].index == 0)
    assert text == answer(engine)
    details = chunks[-1].usage.completion_tokens_details
    assert details.denoising_steps / 2 < len(drafts) < details.denoising_steps, "a canvas' last pass is text"
    for index in (0, 1):
        shown = [(draft["text"], draft["token_ids"]) for draft in drafts if draft["index"] == index]
        assert all(before != after for before, after in pairwise(shown)), (
            "what is behind the end of an answer shows nothing"
        )
    chat = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 20, "stream": True}
    talk = list(client.chat.completions.create(**chat, extra_body={"diffusion": own}))  # type: ignore[call-overload]
    assert any(hasattr(chunk, "draft") for chunk in talk)
    for diffusion, wanted in ((OWN, False), ({"mode": "self", "max_steps": 1, "stream_drafts": True}, True)):
        chunks = list(client.completions.create(**asked, extra_body={"diffusion": diffusion}))  # type: ignore[call-overload]
        assert any(hasattr(chunk, "draft") for chunk in chunks) is wanted


def test_responses_have_canvases_too(client: OpenAI) -> None:
    """Drafts are events of their own, in order with the others, and the client's own helper passes them on."""
    asked = {"model": MODEL, "input": PROMPT, "max_output_tokens": 20, "temperature": 0.8}
    seeded = {"seed": 4, "diffusion": OWN}
    whole = client.responses.create(**asked, extra_body=seeded)  # type: ignore[call-overload]
    chat = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 20, "temperature": 0.8}
    (choice,) = client.chat.completions.create(**chat, extra_body=seeded).choices  # type: ignore[call-overload]
    assert whole.output_text == choice.message.content != ""
    assert whole.usage.output_tokens_details.denoising_steps > 0
    drawn = {"seed": 4, "diffusion": {**OWN, "stream_drafts": True}}
    with client.responses.stream(**asked, extra_body=drawn) as stream:  # type: ignore[call-overload]
        events = list(stream)
    drafts = [event for event in events if event.type == "response.draft"]
    assert any("░" in draft.text and None in draft.token_ids for draft in drafts)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    plain = list(client.responses.create(**asked, stream=True, extra_body=seeded))  # type: ignore[call-overload]
    assert not any(event.type == "response.draft" for event in plain)
    with pytest.raises(BadRequestError, match="only allowed when stream is true") as error:
        client.responses.create(**asked, extra_body=drawn)  # type: ignore[call-overload]
    assert error.value.param == "diffusion.stream_drafts"


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed: make browser")
def test_the_dashboard_shows_a_canvas_as_it_is_denoised(server: Running, tmp_path: Path) -> None:
    page = open_page(f"{server.url}/dashboard/#ask=Hello", tmp_path).stdout
    assert int(re.findall(r'data-sketches="(\d+)"', page)[0]) > 5
    assert page.count('class="sketch"') <= 1, "each gives way to text or to the next"
    server.settle()


def test_modes_n_and_log_probabilities(client: OpenAI, engine: Engine) -> None:
    for mode in ("autoregressive", "self"):
        made = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, extra_body={"diffusion": {"mode": mode}}
        )
        own = DiffusionParams(mode="autoregressive")
        assert made.choices[0].text == answer(engine, max_tokens=12, temperature=0.0, diffusion=own)
    several = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        n=3,
        max_tokens=9,
        temperature=0.8,
        seed=4,
        logprobs=2,
        extra_body={"diffusion": OWN, "ignore_eos": True},
    )
    assert several.choices[0].text == answer(engine, max_tokens=9)
    assert len({choice.text for choice in several.choices}) > 1
    for choice in several.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.token_logprobs or []) == 9


def test_a_stop_string_ends_an_answer_inside_a_block(client: OpenAI, engine: Engine) -> None:
    whole = answer(engine)
    stop = whole[11:13]
    made = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=30, temperature=0.8, seed=4, stop=stop, extra_body={"diffusion": OWN}
    )
    assert made.choices[0].text == whole[: whole.index(stop)]
    assert made.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("own", "param", "message"),
    [
        ({"treshold": 0.5}, "diffusion.treshold", "did you mean 'threshold'"),
        ({"max_steps": 0}, "diffusion.max_steps", "greater than or equal to 1"),
        ({"threshold": 3}, "diffusion.threshold", "less than or equal to 1"),
        ({"t_min": 0.9, "t_max": 0.5}, "diffusion", "is above t_max"),
        ({"strategy": "entropy_renoise"}, "diffusion.strategy", "begin with mask tokens"),
        ({"stream_drafts": True}, "diffusion.stream_drafts", "only allowed when stream is true"),
        ({"stream_drafts": 1}, "diffusion.stream_drafts", "valid boolean"),
        ("self", "diffusion", "must be an object, such as"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(client: OpenAI, own: object, param: str, message: str) -> None:
    with pytest.raises(BadRequestError, match=message) as error:
        client.completions.create(model=MODEL, prompt=PROMPT, extra_body={"diffusion": own})
    assert error.value.param == param


SHORT = replace(JOINT, defaults=replace(JOINT.defaults, canvas_length=5))
"""A family whose canvases do not divide the pool."""


@pytest.mark.slow
def test_metrics_give_tokens_per_pass_and_per_forward_of_each_mode() -> None:
    """The figures of one request of each mode side by side are those of its own statistics, and of its usage."""
    own_stats: dict[str, GenerationStats] = {}

    def note(_: object, request: Request) -> None:
        own_stats[diffusion_of(request).mode] = request.stats

    with running(engine_of(JOINT), lambda service: service.worker.on_finished.append(note)) as server:
        modes: dict[str, dict[str, object]] = {
            "diffusion": OWN,
            "self": {"mode": "self", "canvas_length": 6, "max_steps": 2},
            "autoregressive": {"mode": "autoregressive"},
        }
        asked = {"max_tokens": 24, "seed": 1, "temperature": 1.0, "ignore_eos": True}
        with ThreadPoolExecutor() as pool:
            made = pool.map(lambda own: server.complete(PROMPT, **asked, diffusion=own).json(), modes.values())
            usages = dict(zip(modes, (one["usage"]["completion_tokens_details"] for one in made), strict=True))
        server.settle()
        found = server.metrics()
    assert own_stats.keys() == modes.keys()
    # The passes of mode self depend on clocked costs, so only those of mode diffusion are the same alone.
    params = SamplingParams(**{**asked, "diffusion": OWN})  # type: ignore[arg-type]
    (alone,) = engine_of(JOINT).generate(PROMPT, params)
    assert alone.stats.denoising_steps == own_stats["diffusion"].denoising_steps
    assert "tokens_per_pass" not in usages["autoregressive"]
    assert 'volley:denoised_tokens_total{mode="autoregressive"}' not in found
    for mode in ("diffusion", "self"):
        stats = own_stats[mode]
        steps, commits, tokens = (
            found[f'volley:{name}_total{{mode="{mode}"}}']
            for name in ("denoising_steps", "commit_passes", "denoised_tokens")
        )
        assert (steps, commits, tokens) == (stats.denoising_steps, stats.commit_passes, 24)
        assert tokens / (steps + commits) == stats.tokens_per_pass
        assert tokens / steps == stats.tokens_per_forward
        assert usages[mode]["tokens_per_pass"] == pytest.approx(stats.tokens_per_pass, abs=1e-4)
        assert usages[mode]["tokens_per_forward"] == pytest.approx(stats.tokens_per_forward, abs=1e-4)
    assert found["volley:generation_tokens_total"] == 72
    assert found["volley:denoising_steps_per_canvas_count"] == 3


def test_tokens_and_canvases_are_counted_as_they_come() -> None:
    engine, metrics = engine_of(JOINT), Metrics(1, {})
    engine.on_verified.append(metrics.verified)
    request = engine.add_request(
        PROMPT, SamplingParams(max_tokens=20, ignore_eos=True, diffusion=DiffusionParams(**OWN))
    )  # type: ignore[arg-type]
    counted = []
    while request.finish_reason is None:
        engine.step()
        metrics.stepped(engine, 0.0)
        counted.append(metrics.registry.get_sample_value("volley:generation_tokens_total"))
        assert counted[-1] == request.num_output
    metrics.finished(request, "length")
    assert set(counted) == {0, 8, 16, 20}
    values = [
        metrics.registry.get_sample_value(f"volley:denoising_steps_per_canvas_{name}") for name in ("count", "sum")
    ]
    assert values == [3, sum(request.stats.canvas_steps)] == [3, request.stats.denoising_steps]
    later = metrics.registry.get_sample_value("volley:inter_token_latency_seconds_sum")
    assert later == pytest.approx((request.stats.total_seconds - request.stats.time_to_first_token) / 12)


@pytest.mark.slow
def test_a_limit_that_fits_in_the_pages_is_cut_to_whole_canvases() -> None:
    with running(engine_of(SHORT, num_pages=8)) as server:
        found = server.post("completions", {"prompt": [1, 2], "max_tokens": 62, "ignore_eos": True})
        assert found.status_code == 200, found.text
        assert found.json()["usage"]["completion_tokens"] == 60
        found = server.complete(PROMPT, max_tokens=9, diffusion={"canvas_length": 600})
        assert (found.status_code, found.json()["error"]["param"]) == (400, "diffusion.canvas_length")
        server.settle()


CHAT = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": PROMPT, "prompt_logprobs": 1}),
        ("completions", {"prompt": PROMPT, "echo": True, "logprobs": 1}),
        ("chat/completions", {"messages": CHAT, "prompt_logprobs": 1}),
        ("completions", {"prompt": PROMPT, "min_tokens": 3, "stop_token_ids": [9]}),
    ],
)
def test_what_needs_token_by_token_is_refused_on_canvases(server: Running, path: str, body: dict[str, object]) -> None:
    asked = {"max_tokens": 8, **body}
    response = server.post(path, asked)
    assert response.status_code == 400
    error = response.json()["error"]
    assert "mode='autoregressive'" in error["message"]
    assert error["message"].startswith("min_tokens follows" if "min_tokens" in body else "prompt_logprobs")
    assert error["param"] == ("diffusion.mode" if "min_tokens" in body else "prompt_logprobs")
    response = server.post(path, {**asked, "diffusion": {**OWN, "mode": "autoregressive"}})
    assert response.status_code == 200, response.text


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8])
def test_a_chat_without_a_limit_fills_a_pool_that_is_no_multiple_of_its_canvases(size: int) -> None:
    """The last canvas ends where the pool does, or before."""
    with running(engine_of(SHORT, num_pages=8)) as server:
        found = server.post("chat/completions", {"messages": [{"role": "user", "content": "x" * size}]})
        assert found.status_code == 200, found.text
        choice, used = found.json()["choices"][0], found.json()["usage"]
        assert choice["finish_reason"] in ("length", "stop")
        if choice["finish_reason"] == "length":
            assert 64 - 5 < used["prompt_tokens"] + used["completion_tokens"] <= 64
        server.settle()
