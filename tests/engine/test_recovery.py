"""A step that raises costs only the request that made it raise."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from tests.tiny import Pair, greedy, random_prompts
from volley import Engine, SamplingParams
from volley.decode.detokenize import Detokenizer
from volley.decode.work import Phase, Work
from volley.engine import engine as engine_module
from volley.engine.recovery import recover
from volley.engine.step import Step
from volley.errors import ParallelError
from volley.policies.goodput import Goodput
from volley.procedures.request import Request

COUNT = 12
PROMPTS = random_prompts(6, longest=30, seed=8)
PARAMS = SamplingParams(max_tokens=COUNT, logprobs=True)


class Broken(Exception):
    pass


def run(engine: Engine, params: SamplingParams = PARAMS) -> tuple[list[Request], list[tuple[Request, Exception]]]:
    requests = [engine.add_request(prompt, params) for prompt in PROMPTS]
    faults: list[tuple[Request, Exception]] = []
    while engine.core.scheduler.has_work:
        try:
            engine.step()
        except Broken as error:
            faults += recover(engine, error)
    assert engine.core.pool.num_used == 0
    engine.check_integrity()
    return requests, faults


def check(pair: Pair, requests: list[Request], culprit: int | None) -> None:
    for index, (request, prompt) in enumerate(zip(requests, PROMPTS, strict=True)):
        if index != culprit:
            assert request.token_ids[request.num_prompt :] == greedy(pair.hf, prompt, COUNT)
            assert len(request.scores) == COUNT
        else:
            assert request.finish_reason == "abort"


def breaks_when(
    condition: Callable[[list[Work[Request]]], bool], engine: Engine, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """Let one phase of a step do its work and then raise when the step's works meet ``condition``."""
    part, method = {
        "propose": (engine_module, "propose"),
        "forward": (engine.core.runner, "forward"),
        "accept": (engine_module, "accept"),
        "keep": (engine.core.kv_manager, "keep"),
    }[phase]
    inner = getattr(part, method)

    def broken(step: Any, *args: Any) -> Any:
        result = inner(step, *args)
        if condition(step.works if isinstance(step, Step) else step):
            raise Broken
        return result

    monkeypatch.setattr(part, method, broken)


def reaches_the_end(work: Work[Request]) -> bool:
    """Return whether the step chooses a token for the request."""
    return work.phase is Phase.DECODE or work.request.prefill_end - work.request.computed <= work.num_known


@pytest.mark.parametrize(
    ("phase", "options"),
    [
        ("propose", {}),
        ("accept", {"max_batch_tokens": 7}),
        ("keep", {}),
        ("forward", {"page_size": 4, "num_pages": 14}),
        ("forward", {"page_size": 4, "draft_window": 8}),
    ],
)
@pytest.mark.parametrize("when", [0, 5])
def test_only_the_request_at_fault_is_lost(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, phase: str, when: int, options: dict[str, Any]
) -> None:
    engine = Engine(pair.target, pair.drafter, **options)

    def bad(works: list[Work[Request]]) -> bool:
        return any(
            work.request.request_id == 2 and work.request.num_output >= when and reaches_the_end(work) for work in works
        )

    breaks_when(bad, engine, monkeypatch, phase)
    requests, faults = run(engine)
    assert [request for request, _ in faults] == [requests[2]]
    assert isinstance(faults[0][1], Broken)
    check(pair, requests, culprit=2)


@pytest.mark.slow
def test_nobody_is_lost_to_an_error_of_the_batch(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch of two or more raises: all still finish, one by one."""
    engine = Engine(pair.target, pair.drafter)
    breaks_when(lambda works: len(works) > 1, engine, monkeypatch, "forward")
    requests, faults = run(engine)
    assert faults == []
    check(pair, requests, culprit=None)


def test_an_error_that_happened_once_costs_nobody(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(pair.target, pair.drafter)
    steps = itertools.count()
    breaks_when(lambda _: next(steps) == 3, engine, monkeypatch, "keep")
    requests, faults = run(engine)
    assert faults == []
    assert next(steps) > 4
    check(pair, requests, culprit=None)


@pytest.mark.parametrize("when", [0, 4])
def test_an_error_in_the_midst_of_taking_tokens(pair: Pair, monkeypatch: pytest.MonkeyPatch, when: int) -> None:
    """The request's text and tokens no longer agree, so it cannot go on even if the error would not come again.

    Tokens are taken with their text where a stop string may end the request.
    """
    engine = Engine(pair.target, pair.drafter)
    inner = Detokenizer.push
    count, errors = itertools.count(), iter([Broken()])

    def broken(self: Detokenizer, token_id: int, *, last: bool = False) -> str:
        if next(count) == 3 + len(PROMPTS) * when:
            for error in errors:
                raise error
        return inner(self, token_id, last=last)

    monkeypatch.setattr(Detokenizer, "push", broken)
    requests, faults = run(engine, replace(PARAMS, stop=("never",)))
    ((culprit, _),) = faults
    check(pair, requests, culprit=requests.index(culprit))


def test_a_request_that_had_ended_before_the_error_is_forgotten(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter, policy="goodput")
    errors = [Broken()]

    def fail(request: Request, *_: object) -> None:
        if request.finish_reason is not None and errors:
            raise errors.pop()

    engine.on_verified.append(fail)
    requests, faults = run(engine)
    assert faults == []
    check(pair, requests, culprit=None)
    assert len(requests[0].result().token_ids) == COUNT
    assert not cast(Goodput, engine.policy).acceptance._records


def test_an_error_while_a_request_is_admitted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(pair.target, pair.drafter)
    inner = engine.core.kv_manager.pages.match_prefix

    def broken(request: Request, most: int) -> int:
        found = inner(request, most)
        if request.request_id == 1:
            raise Broken
        return found

    monkeypatch.setattr(engine.core.kv_manager.pages, "match_prefix", broken)
    requests, faults = run(engine)
    assert [request for request, _ in faults] == [requests[1]]
    check(pair, requests, culprit=1)


def test_processes_out_of_step_are_not_repaired(pair: Pair) -> None:
    with pytest.raises(ParallelError, match="rank 1 was lost"):
        recover(Engine(pair.target), ParallelError("rank 1 was lost"))
