"""Drafts that are dropped because a prompt came: no answer changes by it, and the prompt is read in the next step."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.tiny import Pair, answered, random_prompts, tokens
from volley import Engine, SamplingParams
from volley.proposers.block import BlockProposer

PROMPTS = random_prompts(4, longest=12, seed=3)


def engine_of(pair: Pair, **options: Any) -> Engine:
    return Engine(pair.target, pair.drafter, page_size=4, num_pages=64, **options)


def answers(engine: Engine, params: SamplingParams) -> list[list[int]]:
    return tokens(answered(engine, PROMPTS, params))


def now_and_then(calls: list[int]) -> Callable[[], bool]:
    """Says in two of three steps that somebody waits."""
    turns = itertools.cycle((True, False, True))

    def newcomers() -> bool:
        calls.append(1)
        return next(turns)

    return newcomers


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"policy": "fixed:4"}, {"tree_nodes": 6}, {}])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=30),
        SamplingParams(max_tokens=30, temperature=0.8, seed=5),
        SamplingParams(max_tokens=30, temperature=1.0, seed=5, frequency_penalty=0.5),
    ],
)
def test_no_answer_changes_by_drafts_that_are_dropped(
    pair: Pair, options: dict[str, Any], params: SamplingParams
) -> None:
    expected = answers(Engine(pair.target, page_size=4, num_pages=64, block_size=1), params)
    engine, calls = engine_of(pair, **options), list[int]()
    engine.arrivals.newcomers = now_and_then(calls)
    assert answers(engine, params) == expected
    assert len(calls) > 5 or not options, "the default may draft little for a target this small"


@pytest.mark.slow
def test_speculative_sampling_draws_the_same_drafts_once_more(pair: Pair) -> None:
    """Nothing of a dropped draft was used, so each token is the one that it would have been."""
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=9)
    options: dict[str, Any] = {"policy": "fixed:4", "verification": "rejection"}
    expected = answers(engine_of(pair, **options), params)
    engine, calls = engine_of(pair, **options), list[int]()
    engine.arrivals.newcomers = now_and_then(calls)
    assert answers(engine, params) == expected
    assert len(calls) > 10
    assert expected != answers(engine_of(pair, policy="fixed:1"), params), "drafts have a part in the tokens"


def test_a_prompt_that_comes_during_a_draft_is_read_before_it_is_verified(pair: Pair) -> None:
    engine = engine_of(pair, policy="fixed:4")
    first = engine.add_request(PROMPTS[0], SamplingParams(max_tokens=30))
    while first.num_output < 4:
        engine.step()
    before = first.num_output
    engine.arrivals.newcomers = lambda: True
    assert engine.step() == []
    assert first.num_output == before
    second = engine.add_request(PROMPTS[1], SamplingParams(max_tokens=30))
    engine.step()
    assert second.num_output == 1
    while first.finish_reason is None:
        engine.step()
    assert first.num_output == 30, "no two steps running give way"
    engine.abort(second)


def test_a_prompt_that_comes_while_the_drafters_k_v_are_made_waits_for_no_draft(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(pair, policy="fixed:4")
    first = engine.add_request(PROMPTS[0], SamplingParams(max_tokens=30))
    engine.step()
    drafts, propose = list[int](), BlockProposer.propose

    def noted(proposer: BlockProposer, works: Any, **options: Any) -> float:
        drafts.append(len(works))
        return propose(proposer, works, **options)

    monkeypatch.setattr(BlockProposer, "propose", noted)
    engine.arrivals.newcomers = lambda: True
    engine.step()
    assert not drafts
    engine.step()
    assert drafts == [1], "the next step goes on, whoever waits"
    assert first.num_output > 1
    engine.abort(first)


def test_only_a_prompt_that_comes_while_others_decode_bounds_cycles(pair: Pair) -> None:
    engine = engine_of(pair)
    first = engine.add_request(PROMPTS[0], SamplingParams(max_tokens=30))
    while not first.is_decoding:
        engine.step()
    list(engine.generate(PROMPTS[1:], SamplingParams(max_tokens=3)))
    assert not engine.arrivals.go_on
    first = first if first.finish_reason is None else engine.add_request(PROMPTS[0], SamplingParams(max_tokens=30))
    while not first.is_decoding:
        engine.step()
    second = engine.add_request(PROMPTS[1], SamplingParams(max_tokens=30))
    assert engine.arrivals.go_on
    assert engine.arrivals.most_seconds(1.0) < 1e3
    for request in (first, second):
        engine.abort(request)
