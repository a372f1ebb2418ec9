"""The engine's promises about canvases, for masked models and for DiffusionGemma, whatever happens beside them."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.costs import settle
from tests.diffusion_gemma import random_model
from tests.procedures.test_denoising import BOTH_WAYS, masked_model
from tests.tiny import finish
from volley import DiffusionParams, Engine, SamplingParams
from volley.decode.canvas import CanvasOutput, Reveal
from volley.decode.work import Phase
from volley.engine.recovery import recover
from volley.models.targets.diffusion_gemma import DiffusionGemma
from volley.models.targets.families import FAST_DLLM, SDAR
from volley.models.targets.target import Target
from volley.procedures import denoising
from volley.procedures.request import Request

FAMILIES = ["sdar", "shifted", "in place", "gemma"]
CANVAS = 8
PROMPTS = [[*range(20, 20 + size)] for size in (3, 8, 13, 21)]


class Fused:
    """Raises in the pass it is told to."""

    fuse = -1

    def forward(self, batch: Any, *rest: Any) -> Tensor:
        self.fuse -= 1
        if self.fuse == 0:
            raise RuntimeError("planted")
        found: Tensor = super().forward(batch, *rest)  # type: ignore[misc]
        return found


class FusedTarget(Fused, Target):
    pass


class FusedGemma(Fused, DiffusionGemma):
    pass


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest) -> Any:
    if request.param == "gemma":
        own = FusedGemma(random_model(is_sharp=True))  # in fp32 the order of sums depends on who else is there
        assert own.diffusion is not None
        own.diffusion = replace(own.diffusion, defaults=replace(own.diffusion.defaults, canvas_length=CANVAS))
        return own
    made = masked_model({"sdar": BOTH_WAYS, "shifted": FAST_DLLM, "in place": SDAR}[request.param])
    family = made.target.diffusion
    assert family is not None
    return FusedTarget(made.hf, None, replace(family, defaults=replace(family.defaults, canvas_length=CANVAS)))


def params(index: int = 0, mode: Any = "diffusion", **changes: Any) -> SamplingParams:
    own = DiffusionParams(canvas_length=4 if mode == "self" else CANVAS, max_steps=4, mode=mode)
    values: dict[str, Any] = {"temperature": 0.8, "seed": index, "max_tokens": 19, "diffusion": own}
    return SamplingParams(**{**values, **changes})


def mixed(index: int) -> SamplingParams:
    return params(index, ("diffusion", "autoregressive", "self")[index % 3])


def engine_of(target: Target, **options: Any) -> Engine:
    return Engine(target, **{"page_size": CANVAS, **options})


def alone(target: Target, index: int, own: SamplingParams) -> list[int]:
    (result,) = engine_of(target, prefix_caching=False).generate([PROMPTS[index % 4]], own)
    return result.token_ids


@pytest.mark.slow
def test_an_answer_is_the_same_in_a_batch_of_32(target: Target) -> None:
    engine = engine_of(target, num_pages=400)
    requests = [engine.add_request(PROMPTS[index % 4], mixed(index)) for index in range(32)]
    answers = finish(engine, requests)
    assert max(request.stats.output_tokens for request in requests) == 19
    for index in (0, 1, 2, 15, 16, 17, 30, 31):
        assert answers[index] == alone(target, index, mixed(index))


@pytest.mark.parametrize("chunk", [8, pytest.param(11, marks=pytest.mark.slow)])
def test_an_answer_is_the_same_under_any_chunk_size(target: Target, chunk: int) -> None:
    engine = engine_of(target, max_batch_tokens=chunk)
    requests = [engine.add_request(PROMPTS[index], mixed(index)) for index in range(4)]
    assert finish(engine, requests) == [alone(target, index, mixed(index)) for index in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["diffusion", "self"])
def test_a_preemption_after_any_one_pass_changes_nothing(target: Target, mode: str) -> None:
    """One of many requests is preempted after the first pass, the next one after the second, and so on."""
    engine = engine_of(target)
    requests = [engine.add_request(PROMPTS[2], params(mode=mode)) for _ in range(40)]
    for request in requests:
        engine.step()
        if request.finish_reason is not None:
            break
        engine.core.scheduler.preempt(request)
    assert sum(request.stats.preemptions for request in requests) > 5
    assert finish(engine, requests) == [alone(target, 2, params(mode=mode))] * 40


@pytest.mark.slow
@pytest.mark.parametrize(
    ("passes", "preempted", "fuse"),
    [(1, False, 1), (4, False, 1), (2, True, 1), (2, True, 3), (5, True, 1), (5, True, 3)],
)
def test_a_pass_that_raised_changes_nothing(target: Any, passes: int, preempted: bool, fuse: int) -> None:
    """Behind preemptions it was to read texts again, or to go on with their canvases, some of them denoised in part."""
    engine = engine_of(target)
    requests = [engine.add_request(PROMPTS[index % 4], mixed(index)) for index in range(6)]
    for _ in range(passes):
        engine.step()
    if preempted:
        assert any(request.canvas is not None for request in requests)
        for request in requests:
            engine.core.scheduler.preempt(request)
    target.fuse = fuse
    with pytest.raises(RuntimeError, match="planted"):
        finish(engine, requests)
    assert recover(engine, RuntimeError("planted")) == []
    assert finish(engine, requests) == [alone(target, index, mixed(index)) for index in range(6)]
    assert all(request.stats.preemptions > preempted for request in requests), "each was there when it failed"


def test_a_prefix_hit_saves_the_passes_over_the_prompt_and_changes_nothing(target: Target) -> None:
    prompt, own = [*range(5, 45)], params(max_tokens=8)
    engine, answers, steps = engine_of(target, max_batch_tokens=CANVAS), [], []
    for _ in range(2):
        request, before = engine.add_request(prompt, own), engine.core.scheduler.step
        answers += finish(engine, [request])
        steps.append(engine.core.scheduler.step - before)
    assert answers[0] == answers[1]
    assert request.stats.cached_tokens >= 32
    assert steps[0] - steps[1] >= 4, "a pass for every page that was found"


def test_pages_are_shared_among_modes_only_where_all_are_made_causally(target: Target) -> None:
    prompt, engine = [*range(5, 45)], engine_of(target)
    first, second = (
        next(engine.generate([prompt], params(mode=mode, max_tokens=3))).stats.cached_tokens
        for mode in ("diffusion", "autoregressive")
    )
    assert first == 0
    assert target.diffusion is not None
    assert (second >= 32) == target.diffusion.has_causal_context


def test_a_prompt_beside_sixteen_canvases_is_read_within_eight_passes(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, forward = list[int](), target.forward

    def measured(batch: Any, *rest: Any) -> Tensor:
        sizes.append(len(batch))
        return forward(batch, *rest)

    monkeypatch.setattr(target, "forward", measured)
    engine = engine_of(target, max_batch_tokens=32, num_pages=400)
    requests = [engine.add_request(PROMPTS[index % 4], params(index)) for index in range(16)]
    for _ in range(20):
        engine.step()
    late = engine.add_request(PROMPTS[3], params(1, "autoregressive"))
    for _ in range(8):
        engine.step()
    assert late.num_output > 0
    done = {request.request_id: request.num_output for request in requests}
    for _ in range(40):
        engine.step()
    assert all(request.num_output > done[request.request_id] or request.finish_reason for request in requests), (
        "all move on"
    )
    finish(engine, [*requests, late])
    assert max(sizes) <= 32 + 4 + 2 * CANVAS + 1, (
        "the rest, an eighth for prompts, and a canvas behind the last of them"
    )


@pytest.mark.slow
@pytest.mark.parametrize("most", [CANVAS, 2 * CANVAS])
@pytest.mark.parametrize("num_pages", [6, 8, 9])
def test_small_passes_over_few_pages_serve_all(target: Target, num_pages: int, most: int) -> None:
    """The canvas whose turn it is may find no pages, while those that have some wait for theirs."""
    engine = engine_of(target, num_pages=num_pages, max_batch_tokens=most)
    prompts = [[*range(20 + place, 28 + place)] for place in range(3)]
    each = [params(index, max_tokens=32) for index in range(3)]
    requests = [engine.add_request(prompt, own) for prompt, own in zip(prompts, each, strict=True)]
    answers = finish(engine, requests)
    engine.check_integrity()
    pairs = zip(prompts, each, strict=True)
    assert answers == [next(iter(engine_of(target).generate([prompt], own))).token_ids for prompt, own in pairs]


def test_canvases_of_a_lower_priority_have_the_room_of_a_pass_first(target: Target) -> None:
    engine = engine_of(target, max_batch_tokens=CANVAS)
    others = [engine.add_request(PROMPTS[1], params(index, max_tokens=40, priority=10)) for index in range(4)]
    for _ in range(12):
        engine.step()
    urgent = engine.add_request(PROMPTS[1], params(9, priority=0))
    while urgent.stats.denoising_steps == 0:
        engine.step()
    before = sum(request.stats.denoising_steps for request in others)
    while urgent.finish_reason is None:
        engine.step()
    assert sum(request.stats.denoising_steps for request in others) <= before + 1, "one may share its last pass"
    finish(engine, others)


@pytest.mark.slow
@pytest.mark.parametrize("turns", [200])
@pytest.mark.parametrize(("pages", "most", "share"), [(24, 40, 8), (7, 2 * CANVAS, 16)])
def test_nothing_leaks_in_a_long_run(target: Target, turns: int, pages: int, most: int, share: int) -> None:
    """Arrivals, aborts and preemptions of requests of three modes; what ends well has the answer it has alone."""
    chance, engine = random.Random(0), engine_of(target, num_pages=pages, max_running=6, max_batch_tokens=most)
    alive: list[tuple[int, Request]] = []
    happened: Counter[str] = Counter()
    ended: list[tuple[int, Request]] = []
    for turn in range(turns):
        if len(alive) < 8 and chance.random() < 0.5:
            alive.append((turn, engine.add_request(PROMPTS[turn % 4], replace(mixed(turn), max_tokens=9))))
        if alive and chance.random() < 0.1:
            engine.abort(chance.choice(alive)[1])
            happened["abort"] += 1
        if engine.core.scheduler.running and chance.random() < 0.1:
            engine.core.scheduler.preempt(chance.choice(engine.core.scheduler.running))
            happened["preemption"] += 1
        engine.step()
        engine.check_integrity()
        assert not any(request.canvas for _, request in alive if request.finish_reason)
        ended += [pair for pair in alive if pair[1].finish_reason == "length"]
        alive = [pair for pair in alive if pair[1].finish_reason is None]
    finish(engine, [request for _, request in alive])
    assert min(happened.values()) > turns // 20
    assert len(ended) > turns // share
    for turn, request in ended[:: max(1, len(ended) // 6)]:
        assert request.result().token_ids == alone(target, turn, replace(mixed(turn), max_tokens=9))


def test_feedback_is_of_the_size_of_a_canvas(target: Target) -> None:
    engine = engine_of(target)
    request = engine.add_request(PROMPTS[1], params())
    engine.step()
    canvas = request.canvas
    assert canvas is not None
    parts = [canvas.tokens, canvas.revealed, *canvas.history, *([] if canvas.feedback is None else [canvas.feedback])]
    assert canvas.predicted is None
    assert sum(part.nbytes for part in parts) <= 4 * CANVAS * target.hidden_size * torch.float32.itemsize
    engine.abort(request)


class FusedDenoiser(Reveal):
    """Raises behind a pass over the canvases that it is told."""

    fuse = -1

    def step(self, output: CanvasOutput) -> Tensor:
        found = super().step(output)
        FusedDenoiser.fuse -= 1
        if FusedDenoiser.fuse == 0:
            raise RuntimeError("planted")
        return found


@pytest.mark.parametrize("fuse", [1, 2, 5, 7])
@pytest.mark.parametrize("preempted", [False, True])
def test_a_canvas_that_has_moved_when_a_pass_raises_begins_again(
    fuse: int, preempted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = masked_model(BOTH_WAYS).target
    monkeypatch.setattr(denoising, "Reveal", FusedDenoiser)
    engine = engine_of(target)
    requests = [engine.add_request(PROMPTS[index], params(index)) for index in range(3)]
    if preempted:
        for _ in range(3):
            engine.step()
        assert any(request.canvas is not None and request.canvas.step for request in requests)
        for request in requests:
            engine.core.scheduler.preempt(request)
    FusedDenoiser.fuse = fuse
    with pytest.raises(RuntimeError, match="planted"):
        finish(engine, requests)
    assert recover(engine, RuntimeError("planted")) == []
    assert finish(engine, requests) == [alone(target, index, params(index)) for index in range(3)]


@pytest.mark.parametrize("preempted", [False, True])
def test_feedback_that_cannot_be_made_changes_nothing(preempted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target = FusedGemma(random_model(is_sharp=True))
    real, calls = target.feedback, list[int]()

    def feedback(logits: Tensor) -> Tensor | None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("planted")
        return real(logits)

    expected = [alone(target, index, params(index)) for index in range(3)]
    monkeypatch.setattr(target, "feedback", feedback)
    engine = engine_of(target)
    requests = [engine.add_request(PROMPTS[index], params(index)) for index in range(3)]
    if preempted:
        while len(calls) < 2:
            engine.step()
        for request in requests:
            engine.core.scheduler.preempt(request)
    with pytest.raises(RuntimeError, match="planted"):
        finish(engine, requests)
    assert recover(engine, RuntimeError("planted")) == []
    assert finish(engine, requests) == expected


def test_other_answers_to_a_prompt_wait_until_it_is_read_and_no_longer(target: Target) -> None:
    engine, prompt = engine_of(target), [*range(5, 45)]
    first = engine.add_request(prompt, params(0, max_tokens=CANVAS))
    second = engine.add_request(prompt, params(1, max_tokens=CANVAS), after=first)
    engine.step()
    assert (first.computed, second.computed) == (40, 0)
    engine.step()
    assert second.computed == 40
    assert second.stats.cached_tokens >= 32
    finish(engine, [first, second])
    unshared = engine_of(target, page_size=3)  # blocks of pages that end where no canvas does are not shared
    first = unshared.add_request(prompt, params(0, max_tokens=CANVAS))
    second = unshared.add_request(prompt, params(1, max_tokens=CANVAS), after=first)
    assert (second.after is None) == (first.prefix_root is None)
    finish(unshared, [first, second])


@pytest.mark.slow
def test_canvases_that_ride_behind_drafts_keep_to_the_size_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are verified in any case; what rides behind them, here all canvases, has what is left."""
    settle(monkeypatch, token=0.0)
    target = masked_model(BOTH_WAYS).target
    own = DiffusionParams(canvas_length=8, mode="self", max_steps=1)
    each = [params(index, diffusion=own, temperature=0.0, max_tokens=40) for index in range(6)]
    answers, rows = [], []
    for size in (24, 512):
        engine = engine_of(target, max_batch_tokens=size, num_pages=100)
        schedule, largest = engine.core.scheduler.schedule, [0]

        def measured(*given: Any, largest: list[int] = largest, schedule: Any = schedule) -> Any:
            step = schedule(*given)
            riders = sum(
                work.spec.size - len(work.proposal.token_ids) for work in step.works if work.phase is Phase.VERIFY
            )
            largest[0] = max(largest[0], riders)
            return step

        engine.core.scheduler.schedule = measured  # type: ignore[method-assign]
        requests = [engine.add_request(PROMPTS[index % 4], each[index]) for index in range(6)]
        answers.append(finish(engine, requests))
        rows.append(largest[0])
    assert answers[0] == answers[1]
    assert 0 < rows[0] <= 24 < rows[1]


def test_reading_again_is_no_commit(target: Target) -> None:
    engine, prompt = engine_of(target, max_batch_tokens=16), [5 + place % 40 for place in range(64)]
    request = engine.add_request(prompt, params(max_tokens=2 * CANVAS))
    while request.num_output < CANVAS:
        engine.step()
    assert request.stats.commit_passes == 0
    engine.core.scheduler.preempt(request)
    engine.reset_prefix_cache()
    finish(engine, [request])
    assert request.stats.preemptions == 1
    assert request.stats.commit_passes <= 1


@pytest.mark.parametrize(("num_pages", "are_kept"), [(100, True), (6, False)])
def test_a_canvas_that_goes_on_keeps_its_pages_where_there_are_many(
    target: Any, num_pages: int, are_kept: bool
) -> None:
    engine = engine_of(target, page_size=4, num_pages=num_pages)
    request = engine.add_request(PROMPTS[2], SamplingParams(max_tokens=CANVAS, temperature=1.0, seed=0))
    while request.canvas is None or request.canvas.step == 0:
        engine.step()
        assert request.finish_reason is None
    assert (request.table.capacity >= request.canvas.start + len(request.canvas)) == are_kept
    engine.check_integrity()
    finish(engine, [request])
