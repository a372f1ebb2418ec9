"""Random arrivals, aborts, preemptions and settings: no answer changes, no page is lost."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.costs import settle
from tests.engine.test_policies import Copying, Restless, made, random_pilot
from tests.tiny import Pair, make_pair, random_prompts, teach
from volley import Engine, SamplingParams
from volley.engine.kv_manager import DraftRing
from volley.memory.kv_store import KVDtype
from volley.policies.goodput import Goodput
from volley.procedures.request import Request

PROMPTS = random_prompts(5, longest=22, seed=4)
PROMPTS += [PROMPTS[0] + [7], PROMPTS[1] + PROMPTS[2][:3]]
PARAMS = [
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=3, priority=1),
    SamplingParams(max_tokens=12, temperature=1.0, seed=5, top_k=30, priority=-1),
    SamplingParams(max_tokens=12, stop_token_ids=tuple(range(0, 50, 9))),
    SamplingParams(max_tokens=12, temperature=1.5, seed=6, stop_token_ids=(1, 2, 3, 4)),
]
POOLS: list[tuple[KVDtype, KVDtype]] = [
    ("auto", "auto"),
    ("auto", "auto"),
    ("auto", "int4"),
    ("int8", "auto"),
    ("int4", "int8"),
]
CHOICES = st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, len(PARAMS) - 1))


@functools.cache
def shared() -> Pair:
    return make_pair()


@functools.cache
def alone(prompt: int, params: int, kv_dtype: KVDtype = "auto") -> tuple[list[int], str]:
    """Plain decoding of one request with a pool to itself."""
    (result,) = Engine(shared().target, num_pages=8, kv_dtype=kv_dtype).generate(PROMPTS[prompt], PARAMS[params])
    return result.token_ids, result.finish_reason


@functools.cache
def never_stopping(prompt: int, params: int) -> list[int]:
    own = replace(PARAMS[params], stop_token_ids=(), max_tokens=12)
    return next(iter(Engine(shared().target, num_pages=8).generate(PROMPTS[prompt], own))).token_ids


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), CHOICES),
        st.tuples(st.just("arrive"), CHOICES),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("preempt"), st.integers(0, 9)),
        st.tuples(st.just("block_size"), st.integers(1, 6)),
        st.tuples(st.just("tree_nodes"), st.integers(1, 20)),
        st.tuples(st.just("policy"), st.sampled_from(["goodput", "feedback", Restless, Copying, random_pilot])),
        st.tuples(st.just("forget"), st.none()),
    ),
    min_size=4,
    max_size=22,
)


@pytest.fixture(scope="module")
def _settled() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        settle(monkeypatch)
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_settled")
@given(
    actions=ACTIONS,
    num_pages=st.integers(10, 30),
    chunk=st.sampled_from([3, 16, 100]),
    prefix_caching=st.booleans(),
    window=st.sampled_from([None, None, 5]),
    pools=st.sampled_from(POOLS),
    steps=st.sampled_from([1, 1, 2]),
)
def test_whatever_happens_every_answer_is_the_one_given_alone(  # type: ignore[no-untyped-def]
    actions, num_pages, chunk, prefix_caching, window, pools, steps
) -> None:
    pair = shared()
    engine = Engine(
        pair.target,
        pair.drafter,
        page_size=4,
        num_pages=num_pages,
        max_batch_tokens=chunk,
        max_running=4,
        prefix_caching=prefix_caching,
        draft_window=window,
        denoising_steps=steps,
        verification="coupled",
        kv_dtype=pools[0],
        draft_kv_dtype=pools[1],
    )
    teach(engine, {tuple(prompt): never_stopping(i, 0) for i, prompt in enumerate(PROMPTS)})
    requests: list[tuple[Request, int, int]] = []
    finished: list[Request] = []

    def step() -> None:
        done = engine.step()
        engine.check_integrity()
        for request in done:
            assert request.finish_reason is not None
            assert not request.table.pages
            assert not request.draft_table.pages
        for request in engine.core.scheduler.running:
            assert request.computed < len(request.token_ids)
            assert len(request.table.pages) == engine.core.pool.pages_for(request.computed)
        finished.extend(done)

    for action, value in actions:
        if action == "arrive":
            prompt, params = value
            requests.append((engine.add_request(PROMPTS[prompt], PARAMS[params]), prompt, params))
        elif action == "step":
            for _ in range(value):
                step()
        elif action == "abort" and requests:
            engine.abort(requests[value % len(requests)][0])
        elif action == "preempt" and engine.core.scheduler.running:
            engine.core.scheduler.preempt(engine.core.scheduler.running[value % len(engine.core.scheduler.running)])
        elif action == "block_size":
            engine.block_size = value
        elif action == "policy":
            engine.policy = made(value)
        elif action == "tree_nodes" and steps == 1:
            engine.reconfigure(replace(engine.config, tree_nodes=value if value > 1 else None))
        elif action == "forget":
            engine.reset_prefix_cache()
        engine.check_integrity()
    for _ in range(2000):
        if not engine.core.scheduler.has_work:
            break
        step()
    assert not engine.core.scheduler.has_work
    assert engine.core.pool.num_used == 0
    for state in engine.core.kv_manager.states:
        if isinstance(state, DraftRing):
            assert state.pool.num_used == 0
    for request, prompt, params in requests:
        expected, reason = alone(prompt, params, pools[0])
        result = request.result()
        if result.finish_reason == "abort":
            assert result.token_ids == expected[: len(result.token_ids)]
            assert request not in finished
        else:
            assert (result.token_ids, result.finish_reason) == (expected, reason)
            assert finished.count(request) == 1


def test_stepping_an_idle_engine_does_nothing(pair: Pair) -> None:
    assert Engine(pair.target, pair.drafter, num_pages=4).step() == []


@pytest.mark.parametrize(
    ("start", "is_read"),
    [
        (lambda engine: engine.generate(PROMPTS, PARAMS[0]), False),
        (lambda engine: engine.generate(PROMPTS, [SamplingParams(max_tokens=3 + 5 * i) for i in range(7)]), True),
        (lambda engine: engine.stream(PROMPTS[0], SamplingParams(max_tokens=30)), True),
    ],
    ids=["unread", "results", "stream"],
)
def test_an_abandoned_iterator_frees_its_pages(pair: Pair, start: Callable[[Engine], Any], is_read: bool) -> None:
    engine = Engine(pair.target, pair.drafter, page_size=4, num_pages=60)
    results = start(engine)
    if is_read:
        next(results)
    assert (engine.core.pool.num_used > 0) == is_read
    del results
    assert not engine.core.scheduler.has_work
    assert engine.core.pool.num_used == 0
    engine.check_integrity()


def test_an_error_in_a_step_frees_everything(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter, page_size=4, num_pages=60)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    engine.on_verified.append(fail)
    with pytest.raises(KeyboardInterrupt):
        list(engine.generate(PROMPTS, SamplingParams(max_tokens=9)))
    assert engine.core.pool.num_used == 0
    assert not engine.core.scheduler.has_work
    engine.check_integrity()
    engine.on_verified.clear()
    (result,) = engine.generate(PROMPTS[0], PARAMS[0])
    assert result.token_ids == alone(0, 0)[0]


@pytest.mark.parametrize("where", ["commit", "pass"])
def test_an_error_of_one_answer_leaves_those_of_others(pair: Pair, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two iterators on one engine: one's error ends its own answers, and the other goes on with the same tokens."""
    engine = Engine(pair.target, pair.drafter, page_size=4, num_pages=60)
    failing, other = (engine.generate(PROMPTS[i], PARAMS[0]) for i in (0, 1))
    stream = engine.stream(PROMPTS[2], PARAMS[0])
    texts = [next(stream)]

    def fail(request: Any, *_: object) -> None:
        if request.token_ids[: len(PROMPTS[0])] == PROMPTS[0] and request.num_output > 3:
            raise ValueError("planted")

    def fall(*_: object) -> None:
        raise ValueError("planted")

    if where == "commit":
        engine.on_verified.append(fail)
    else:
        engine.core.scheduler.add(engine._make_request(PROMPTS[3], PARAMS[0]))
        monkeypatch.setattr(engine.core.kv_manager, "keep", fall)
    with pytest.raises(ValueError, match="planted"):
        next(failing)
    monkeypatch.undo()
    engine.check_integrity()
    assert next(other).token_ids == alone(1, 0)[0]
    texts += stream
    assert [token for chunk in texts for token in chunk.token_ids] == alone(2, 0)[0]


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt])
def test_an_error_with_the_last_token_leaves_nothing_that_is_stepped_again(pair: Pair, raised: type) -> None:
    engine = Engine(pair.target, pair.drafter, page_size=4, num_pages=60, policy="goodput")

    def fail(request: Request, *_: object) -> None:
        if request.finish_reason is not None and request.token_ids[: len(PROMPTS[0])] == PROMPTS[0]:
            raise raised("planted")

    engine.on_verified.append(fail)
    with pytest.raises(raised, match="planted"):
        list(engine.generate([PROMPTS[0], PROMPTS[1]], PARAMS[0]))
    assert not engine.has_work
    (result,) = engine.generate([PROMPTS[1]], PARAMS[0])
    assert result.token_ids == alone(1, 0)[0]
    assert not cast(Goodput, engine.policy).acceptance._records
    engine.check_integrity()


