"""K/V of the drafter are made late, and every draft is the one it would have been with K/V made at once."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.tiny import Pair, greedy, random_prompts
from volley import Engine, SamplingParams
from volley.decode.work import DraftSpec
from volley.engine.kv_manager import DraftContext
from volley.policies.base import Policy, View

COUNT = 24
PROMPTS = random_prompts(5, longest=30, seed=4)
SMALL = {"page_size": 4, "num_pages": 30}
OPTIONS: list[dict[str, Any]] = [{}, SMALL, {"draft_window": 6, "page_size": 4}, {"max_batch_tokens": 7}]


class Seldom(Policy):
    """Drafts in every fifth cycle."""

    block_size = 4

    def __init__(self) -> None:
        self.cycle = 0

    def decide(self, views: Sequence[View], under_way: int) -> list[DraftSpec]:
        self.cycle += 1
        return [view.draft(0 if self.cycle % 5 else 3) for view in views]


def context(engine: Engine) -> DraftContext:
    (found,) = (state for state in engine.core.kv_manager.states if isinstance(state, DraftContext))
    return found


def drafts(pair: Pair, options: dict[str, Any], most_waiting: int | None) -> list[tuple[int, int, list[int]]]:
    """All drafts, of prompts asked twice, with K/V made late, or at once; answers are checked."""
    engine = Engine(pair.target, pair.drafter, policy=Seldom(), **options)
    context(engine).most_waiting = most_waiting or 0
    seen: list[tuple[int, int, list[int]]] = []
    engine.on_verified.append(lambda own, proposal, _: seen.append((own.request_id, own.length, proposal.token_ids)))
    for _ in range(2):
        requests = [engine.add_request(prompt, SamplingParams(max_tokens=COUNT)) for prompt in PROMPTS]
        while engine.has_work:
            engine.step()
            if most_waiting is None:
                engine.core.kv_manager.settle()
        for request, prompt in zip(requests, PROMPTS, strict=True):
            assert request.token_ids[len(prompt) :] == greedy(pair.hf, prompt, COUNT)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_drafts_are_those_of_a_context_made_at_once(pair: Pair, options: dict[str, Any]) -> None:
    at_once = drafts(pair, options, None)
    assert sum(len(tokens) for *_, tokens in at_once) > 100
    for most_waiting in (1, 20, 10**6):
        assert drafts(pair, options, most_waiting) == at_once


def test_drafts_without_their_context_would_be_others(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = drafts(pair, {}, None)
    monkeypatch.setattr(DraftContext, "prepare", lambda *_: None)
    assert drafts(pair, {}, 10**6) != at_once


def test_little_waits_where_nothing_drafts(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter, policy="fixed:1", max_batch_tokens=40)
    own = context(engine)
    own.most_waiting, written = 30, 0
    for prompt in PROMPTS:
        engine.add_request(prompt, SamplingParams(max_tokens=COUNT))
    while engine.has_work:
        before = len(own.backlog)
        engine.step()
        assert len(own.backlog) < 2 * 30 + 40
        written += len(own.backlog) < before
    tokens = sum(len(prompt) for prompt in PROMPTS) + len(PROMPTS) * (COUNT - 1)
    assert 0 < written <= tokens // 30


@pytest.mark.parametrize(("waiting", "is_written"), [(30, False), (60, True)])
def test_a_prompt_is_read_before_what_is_due_is_written(pair: Pair, waiting: int, is_written: bool) -> None:
    """Unless twice as much waits; a step that reads none writes it."""
    engine = Engine(pair.target, pair.drafter, policy="fixed:1")
    own = context(engine)
    own.most_waiting = 10**6
    engine.add_request(PROMPTS[0], SamplingParams(max_tokens=10**3, ignore_eos=True))
    while len(own.backlog) < waiting:
        engine.step()
    own.most_waiting = 30
    request = engine.add_request(PROMPTS[1], SamplingParams(max_tokens=COUNT))
    engine.step()
    assert request.num_output == 1
    assert len(own.backlog) == len(PROMPTS[1]) + 1 + (0 if is_written else waiting)
    engine.step()
    assert len(own.backlog) == (len(PROMPTS[1]) + 3 if is_written else 2)


def test_a_first_token_does_not_wait_for_its_prompt_s_draft_context(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter, policy="fixed:4")
    request = engine.add_request(PROMPTS[0], SamplingParams(max_tokens=COUNT))
    engine.step()
    assert request.num_output == 1
    assert len(context(engine).backlog) == len(PROMPTS[0])
    engine.step()
    assert len(context(engine).backlog) <= 4
