"""Priorities decide who is served first and who loses pages last, never what is answered."""

import pytest

from tests.tiny import Pair, random_prompts
from volley import Engine, SamplingParams
from volley.procedures.request import Request

PROMPTS = random_prompts(6, longest=20, seed=8)


def serve(engine: Engine, priorities: list[int], max_tokens: int = 8) -> tuple[list[Request], list[int]]:
    """The requests in the order of arrival, and their places in it in the order of their ends."""
    asked = zip(PROMPTS, priorities, strict=False)
    requests = [engine.add_request(p, SamplingParams(max_tokens=max_tokens, priority=own)) for p, own in asked]
    ended: list[int] = []
    while engine.core.scheduler.has_work:
        ended += [requests.index(request) for request in engine.step()]
        engine.check_integrity()
    return requests, ended


def test_lower_is_served_first_and_equals_by_arrival(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter, max_running=1, num_pages=40)
    assert serve(engine, [3, 0, -1, 0, 3, -1])[1] == [2, 5, 1, 3, 0, 4]
    assert serve(engine, [0] * 6)[1] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("priorities", [[2, 1, 0, 0, 1, 2], [0, 1, 2, 2, 1, 0]])
def test_pages_are_taken_from_the_last_in_line(pair: Pair, priorities: list[int]) -> None:
    engine = Engine(pair.target, pair.drafter, page_size=4, num_pages=14)
    requests, _ = serve(engine, priorities, max_tokens=24)
    first = priorities.index(0)
    assert requests[first].stats.preemptions == 0
    assert sum(request.stats.preemptions for request in requests) > 0
    plain = Engine(pair.target, num_pages=200, block_size=1).generate(PROMPTS, SamplingParams(max_tokens=24))
    assert [request.result().token_ids for request in requests] == [result.token_ids for result in plain]


def test_a_preempted_request_comes_before_those_of_its_priority_that_wait(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter, max_running=2, num_pages=40)
    requests = [
        engine.add_request(p, SamplingParams(priority=own)) for p, own in zip(PROMPTS, [1, 1, 1, 0], strict=False)
    ]
    engine.step()
    assert engine.core.scheduler.running == [requests[3], requests[0]]
    engine.core.scheduler.preempt(requests[0])
    assert list(engine.core.scheduler.waiting) == [requests[0], requests[1], requests[2]]
    urgent = engine.add_request(PROMPTS[4], SamplingParams(priority=0))
    assert engine.core.scheduler.waiting[0] is urgent
