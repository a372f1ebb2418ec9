"""Several answers to one prompt read it once."""

import pytest

from tests.tiny import make_pair
from volley import Engine, SamplingParams
from volley.procedures.request import Request

PROMPT = [(7 * i) % 46 + 4 for i in range(70)]


def finish(engine: Engine, requests: list[Request]) -> int:
    """Runs all to their end; returns how many tokens of prompts were computed."""
    while any(request.finish_reason is None for request in requests):
        engine.step()
    engine.check_integrity()
    return sum(len(PROMPT) - request.stats.cached_tokens for request in requests)


@pytest.mark.parametrize("chunk", [16, 512])
def test_the_others_wait_and_take_its_pages(chunk: int) -> None:
    pair = make_pair()
    engine = Engine(pair.target, pair.drafter, max_batch_tokens=chunk)
    params = [SamplingParams(temperature=1, seed=seed, max_tokens=12) for seed in range(6)]
    first = engine.add_request(PROMPT, params[0])
    others = [engine.add_request(PROMPT, own, after=first) for own in params[1:]]
    assert finish(engine, [first, *others]) == 70 + 5 * 6, "what is left of the last page each computes itself"
    plain = [result.token_ids for result in Engine(pair.target, block_size=1).generate([PROMPT] * 6, params)]
    assert [request.result().token_ids for request in [first, *others]] == plain


def test_alone_they_read_it_each() -> None:
    pair = make_pair()
    engine = Engine(pair.target, pair.drafter)
    requests = [engine.add_request(PROMPT, SamplingParams(max_tokens=2)) for _ in range(3)]
    assert finish(engine, requests) == 3 * 70
    engine = Engine(pair.target, prefix_caching=False)
    first = engine.add_request(PROMPT, SamplingParams(max_tokens=2))
    assert finish(engine, [first, engine.add_request(PROMPT, SamplingParams(max_tokens=2), after=first)]) == 2 * 70


def test_whoever_comes_later_does_not_wait_for_them() -> None:
    pair = make_pair()
    engine = Engine(pair.target, max_batch_tokens=24)
    first = engine.add_request(PROMPT, SamplingParams(max_tokens=2))
    held = engine.add_request(PROMPT, SamplingParams(max_tokens=2), after=first)
    later = engine.add_request([5, 6, 7], SamplingParams(max_tokens=2))
    for _ in range(3):
        engine.step()
    assert later.computed > 0
    assert held.computed == 0
    finish(engine, [first, held, later])


@pytest.mark.parametrize("steps", [0, 1])
def test_an_abort_lets_the_others_go(steps: int) -> None:
    pair = make_pair()
    engine = Engine(pair.target, max_batch_tokens=24)
    first = engine.add_request(PROMPT, SamplingParams(max_tokens=2))
    others = [engine.add_request(PROMPT, SamplingParams(max_tokens=2), after=first) for _ in range(2)]
    for _ in range(steps):
        engine.step()
    engine.abort(first)
    finish(engine, others)
    assert [request.finish_reason for request in others] == ["length", "length"]
