"""A step that raises costs only the request that made it raise."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.tiny import Pair, greedy, random_prompts
from volley import Engine, SamplingParams
from volley.engine.recovery import recover
from volley.engine.request import Request

COUNT = 12
PROMPTS = random_prompts(6, longest=30, seed=8)
PARAMS = SamplingParams(max_tokens=COUNT, logprobs=True)


class Broken(Exception):
    pass


def run(engine: Engine) -> tuple[list[Request], list[tuple[Request, Exception]]]:
    requests = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    faults: list[tuple[Request, Exception]] = []
    while engine.scheduler.has_work:
        try:
            engine.step()
        except Broken as error:
            faults += recover(engine, error)
    assert engine.pool.num_used == 0
    engine.check_integrity()
    return requests, faults


def check(pair: Pair, requests: list[Request], culprit: int | None) -> None:
    for index, (request, prompt) in enumerate(zip(requests, PROMPTS, strict=True)):
        if index != culprit:
            assert request.token_ids[request.num_prompt :] == greedy(pair.hf, prompt, COUNT)
            assert len(request.logprobs) == COUNT
        else:
            assert request.finish_reason == "abort"


def breaks_when(condition: Callable[[Any], bool], engine: Engine, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Let ``engine.runner.method(plan, …)`` do its work and then raise when the plan meets ``condition``."""
    inner = getattr(engine.runner, method)

    def broken(plan: Any, *args: Any) -> Any:
        result = inner(plan, *args)
        if condition(plan):
            raise Broken
        return result

    monkeypatch.setattr(engine.runner, method, broken)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("draft", {}),
        ("judge", {"max_batch_tokens": 7}),
        ("inject", {}),
        ("verify", {"page_size": 4, "num_pages": 14}),
        ("verify", {"page_size": 4, "draft_window": 8}),
    ],
)
@pytest.mark.parametrize("when", [0, 5])
def test_only_the_request_at_fault_is_lost(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, method: str, when: int, options: dict[str, Any]
) -> None:
    engine = Engine(pair.target, pair.drafter, **options)

    def bad(plan: Any) -> bool:
        return any(s.request.request_id == 2 and s.request.num_output >= when and s.emits for s in plan)

    breaks_when(bad, engine, monkeypatch, method)
    requests, faults = run(engine)
    assert [request for request, _ in faults] == [requests[2]]
    assert isinstance(faults[0][1], Broken)
    check(pair, requests, culprit=2)


def test_nobody_is_lost_to_an_error_of_the_batch(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch of two or more raises: all still finish, one by one."""
    engine = Engine(pair.target, pair.drafter)
    breaks_when(lambda plan: len(plan) > 1, engine, monkeypatch, "verify")
    requests, faults = run(engine)
    assert faults == []
    check(pair, requests, culprit=None)


def test_an_error_that_happened_once_costs_nobody(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(pair.target, pair.drafter)
    steps = itertools.count()
    breaks_when(lambda _: next(steps) == 3, engine, monkeypatch, "inject")
    requests, faults = run(engine)
    assert faults == []
    assert next(steps) > 4
    check(pair, requests, culprit=None)


@pytest.mark.parametrize("when", [0, 4])
def test_an_error_in_the_midst_of_taking_tokens(pair: Pair, monkeypatch: pytest.MonkeyPatch, when: int) -> None:
    """The request's text and tokens no longer agree, so it cannot go on even if the error would not come again."""
    engine = Engine(pair.target, pair.drafter)
    inner = Request._cut_at_stop_string
    errors = iter([Broken()])

    def broken(self: Request) -> None:
        if self.request_id == 3 and self.num_output > when:
            for error in errors:
                raise error
        inner(self)

    monkeypatch.setattr(Request, "_cut_at_stop_string", broken)
    requests, faults = run(engine)
    assert [request for request, _ in faults] == [requests[3]]
    check(pair, requests, culprit=3)


def test_an_error_while_a_request_is_admitted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(pair.target, pair.drafter)
    inner = engine.scheduler._match_prefix

    def broken(request: Request) -> None:
        inner(request)
        if request.request_id == 1:
            raise Broken

    monkeypatch.setattr(engine.scheduler, "_match_prefix", broken)
    requests, faults = run(engine)
    assert [request for request, _ in faults] == [requests[1]]
    check(pair, requests, culprit=1)
