"""Passes launched before the tokens of the last are read: the same answers whatever happens, and who is served by them."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chi_square import chi_square_p, joint_counts
from tests.conftest import byte_tokenizer
from tests.costs import settle
from tests.engine.test_sampled import PROMPT, V, exact_law, soft_scored
from tests.tiny import (
    Pair,
    Placed,
    answers_and_drafts,
    block_proposer,
    eager_model,
    make_pair,
    place,
    random_drafter,
    random_prompts,
    target_config,
)
from volley import Engine, SamplingParams
from volley.decode.work import DraftSpec
from volley.engine import async_launch, capacity
from volley.engine.engine import Engine as AnyEngine
from volley.engine.kv_manager import DraftRing
from volley.memory.device import Device
from volley.models.checkpoints.checkpoint import HeadConfig
from volley.models.drafters import heads
from volley.models.drafters.drafter import Drafter
from volley.models.targets.target import Target
from volley.policies.base import Cycle
from volley.policies.fixed import Fixed
from volley.procedures.request import Request
from volley.proposers import choose

PROMPTS = random_prompts(5, longest=22, seed=4)
PROMPTS += [PROMPTS[0] + [7], PROMPTS[1] + PROMPTS[2][:3]]
LONG = SamplingParams(max_tokens=14)
SEEDED = SamplingParams(max_tokens=14, temperature=1.0, seed=5)
SMALL = {"num_target_layers": 2, "target_layer_ids": (0, 1), "num_hidden_layers": 1, "vocab_size": 260}


@pytest.fixture(scope="module", autouse=True)
def _fixed_memory() -> Iterator[None]:
    """Small passes run in fixed memory, as on a GPU; costs are made up."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        settle(monkeypatch, token=0.3)
        monkeypatch.setattr(capacity, "find_device", lambda _: Device("cuda"))
        yield


@functools.cache
def pair() -> Pair:
    """Bytes are its tokens, so that stop strings are found."""
    hf = eager_model(target_config(vocab_size=260, num_hidden_layers=2))
    return Pair(Target(hf, byte_tokenizer()), random_drafter(**SMALL), hf)


@functools.cache
def drafter_with(head: str | None) -> Drafter:
    """The pair's drafter, or one with a sequential head whose transitions matter, and with a confidence head."""
    if head is None:
        return pair().drafter
    kind, _, rated = head.partition(" ")
    own: dict[str, Any] = {"head": HeadConfig(type=kind, rank=4, candidates=260, state=5 if kind == "domino" else None)}
    if rated:
        own["confidence_width"] = pair().drafter.config.hidden_size + 4
    drafter = random_drafter(**SMALL, **own)
    assert drafter.head is not None
    for weight in drafter.head.parameters():
        weight.mul_(1 if kind == "domino" else 4)
    return drafter


def engine(
    *, drafts: bool = False, is_ahead: bool = True, head: str | None = None, unknown: int | None = None, **options: Any
) -> Engine:
    """The drafter knows nothing of every ``unknown``-th position, so that its context and its head show in its drafts."""
    plain = {} if drafts else {"policy": "plain"}
    given = {"num_pages": 64, "page_size": 4, "max_batch_tokens": 100, "max_running": 8, **plain, **options}
    own = Engine(pair().target, drafter_with(head) if drafts else None, **given)
    own.core.async_launch.is_used = is_ahead
    if drafts:
        place(own, texts())
    if unknown is not None:
        cast(Placed, own.core.proposer).known[::unknown] = 0
    return own


@functools.cache
def texts() -> list[list[int]]:
    """Return texts that drafters partly know."""
    greedy = replace(LONG, max_tokens=40, ignore_eos=True)
    results = engine(is_ahead=False).generate(PROMPTS[:4], greedy)
    return [prompt + result.token_ids for prompt, result in zip(PROMPTS, results, strict=False)]


