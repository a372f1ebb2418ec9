"""Reasoning ends at its budget, with and without drafts, and nothing else changes."""

from functools import partial

import pytest
import torch

from tests.tiny import make_pair
from volley import Engine, SamplingParams
from volley.decode.thinking import Spelt, ThinkingBudget

OPEN, CLOSE = [5, 6], [7, 8]


def allowed(rule: ThinkingBudget, *path: int) -> list[int]:
    logits = torch.arange(10.0)[None]
    return rule.apply(logits, [path])[0].softmax(dim=-1).nonzero()[:, 0].tolist()


def test_nothing_is_forced_before_the_budget_or_without_reasoning() -> None:
    rule = ThinkingBudget(OPEN, CLOSE, 2, is_open=False)
    everything = list(range(10))
    for path in ((), (1, 2, 3, 4), (5, 1, 6), (5, 6), (5, 6, 1), (5, 6, 7, 8, 1, 2, 3)):
        assert allowed(rule, *path) == everything, path


def test_the_close_is_forced_token_by_token_and_once() -> None:
    rule = ThinkingBudget(OPEN, CLOSE, 2, is_open=False)
    assert allowed(rule, 5, 6, 1, 2) == [7]
    assert allowed(rule, 5, 6, 1, 2, 7) == [8]
    assert allowed(rule, 5, 6, 1, 7) == [8], "a close that has begun is gone on with"
    assert len(allowed(rule, 5, 6, 1, 2, 7, 8)) == 10
    assert len(allowed(rule, 5, 6, 1, 2, 7, 8, 5, 6, 1, 2, 3)) == 10, "an answer reasons once"
    for token in (5, 6, 1):
        rule.take(token)
    assert allowed(rule, 2) == [7], "what was taken counts as what is drafted does"


def test_a_prompt_that_has_opened_it() -> None:
    assert allowed(ThinkingBudget(OPEN, CLOSE, 0, is_open=True)) == [7]
    rows = ThinkingBudget(OPEN, CLOSE, 1, is_open=True).apply(torch.zeros(2, 10), [(), (1,)])
    assert (rows.softmax(dim=-1) > 0).sum(dim=1).tolist() == [10, 1]


TEXTS = ["", "<", "th", "ink>", "</", "a", " ", "<think>", "</think>", ">.</"]
SPELT = Spelt("<think>", "</think>", TEXTS.__getitem__, at_start=True)


def test_markers_are_found_whatever_tokens_spell_them() -> None:
    """The tokenizer has each as one token, 7 and 8, and ordinary tokens may spell them too."""
    for opened in ([7], [6, 7], [1, 2, 3]):
        rule = ThinkingBudget([7], [8], 2, is_open=False, spelt=SPELT)
        assert allowed(rule, *opened, 5, 5) == [8], "the budget is spent"
        for closed in ([8], [4, 2, 3], [9, 2, 3], [5, 4, 2, 3]):
            assert len(allowed(rule, *opened, *closed, 5, 5, 5)) == 10, "reasoning has closed by itself"
    for begun in ([5, 7], [2, 7], [1, 2, 5, 7]):
        rule = ThinkingBudget([7], [8], 2, is_open=False, spelt=SPELT)
        assert len(allowed(rule, *begun, 5, 5, 5)) == 10, "a marker in the middle of an answer opens nothing"
    anywhere = SPELT._replace(at_start=False)
    assert allowed(ThinkingBudget([7], [8], 2, is_open=False, spelt=anywhere), 5, 1, 2, 3, 5, 5) == [8]


def test_a_forced_token_that_another_rule_forbids_is_still_drawn() -> None:
    logits = torch.full((1, 10), -torch.inf)
    assert ThinkingBudget(OPEN, CLOSE, 0, is_open=True).apply(logits, [()])[0].argmax() == 7


def test_a_grammar_that_forbids_the_close_has_the_last_word() -> None:
    logits = ThinkingBudget(OPEN, CLOSE, 0, is_open=True).apply(torch.arange(10.0)[None], [()])
    logits[0, 7] = -torch.inf
    want = torch.arange(10.0).index_fill(0, torch.tensor([7]), -torch.inf).softmax(dim=-1)
    assert torch.allclose(logits.softmax(dim=-1)[0], want, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("policy", ["fixed", "goodput"])
def test_speculation_changes_no_token(temperature: float, policy: str) -> None:
    pair = make_pair()
    rules = (lambda *_: ThinkingBudget([1], CLOSE, 9, is_open=True),)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40, rules=rules)
    prompt = [4, 9, 2, 30, 12]
    (result,) = Engine(pair.target, pair.drafter, policy=policy).generate(prompt, params)
    (plain,) = Engine(pair.target, block_size=1).generate(prompt, params)
    assert result.token_ids == plain.token_ids
    assert plain.token_ids[9:11] == CLOSE or 7 in plain.token_ids[:9]
    (free,) = Engine(pair.target).generate(prompt, SamplingParams(temperature=temperature, seed=3, max_tokens=40))
    assert free.token_ids[:9] == plain.token_ids[:9]
    assert free.token_ids != plain.token_ids


@pytest.mark.slow
def test_a_rule_that_forgets_the_path_would_be_seen() -> None:
    class Forgetful(ThinkingBudget):
        def apply(self, logits, paths):  # type: ignore[no-untyped-def]
            return super().apply(logits, [()] * len(paths))

    pair = make_pair()
    answers = []
    for make in (ThinkingBudget, Forgetful):
        rules = (lambda *_, make=make: partial(make, is_open=True)([1], CLOSE, 9),)
        params = SamplingParams(max_tokens=40, rules=rules)
        engine = Engine(pair.target, pair.drafter, policy="goodput")
        answers.append([next(engine.generate([4, 9, 2 + i, 30, 12], params)).token_ids for i in range(4)])
    assert answers[0] != answers[1]
