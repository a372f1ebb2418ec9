"""Goodput against plain decoding, in whole engines and in modelled seconds: no clock is read.

A pass of the target takes 1 and so much for each token, a draft pass one amount, whatever it drafts. Every engine answers the
same prompts several times. The first times are the warm-up, in which goodput learns what its drafter is worth and may be slower.
Only the times after that count, where nothing else is said.
"""

import functools

import pytest

from tests.costs import settle
from tests.tiny import Pair, make_pair, random_prompts, teach
from volley import Engine, SamplingParams
from volley.engine.step import Step

COUNT, VOCAB = 120, 50
PROMPTS = random_prompts(16, longest=25, seed=12)
PARAMS = SamplingParams(max_tokens=COUNT)
NO_SLOWER = 1.03
"""Allowed loss of goodput: 1 % for trials of other choices, the rest for errors about near ties."""


@functools.cache
def shared() -> Pair:
    return make_pair()


class Meter:
    """The tokens of every pass, and whether it was drafted for."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[tuple[int, bool]] = []
        keep = engine.core.kv_manager.keep

        def spied(step: Step) -> None:
            assert step.batch is not None
            self.passes.append((len(step.batch), any(work.spec.positions for work in step.works)))
            keep(step)

        monkeypatch.setattr(engine.core.kv_manager, "keep", spied)

    def seconds(self, token: float, draft: float) -> float:
        return sum(1 + token * tokens + draft * drafted for tokens, drafted in self.passes)


def serve(
    engine: Engine, requests: int, monkeypatch: pytest.MonkeyPatch, warm_up: int = 0, times: int = 1
) -> tuple[list[list[int]], Meter]:
    """The answers to so many prompts, and what ``times`` answers of each took once all were answered ``warm_up`` times."""
    for _ in range(warm_up):
        list(engine.generate(PROMPTS[:requests], PARAMS))
    meter = Meter(engine, monkeypatch)
    for _ in range(times):
        answers = [result.token_ids for result in engine.generate(PROMPTS[:requests], PARAMS)]
    return answers, meter


@functools.cache
def plain(requests: int) -> tuple[list[list[int]], Meter]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        engine = Engine(shared().target, policy="fixed:1", num_pages=200, prefix_caching=False)
        return serve(engine, requests, monkeypatch)


def ratio(
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    requests: int,
    token: float,
    draft: float,
    *,
    is_right: bool,
    warm_up: int | None = None,
) -> float:
    """Seconds under a policy over those of plain decoding; the drafter is sure of itself whether it is right or not."""
    settle(monkeypatch, draft=draft, token=token)
    answers, meter = plain(requests)
    engine = Engine(shared().target, shared().drafter, policy=policy, num_pages=200, prefix_caching=False)
    told = [[(token_id + (not is_right)) % VOCAB for token_id in answer] for answer in answers]
    teach(engine, {tuple(prompt): own for prompt, own in zip(PROMPTS, told, strict=False)})
    warm_up = (1 if is_right else 2) if warm_up is None else warm_up
    # One trial of whole blocks is dear in 120 cycles, and rare in 600.
    times = 5 if requests == 1 and warm_up and not is_right else 1
    found, own = serve(engine, requests, monkeypatch, warm_up, times)
    assert found == answers
    return own.seconds(token, draft) / meter.seconds(token, draft) / times


COSTS = [(0.0, 0.1), (0.0, 2.0), (0.05, 0.1), (0.5, 2.0)]


@pytest.mark.slow
@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize(("token", "draft"), COSTS)
@pytest.mark.parametrize("is_right", [True, False])
def test_goodput_is_no_slower_than_plain_decoding(
    monkeypatch: pytest.MonkeyPatch, requests: int, token: float, draft: float, is_right: bool
) -> None:
    assert ratio(monkeypatch, "goodput", requests, token, draft, is_right=is_right) <= NO_SLOWER


@pytest.mark.slow
@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize("token", [0.0, 0.05])
def test_drafts_that_are_never_right_are_given_up_without_copies_too(
    monkeypatch: pytest.MonkeyPatch, requests: int, token: float
) -> None:
    """Copies of these texts pay, and would make up for drafts that do not."""
    assert ratio(monkeypatch, "goodput:drafts", requests, token, 0.1, is_right=False) <= NO_SLOWER


@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize(("draft", "most"), [(0.1, 1.03), (2.0, 1.2)])
def test_a_drafter_that_is_sure_and_never_right_is_found_out_at_once(
    monkeypatch: pytest.MonkeyPatch, requests: int, draft: float, most: float
) -> None:
    """In the first 120 cycles of an engine. Eight whole blocks of one request, each at the price of ``draft``, are 16 at most."""
    assert ratio(monkeypatch, "goodput:drafts", requests, 0.0, draft, is_right=False, warm_up=0) <= most


@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize(("token", "most"), [(0.0, 0.4), (0.05, 0.7)])
def test_goodput_is_much_faster_where_the_drafter_is_good(
    monkeypatch: pytest.MonkeyPatch, requests: int, token: float, most: float
) -> None:
    assert ratio(monkeypatch, "goodput", requests, token, 0.1, is_right=True) <= most


@pytest.mark.slow
@pytest.mark.parametrize(("token", "draft"), COSTS)
def test_a_policy_that_always_drafts_would_be_seen(monkeypatch: pytest.MonkeyPatch, token: float, draft: float) -> None:
    assert ratio(monkeypatch, "fixed", 1, token, draft, is_right=False, warm_up=0) > NO_SLOWER