def served(own: AnyEngine, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record for each step whether its pass had been launched before."""
    found = list[bool]()
    serve = own.core.async_launch.serve
    monkeypatch.setattr(own.core.async_launch, "serve", lambda step: found.append(serve(step)) or found[-1])
    return found


@functools.cache
def stop_string() -> str:
    """Return a string within the first prompt's answer."""
    (result,) = engine(is_ahead=False).generate(PROMPTS[0], replace(LONG, max_tokens=40, ignore_eos=True))
    return result.text[3:5]


@functools.cache
def params() -> list[SamplingParams]:
    return [
        LONG,
        replace(LONG, max_tokens=3, priority=1),
        replace(SEEDED, top_k=30, priority=-1),
        replace(SEEDED, temperature=0.7, seed=6, stop_token_ids=tuple(range(0, 260, 9))),
        replace(LONG, stop_token_ids=tuple(range(0, 260, 7))),
        replace(LONG, max_tokens=40, stop=(stop_string(), "never")),
        replace(LONG, repetition_penalty=1.2),
        replace(LONG, logprobs=True),
        replace(SEEDED, max_tokens=1),
    ]


@functools.cache
def alone(prompt: int, number: int) -> tuple[list[int], str, str]:
    """Plain decoding of one request with a pool to itself, one pass after the other."""
    (result,) = engine(is_ahead=False).generate(PROMPTS[prompt], params()[number])
    return result.token_ids, result.finish_reason, result.text


CHOICES = st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, 8))
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), CHOICES),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("preempt"), st.integers(0, 9)),
        st.tuples(st.just("policy"), st.sampled_from(["fixed:1", "fixed", "fixed:3", "goodput", "feedback"])),
        st.tuples(st.just("forget"), st.none()),
        st.tuples(st.just("time"), st.none()),
    ),
    min_size=4,
    max_size=22,
)


@pytest.mark.slow
@given(
    actions=ACTIONS,
    num_pages=st.integers(16, 40),
    chunk=st.sampled_from([3, 16, 100]),
    drafts=st.booleans(),
    window=st.sampled_from([None, 5]),
    prefix_caching=st.booleans(),
    policy=st.sampled_from(["fixed:1", "fixed", "fixed:3"]),
)
@settings(max_examples=100)
def test_whatever_happens_every_answer_is_the_one_given_alone(
    actions: list[tuple[str, Any]],
    num_pages: int,
    chunk: int,
    drafts: bool,
    window: int | None,
    prefix_caching: bool,
    policy: str,
) -> None:
    own = engine(
        drafts=drafts,
        num_pages=num_pages,
        max_batch_tokens=chunk,
        max_running=4,
        draft_window=window if drafts else None,
        prefix_caching=prefix_caching,
        verification="coupled",
        policy=policy if drafts else "fixed:1",
    )
    requests: list[tuple[Request, int, int]] = []

    def step() -> None:
        for request in own.step():
            assert not request.table.pages
        for request in own.core.scheduler.running:
            assert len(request.table.pages) == own.core.pool.pages_for(request.computed), (
                "none is held for a pass ahead"
            )
        own.check_integrity()

    for action, value in actions:
        if action == "arrive":
            requests.append((own.add_request(PROMPTS[value[0]], params()[value[1]]), *value))
        elif action == "step":
            for _ in range(value):
                step()
        elif action == "abort" and requests:
            own.abort(requests[value % len(requests)][0])
        elif action == "preempt" and own.core.scheduler.running:
            own.core.scheduler.preempt(own.core.scheduler.running[value % len(own.core.scheduler.running)])
        elif action == "policy" and drafts:
            own.policy = value
        elif action == "forget":
            own.reset_prefix_cache()
        elif action == "time" and own.core.runner.passes is not None:  # another pass in the same memory
            made_up = own.core.runner.passes.made_up([1, 1], 6, causal=True)
            assert made_up is not None
            made_up()
        own.check_integrity()
    for _ in range(3000):
        if not own.has_work:
            break
        step()
    assert not own.has_work
    assert own.core.pool.num_used == 0
    for request, prompt, number in requests:
        expected, reason, text = alone(prompt, number)
        result = request.result()
        if result.finish_reason == "abort":
            assert result.token_ids == expected[: len(result.token_ids)]
        else:
            assert (result.token_ids, result.finish_reason, result.text) == (expected, reason, text)
            assert not params()[number].logprobs or len(result.logprobs or []) == len(expected)


