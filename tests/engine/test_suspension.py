"""Requests rest: the drafter does not keep up with their texts where nothing will be drafted, and goes on later."""

from collections.abc import Callable, Sequence, Set

import pytest

from tests.tiny import Pair, greedy, random_prompts
from volley import Engine, SamplingParams
from volley.decode.work import DraftSpec, Work
from volley.engine import kv_manager
from volley.engine.kv_manager import DraftContext
from volley.policies.base import Cycle, Policy, View
from volley.procedures.request import Request

COUNT, WINDOW = 40, 6
PROMPTS = random_prompts(5, longest=30, seed=4)
Drafts = dict[tuple[int, int], tuple[int, ...]]


class Naps(Policy):
    """Drafts in every cycle, verifies nothing of it, and lets requests rest as ``every`` says of a cycle."""

    block_size = 4

    def __init__(self, every: Callable[[int], int]) -> None:
        self.every, self.cycle = every, 0

    def decide(self, views: Sequence[View], under_way: int) -> list[DraftSpec]:
        self.cycle += 1
        drafts = 3 * (self.every(self.cycle) == 1)
        return [view.draft(drafts if view.request_id % 3 else 3) for view in views]

    def draft_kv_every(self, sampled: Set[bool], under_way: int) -> int:
        assert sampled == {False}
        return self.every(self.cycle)

    def trim(self, cycles: Sequence[Cycle]) -> list[int]:
        return [0] * len(cycles)


def made(pair: Pair, every: Callable[[int], int], monkeypatch: pytest.MonkeyPatch, **options: int) -> Drafts:
    """All drafts, by request and length of its text; answers are checked."""
    engine = Engine(pair.target, pair.drafter, policy=Naps(every), draft_window=WINDOW, page_size=4, **options)
    assert engine.core.proposer is not None
    drafts, propose = Drafts(), engine.core.proposer.propose

    def spied(works: list[Work[Request]], *, with_confidence: bool) -> float:
        seconds = propose(works, with_confidence=with_confidence)
        for work in works:
            drafts[work.request.request_id, work.request.length] = tuple(work.proposal.token_ids)
        return seconds

    monkeypatch.setattr(engine.core.proposer, "propose", spied)
    results = list(engine.generate(PROMPTS, SamplingParams(max_tokens=COUNT)))
    engine.check_integrity()
    for result, prompt in zip(results, PROMPTS, strict=True):
        assert result.token_ids == greedy(pair.hf, prompt, COUNT)
    return drafts


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_batch_tokens": 7}, {"num_pages": 30}], ids=str)
@pytest.mark.parametrize("rests", [(2, 9), (12, 30)])
def test_drafts_after_a_rest_are_as_good_once_enough_was_seen(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, rests: tuple[int, int], options: dict[str, int]
) -> None:
    """A window of the text, here. Every third request never rests."""
    monkeypatch.setattr(kv_manager, "LEAST_CONTEXT", WINDOW)
    always = made(pair, lambda _: 1, monkeypatch, **options)
    napping = made(pair, lambda cycle: 3 if rests[0] <= cycle < rests[1] else 1, monkeypatch, **options)
    assert always.items() > napping.items(), "the same drafts, but not all of them"
    assert all((0, length) in napping for own, length in always if own == 0)
    last = max(length for own, length in always if own == 1)
    assert (1, last) in napping, "it has come back"


def test_drafts_that_see_little_would_be_others(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_manager, "LEAST_CONTEXT", 1)
    always = made(pair, lambda _: 1, monkeypatch)
    assert not always.items() >= made(pair, lambda cycle: 3 if cycle < 9 else 1, monkeypatch).items()


def test_nothing_is_kept_where_all_rest(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter, policy="fixed:1", draft_window=WINDOW, page_size=4)
    (own,) = (state for state in engine.core.kv_manager.states if isinstance(state, DraftContext))
    for prompt in PROMPTS:
        engine.add_request(prompt, SamplingParams(max_tokens=COUNT))
    while engine.has_work:
        engine.step()
        assert len(own.backlog) == 0
    engine.policy = "fixed:4"
    (result,) = engine.generate(PROMPTS[0], SamplingParams(max_tokens=COUNT))
    assert result.token_ids == greedy(pair.hf, PROMPTS[0], COUNT)
    assert max(result.stats.block_sizes) == 4, "what came later has all of its context"


def test_without_a_window_nobody_rests(pair: Pair) -> None:
    """The drafter's K/V share the target's pages, which others may find."""
    engine = Engine(pair.target, pair.drafter, policy="fixed:1")
    request = engine.add_request(PROMPTS[0], SamplingParams(max_tokens=COUNT))
    engine.step()
    assert not request.drafting_suspended
    (own,) = (state for state in engine.core.kv_manager.states if isinstance(state, DraftContext))
    assert len(own.backlog) == len(PROMPTS[0])