def test_an_error_is_raised_where_its_own_result_is_asked_for(pair: Pair) -> None:
    """And not by the iterator that happens to run the step."""
    engine = Engine(pair.target, pair.drafter, page_size=4, num_pages=60)

    def fail(request: Request, *_: object) -> None:
        if request.token_ids[: len(PROMPTS[1])] == PROMPTS[1] and request.num_output > 3:
            raise ValueError("planted")

    engine.on_verified.append(fail)
    failing = engine.generate([PROMPTS[1], PROMPTS[2]], PARAMS[0])
    stream = engine.stream(PROMPTS[1], PARAMS[0])
    next(stream)
    engine.core.scheduler.add(engine._make_request(PROMPTS[1], PARAMS[0]))  # whose result nobody asks for
    (result,) = engine.generate(PROMPTS[0], PARAMS[0])
    assert result.token_ids == alone(0, 0)[0]
    for iterator in (failing, stream):
        with pytest.raises(ValueError, match="planted"):
            list(iterator)
    assert not engine.has_work
    engine.check_integrity()


@pytest.mark.parametrize("window", [None, 5])
def test_an_admission_that_fails_gives_its_pages_back(
    pair: Pair, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(pair.target, pair.drafter, page_size=4, num_pages=60, draft_window=window)
    list(engine.generate(PROMPTS[0], PARAMS[0]))  # its pages are found
    waiting = engine.generate([PROMPTS[0] + [7, 8, 9]], PARAMS[0])
    inner = engine.core.kv_manager.pages.capacity

    def fail(request: Request) -> int:
        if errors:
            raise errors.pop()
        return inner(request)

    errors = [ValueError("planted")]
    monkeypatch.setattr(engine.core.kv_manager.pages, "capacity", fail)
    stream = engine.stream(PROMPTS[0], PARAMS[0])
    engine.core.scheduler.add(engine._make_request(PROMPTS[0], PARAMS[0]))
    with pytest.raises(ValueError, match="planted"):
        next(stream)
    assert len(list(waiting)) == 1
    while engine.has_work:
        engine.step()
    assert engine.core.pool.num_used == 0
    engine.check_integrity()


def test_a_listener_may_end_a_request(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter, page_size=4, num_pages=60)
    engine.on_verified.append(
        lambda request, proposal, verdict: engine.abort(request) if request.num_output > 3 else None
    )
    results = list(engine.generate(PROMPTS, PARAMS[0]))
    assert [result.finish_reason for result in results] == ["abort"] * len(PROMPTS)
    assert [result.token_ids[:4] for result in results] == [alone(i, 0)[0][:4] for i in range(len(PROMPTS))]
    assert engine.core.pool.num_used == 0
    engine.check_integrity()


def test_two_engines_on_one_target_do_not_disturb_each_other(pair: Pair) -> None:
    one = Engine(pair.target, pair.drafter, num_pages=60)
    two = Engine(pair.target, num_pages=60)
    first, second = (engine.generate(PROMPTS, PARAMS[0]) for engine in (one, two))
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        assert a.token_ids == b.token_ids == alone(i, 0)[0]


def test_an_aborted_request_keeps_what_it_had(pair: Pair) -> None:
    engine = Engine(pair.target, num_pages=20)
    request = engine.add_request(PROMPTS[0], PARAMS[0])
    for _ in range(4):
        engine.step()
    engine.abort(request)
    engine.abort(request)
    assert request.result().finish_reason == "abort"
    assert request.result().token_ids == alone(0, 0)[0][:4]