@pytest.mark.parametrize("each", [LONG, SEEDED, replace(SEEDED, top_p=0.9)], ids=["greedy", "seeded", "top-p"])
@pytest.mark.parametrize("count", [1, 3])
def test_every_step_behind_the_first_token_is_served(
    count: int, each: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = engine()
    found = served(own, monkeypatch)
    list(own.generate(PROMPTS[:count], replace(each, max_tokens=9, ignore_eos=True)))
    assert found == [False] * 2 + [True] * 7, "a prompt, a pass behind it, and those that were launched within others"


def test_the_same_verdicts_of_sampled_requests_by_either_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matched with the noise of positions, or compared with what one uniform draws."""
    answers = []
    for verification in ("coupled", "rejection"):
        for is_ahead in (True, False):
            own = engine(drafts=True, is_ahead=is_ahead, policy="fixed:1", verification=verification)
            found = served(own, monkeypatch)
            answers.append([result.token_ids for result in own.generate(PROMPTS[:3], SEEDED)])
            assert any(found) == is_ahead
    assert answers[0] == answers[1]
    assert answers[2] == answers[3]
    assert answers[0] != answers[2]


def test_one_that_ends_unforeseen_leaves_the_others_their_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    own = engine(drafts=True, policy="fixed:1")
    expected = [engine(is_ahead=False).generate(prompt, LONG).__next__().token_ids for prompt in PROMPTS[:3]]
    stopping = replace(LONG, stop_token_ids=(expected[1][5],))
    found = served(own, monkeypatch)
    results = list(own.generate(PROMPTS[:3], [LONG, stopping, LONG]))
    assert [len(result.token_ids) for result in results] == [14, 1 + expected[1].index(expected[1][5]), 14]
    assert [results[0].token_ids, results[2].token_ids] == [expected[0], expected[2]]
    assert found == [False] * 2 + [True] * 12


@pytest.mark.parametrize("drafts", [False, True])
def test_a_prompt_comes_after_the_pass_that_is_under_way(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own = engine(drafts=True, policy="fixed") if drafts else engine()
    found = served(own, monkeypatch)
    long = replace(LONG, max_tokens=40, ignore_eos=True)
    first = own.add_request(PROMPTS[0], long)
    for _ in range(4):
        own.step()
    second = own.add_request(PROMPTS[1], long)
    for _ in range(4):
        own.step()
    assert drafts or (first.num_output, second.num_output) == (8, 3)
    assert second.num_output > 1
    assert found == [False, False, True, True, True, False, False, True]


@pytest.mark.parametrize(
    "change",
    [
        {"repetition_penalty": 1.2},
        {"logit_bias": ((3, 1.0),)},
        {"logprobs": True},
    ],
    ids=str,
)
def test_who_needs_tokens_that_the_host_knows_waits_for_them(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so does everyone beside it."""
    own = engine()
    found = served(own, monkeypatch)
    list(own.generate(PROMPTS[:2], [replace(LONG, max_tokens=4, **change), replace(LONG, ignore_eos=True)]))
    assert found == [False] * 5 + [True] * 9


def test_nothing_is_launched_where_a_prompt_waits_to_be_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    own = engine()
    found = served(own, monkeypatch)
    own.arrivals.newcomers = lambda: True
    list(own.generate(PROMPTS[0], LONG))
    assert not any(found)


def test_many_wait_and_the_running_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits gets in when one of them ends."""
    own = engine(max_running=2)
    found = served(own, monkeypatch)
    list(own.generate(PROMPTS[:4], replace(LONG, max_tokens=6, ignore_eos=True)))
    assert found == ([False] * 2 + [True] * 4) * 2


@pytest.mark.parametrize(
    "options", [{"policy": "goodput"}, {"policy": "feedback"}, {"denoising_steps": 2}, {"tree_nodes": 6}]
)
def test_drafts_that_change_and_those_of_other_kinds_are_read_first(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = engine(drafts=True, **{"policy": "fixed", **options})
    found = served(own, monkeypatch)
    results = list(own.generate(PROMPTS[:1], replace(LONG, max_tokens=12, ignore_eos=True)))
    assert max(results[0].stats.block_sizes) > 1
    assert not any(found)


def chains(count: int, *, is_ahead: bool, params: Any = LONG, **options: Any) -> Any:
    """Tokens, what was accepted, and every draft, of requests that come one after the other."""
    own = engine(drafts=True, is_ahead=is_ahead, **{"policy": "fixed", **options})
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = served(own, monkeypatch)
        results, drafts = answers_and_drafts(own, PROMPTS[:count], params)
    own.check_integrity()
    return [(own.token_ids, own.stats.accepted_lengths, own.stats.preemptions) for own in results], drafts, found


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fixed", "fixed:3"])
@pytest.mark.parametrize("count", [1, 4])
def test_every_cycle_of_greedy_chains_behind_the_first_is_served(policy: str, count: int) -> None:
    """To their ends, where less is asked for than was launched; drafts are the same, too."""
    params = replace(LONG, max_tokens=24, ignore_eos=True)
    results, drafts, found = chains(count, is_ahead=True, policy=policy, params=params)
    assert (results, drafts) == chains(count, is_ahead=False, policy=policy, params=params)[:2]
    assert found == [False] * 2 + [True] * (len(found) - 2)
    lengths = [length for _, own, _ in results for length in own]
    assert min(lengths) < max(lengths)
    assert max(lengths) >= 3
    assert [own[0] for own in results] == [text[len(PROMPTS[i]) :][:24] for i, text in enumerate(texts()[:count])]


WAYS: dict[str, dict[str, Any]] = {
    "a window": {"draft_window": 5},
    "a wide window": {"draft_window": 30},
    "a window, short blocks": {"draft_window": 9, "policy": "fixed:3"},
    "small pages": {"draft_window": 5, "page_size": 1, "num_pages": 300},
    "a residual head": {"head": "residual"},
    "a Markov head and a window": {"head": "markov", "draft_window": 7},
    "a selector": {"head": "selector"},
    "Domino": {"head": "domino"},
    "a confidence head": {"head": "dspark rated"},
}


def whole(drafts: list[list[list[int]]]) -> list[list[list[int]]]:
    """Near the end of a request the first tokens of a longer block are verified, and these differ from a shorter one's."""
    most = max(len(own) for each in drafts for own in each)
    return [[own for own in each if len(own) == most] for each in drafts]


@pytest.fixture
def _pairs_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy chains of a head are chosen as a GPU does."""
    monkeypatch.setattr(heads.BoundHead, "chains", heads.BoundHead.paired_chains)


@pytest.mark.slow
@pytest.mark.usefixtures("_pairs_on_the_device")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["greedy", "matched", "rejection"])
def test_drafts_in_windows_and_of_heads_are_served(way: str, kind: str) -> None:
    """Their answers are those of passes that follow each other, and so are their drafts as long as these are whole."""
    each = [replace(COLD, temperature=0.0 if kind == "greedy" else 0.05, seed=seed) for seed in range(4)]
    own: dict[str, Any] = {"verification": "rejection"} if kind == "rejection" else {}
    own |= {"params": each, "unknown": 4, **WAYS[way]}
    results, drafts, found = chains(4, is_ahead=True, **own)
    expected, others, _ = chains(4, is_ahead=False, **own)
    assert [own[0] for own in results] == [own[0] for own in expected]
    assert whole(drafts) == whole(others)
    assert max(length for _, lengths, _ in results for length in lengths) >= 2
    assert sum(found) > len(found) / 3
    assert all(found[2:]) == (kind != "rejection")
    if kind == "greedy":
        assert [own[0] for own in results] == [text[len(PROMPTS[i]) :][:24] for i, text in enumerate(texts()[:4])]


@pytest.mark.slow
def test_a_ring_of_one_block_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the next block overwrites the window that it reads."""
    params = replace(LONG, max_tokens=24, ignore_eos=True)
    own: dict[str, Any] = {"params": params, "draft_window": 12, "page_size": 1, "num_pages": 300, "unknown": 2}
    expected = whole(chains(4, is_ahead=False, **own)[1])
    assert whole(chains(4, is_ahead=True, **own)[1]) == expected
    monkeypatch.setattr("volley.engine.kv_manager.blocks_in_ring", lambda _: 1)
    found = chains(4, is_ahead=True, **own)[2]
    assert sum(found) < len(found) / 4, "only short drafts near an end fit"

    def crowded(ring: DraftRing, request: Request, num_tokens: int) -> bool:
        ring._enter(request, num_tokens)
        return True

    monkeypatch.setattr(DraftRing, "reserve_ahead", crowded)
    assert whole(chains(4, is_ahead=True, **own)[1]) != expected


@pytest.mark.slow
@pytest.mark.usefixtures("_pairs_on_the_device")
@pytest.mark.parametrize("head", ["residual", "dspark rated"])
def test_confidences_of_launched_drafts_are_those_of_others(head: str) -> None:
    confidences = []
    for is_ahead in (True, False):
        own = engine(drafts=True, is_ahead=is_ahead, policy=Observing(), head=head)
        list(own.generate(PROMPTS[:3], replace(LONG, max_tokens=24, ignore_eos=True)))
        confidences.append(cast(Observing, own.policy).seen)
    assert confidences[0]
    torch.testing.assert_close(*map(torch.tensor, confidences))


class Observing(Fixed):
    """Reads the confidences of whole drafts."""

    uses_confidence = True

    def __init__(self) -> None:
        super().__init__()
        self.seen = list[list[float]]()

    def cuts(self, spec: DraftSpec) -> bool:
        return False

    def observe(self, cycles: Sequence[Cycle]) -> None:
        self.seen += [list(cycle.confidence[:3]) for cycle in cycles if cycle.spec.size == self.block_size - 1]


COLD = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.05, draft_temperature=15.0, seed=2)
KINDS = {
    "several that sample alike": [replace(COLD, seed=seed) for seed in range(4)],
    "of all kinds": [
        COLD,
        replace(COLD, top_p=0.9),
        replace(COLD, temperature=0.0),
        replace(COLD, draft_temperature=0.1),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_every_cycle_of_sampled_chains_is_served(verification: str, kind: str) -> None:
    """With the same noise for the same drafts. Speculative sampling with a seed is read first where less is asked for."""
    each = KINDS[kind]
    own = {"params": each, "verification": verification}
    results, drafts, found = chains(len(each), is_ahead=True, **own)
    assert (results, drafts) == chains(len(each), is_ahead=False, **own)[:2]
    lengths = [length for _, own, _ in results for length in own]
    assert max(lengths) >= 2
    assert sum(found) > len(found) / 3
    assert all(found[2:]) == (verification == "coupled")


@pytest.mark.parametrize("temperature", [0.0, 0.05])
def test_goodput_is_served_once_it_has_asked_for_one_size_for_long(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch, token=0.02)
    params = replace(COLD, max_tokens=90, temperature=temperature, draft_temperature=None)
    (plain,) = engine(is_ahead=False).generate(PROMPTS[0], params)
    own = engine(drafts=True, policy="goodput:drafts")
    place(own, [PROMPTS[0] + plain.token_ids])
    found = served(own, monkeypatch)
    (result,) = own.generate(PROMPTS[0], params)
    assert result.token_ids == plain.token_ids
    assert not any(found[:9])
    assert sum(found) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("is_biased", [False, True], ids=["exact", "biased"])
def test_sampled_chains_have_the_law_of_the_target(is_biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a seed, where the first tokens of longer drafts are verified near an end. Planted: greedy drafts, scored softly."""
    if is_biased:
        monkeypatch.setattr(choose, "propose_sampled", soft_scored)
    params, tokens = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True), list[list[int]]()
    small = {"num_hidden_layers": 1, "vocab_size": V}
    drafter = {"block_size": 4, "mask_token_id": 5, "num_target_layers": 1, "target_layer_ids": (0,)}
    pair = make_pair(2, {**small, **drafter}, **small, initializer_range=0.2)
    own = Engine(pair.target, pair.drafter, policy="fixed", num_pages=200, page_size=8)
    own.core.async_launch.is_used = block_proposer(own).drafts_on_device = True
    found = served(own, monkeypatch)
    while len(tokens) < 448:
        tokens += [result.token_ids for result in own.generate([PROMPT] * 64, params)]
    assert sum(found) > len(found) / 4
    p = chi_square_p(joint_counts(torch.tensor(tokens)[:, 2:], V), exact_law(params, pair).view(-1, V**2).sum(dim=0))
    assert p < 1e-6 if is_biased else p > 1e-3


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_noise_of_other_positions_is_seen(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: drafts are drawn as if nothing of the last ones had been kept."""
    own = {"params": COLD, "verification": rule}
    expected = chains(1, is_ahead=True, **own)[1]
    name = "propose_coupled" if rule == "coupled" else "moved_uniforms"
    right = getattr(choose, name)

    def unmoved(*given: Any) -> Any:
        return right(*given[:3], None if given[3] is None else given[3] * 0)

    monkeypatch.setattr(choose, name, unmoved)
    assert chains(1, is_ahead=True, **own)[1] != expected


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"num_pages": 20}, {"page_size": 1}, {"max_running": 2}], ids=str)
def test_chains_where_pages_or_places_run_out(options: dict[str, Any]) -> None:
    params = replace(LONG, max_tokens=24, ignore_eos=True)
    results, _, found = chains(4, is_ahead=True, params=params, **options)
    assert results == chains(4, is_ahead=False, params=params, **options)[0]
    assert any(found)
    assert (sum(own[2] for own in results) > 0) == ("max_running" not in options)


