"""Texts that are made within the next step are those that are made at once, whatever ends, interrupts and takes requests."""

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conftest import byte_tokenizer
from tests.tiny import eager_model, random_drafter, target_config
from volley import Engine, SamplingParams
from volley.decode.detokenize import Detokenizer
from volley.engine.deferred_work import DeferredWork
from volley.engine.recovery import recover
from volley.models.targets.target import Target
from volley.procedures.request import Request
from volley.results import TextChunk

GPU = torch.device("cuda")
PROMPTS = [[40, 50, 60], [77, 78], [100, 101, 9, 9, 30, 41], [200, 33, 7], [5, 6, 7, 8, 9]]
LONG = SamplingParams(max_tokens=16)


@functools.cache
def target() -> Target:
    return Target(eager_model(target_config(vocab_size=260, num_hidden_layers=2)), byte_tokenizer())


def engine(*, overlaps: bool, **options: Any) -> Engine:
    drafter = random_drafter(vocab_size=260, num_target_layers=2, target_layer_ids=(0, 1))
    own = Engine(target(), drafter, **{"policy": "fixed", "num_pages": 64, **options})
    own.deferred_work = DeferredWork(GPU if overlaps else own.target.device)
    return own


@functools.cache
def plain(prompt: int) -> list[int]:
    (result,) = Engine(target()).generate(PROMPTS[prompt], LONG)
    return result.token_ids


@functools.cache
def params() -> tuple[SamplingParams, ...]:
    """Return requests that end by length, a stop token, a stop string and not at all by themselves; the last ones are sampled."""
    (text,) = (result.text for result in Engine(target()).generate(PROMPTS[2], LONG))
    return (
        LONG,
        SamplingParams(max_tokens=16, stop_token_ids=(plain(1)[7],)),
        SamplingParams(max_tokens=16, stop=(text[5:7], "never")),
        SamplingParams(max_tokens=40),
        SamplingParams(max_tokens=5, temperature=1.0, seed=4, skip_special_tokens=False, stop_token_ids=(1, 2, 3)),
    )


def told(own: Engine, abort_after: int) -> Iterator[tuple[list[int], list[TextChunk], str, str | None]]:
    """Return all chunks of every request; the fourth is aborted after some steps, and the first is preempted once."""
    requests = [own.add_request(prompt, each) for prompt, each in zip(PROMPTS, params(), strict=True)]
    chunks: dict[Request, list[TextChunk]] = {request: [] for request in requests}

    def take() -> None:
        for request in requests:
            request.write()
            chunks[request] += request.writer.take()

    own.deferred_work.listeners.append(take)
    steps = 0
    while own.has_work:
        own.step()
        own.check_integrity()
        steps += 1
        if steps == abort_after:
            own.abort(requests[3])
        if steps == 3 and requests[0] in own.core.scheduler.running:
            own.core.scheduler.preempt(requests[0])
    take()
    return ((one.token_ids, chunks[one], one.writer.text, one.finish_reason) for one in requests)


@pytest.mark.parametrize("options", [{}, {"policy": "goodput"}, {"num_pages": 12, "page_size": 4}], ids=str)
def test_what_is_told_late_is_what_is_told_at_once(options: dict[str, Any]) -> None:
    late, at_once = (list(told(engine(overlaps=overlaps, **options), 6)) for overlaps in (True, False))
    assert late[:3] == at_once[:3]
    assert late[4] == at_once[4]
    assert [reason for *_, reason in late] == ["length", "stop", "stop", "abort", at_once[4][3]]
    for (tokens, chunks, text, reason), prompt in zip(late, PROMPTS, strict=True):
        assert [chunk.token_ids for chunk in chunks] == [[token] for token in tokens[len(prompt) :]]
        assert "".join(chunk.text for chunk in chunks) == text
        assert text or reason == "abort"


def test_texts_are_made_once_the_next_pass_is_launched_and_when_a_request_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, noted = engine(overlaps=True, policy="fixed:1"), list[str]()
    push, forward = Detokenizer.push, own.core.runner.forward
    monkeypatch.setattr(
        Detokenizer, "push", lambda self, *args, **last: noted.append("text") or push(self, *args, **last)
    )
    monkeypatch.setattr(own.core.runner, "forward", lambda step: noted.append("pass") or forward(step))
    own.deferred_work.listeners.append(lambda: noted.append("told"))
    request = own.add_request(PROMPTS[0], SamplingParams(max_tokens=3))
    while own.has_work:
        own.step()
    assert request.finish_reason == "length"
    assert noted == ["pass", "told", "pass", "text", "told", "pass", "text", "told", "text"]


def test_on_a_cpu_nothing_waits() -> None:
    own = engine(overlaps=False)
    own.deferred_work.listeners.append(lambda: pytest.fail("a CPU has no time beside a pass"))
    request = own.add_request(PROMPTS[0], LONG)
    while request.finish_reason is None:
        own.step()
        assert not request.writer.waiting
        assert len(request.writer.chunks) == request.num_output


def test_a_stream_has_the_tokens_of_each_step_when_it_ends() -> None:
    own = engine(overlaps=True)
    stream, seen = own.stream(PROMPTS[0], LONG), list[int]()
    for chunk in stream:
        seen += chunk.token_ids
        assert not own.core.scheduler.running or own.core.scheduler.running[0].writer.waiting == []
    assert seen == plain(0)


class Broken(Exception):
    pass


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("again", [True, False], ids=["always", "once"])
def test_a_text_that_cannot_be_made_costs_its_request_alone(
    overlaps: bool, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not even that where it can be made a moment later."""
    own, push, bad, broken = engine(overlaps=overlaps), Detokenizer.push, plain(0)[4], [Broken()]

    def failing(self: Detokenizer, token_id: int, *, last: bool = False) -> str:
        if token_id == bad and self is requests[0].writer.detokenizer and broken:
            raise broken[0] if again else broken.pop()
        return push(self, token_id, last=last)

    requests = [own.add_request(prompt, LONG) for prompt in PROMPTS[:3]]
    monkeypatch.setattr(Detokenizer, "push", failing)
    faults = list[Request]()
    while own.has_work:
        try:
            own.step()
        except Broken as error:
            faults += [request for request, _ in recover(own, error)]
    assert faults == ([requests[0]] if again else [])
    whole = requests[again:]
    assert [one.token_ids[one.num_prompt :] for one in whole] == [plain(index) for index in range(again, 3)]
    results = Engine(copy.copy(target())).generate(PROMPTS[again:3], LONG)
    assert [one.result().text for one in whole] == [result.text for result in results]