@pytest.mark.parametrize("wrong", ["accepted", "behind"])
def test_chains_launched_with_a_wrong_guess_are_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: how much was accepted, or the token behind it, is not that of the step before."""
    count = async_launch.count_accepted

    def miscount(works: Any, tokens: Any) -> Any:
        accepted, behind = count(works, tokens)
        return (accepted * 0, behind) if wrong == "accepted" else (accepted, behind * 0)

    monkeypatch.setattr(async_launch, "count_accepted", miscount)
    results, *_ = chains(1, is_ahead=True, params=replace(LONG, max_tokens=24, ignore_eos=True))
    assert results[0][0] != texts()[0][len(PROMPTS[0]) :][:24]


def draft_context(*, is_ahead: bool, forgets: bool = False) -> list[torch.Tensor]:
    """The drafter's K/V of all tokens known after a few cycles of several requests."""
    own = engine(drafts=True, is_ahead=is_ahead, policy="fixed")
    requests = [own.add_request(prompt, replace(LONG, max_tokens=40, ignore_eos=True)) for prompt in PROMPTS[:3]]
    model = own.core.draft_model
    assert model is not None
    for step in range(6):
        own.step()
        if forgets and step == 2:
            model.keep = lambda *_: None  # type: ignore[method-assign]
    own.core.kv_manager.settle()
    return [part for own in requests for part in model.store.extract(0, own.draft_table, 0, own.computed)]


def test_the_context_of_drafts_is_the_same() -> None:
    expected = draft_context(is_ahead=False)
    torch.testing.assert_close(draft_context(is_ahead=True), expected)
    with pytest.raises(AssertionError):  # planted
        torch.testing.assert_close(draft_context(is_ahead=True, forgets=True), expected)


@pytest.mark.slow
def test_a_policy_that_has_ceased_to_draft_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goodput with drafts that are never right, and are too dear."""
    settle(monkeypatch, draft=9.0)
    own = engine(drafts=True, policy="goodput")
    found = served(own, monkeypatch)
    (result,) = own.generate(PROMPTS[0], replace(LONG, max_tokens=120, ignore_eos=True))
    assert 40 < sum(found) < len(found) - 10
    assert result.token_ids == alone_long()


@functools.cache
def alone_long() -> list[int]:
    own = engine(is_ahead=False)
    return next(own.generate(PROMPTS[0], replace(LONG, max_tokens=120, ignore_eos=True))).token_ids


@pytest.mark.slow
def test_no_page_is_taken_from_anyone_for_a_pass_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """If pages run out, passes follow each other as without launches ahead, and the same requests release theirs."""
    preempted = []
    for is_ahead in (True, False):
        own = engine(is_ahead=is_ahead, num_pages=16)
        found = served(own, monkeypatch)
        results = list(own.generate(PROMPTS[:5], replace(LONG, ignore_eos=True)))
        assert any(found) == is_ahead
        preempted.append([result.stats.preemptions for result in results])
    assert preempted[0] == preempted[1]
    assert sum(preempted[0]) > 0


def test_a_request_that_moved_to_other_pages_is_computed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launched pass wrote to the request's former pages."""
    own = engine(page_size=1)
    found = served(own, monkeypatch)
    request = own.add_request(PROMPTS[0], LONG)
    for _ in range(4):
        own.step()
    own.core.scheduler.preempt(request)
    taken = own.core.pool.take(1)  # the one that is free again first
    own.step()
    assert request.computed == request.length - 1
    assert request.stats.preemptions == 1
    for page in taken:
        own.core.pool.writable(page)
    assert found == [False, False, True, True, False]
    while own.has_work:
        own.step()
    assert request.result().token_ids == alone(0, 0)[0]


def test_on_a_cpu_nothing_is_launched_ahead() -> None:
    assert not Engine(pair().target).core.async_launch.is_used


def test_without_fixed_memory_passes_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    own = engine(cuda_graphs=False)
    found = served(own, monkeypatch)
    list(own.generate(PROMPTS[:2], LONG))
    assert not any(found)


def test_the_pass_ahead_reads_the_tokens_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the zeros that stand for them: planted, and seen in the answer."""
    own = engine()
    replay = own.core.runner.replay
    monkeypatch.setattr(own.core.runner, "replay", lambda *given, **options: replay(*given[:3], {}, **options))
    (result,) = own.generate(PROMPTS[0], LONG)
    assert result.token_ids != alone(0, 0)[0]
