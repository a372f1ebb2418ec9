"""A pretended GPU has its next passes before the host waits for the tokens of the last ones; they are the CPU's."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from tests.gpu.pretended import CUDA, EVENT, move, pretended_cuda
from tests.gpu.test_engine import GREEDY, SEEDED, Both, both, pretended
from tests.tiny import block_proposer, greedy, place, random_drafter, random_prompts
from volley import Engine, SamplingParams
from volley.engine import capacity
from volley.memory.batch import Segment
from volley.memory.device import Device
from volley.memory.kv_cache import BlockTable
from volley.memory.kv_store import DenseKVStore
from volley.models.checkpoints.checkpoint import HeadConfig

__all__ = ["both"]
LONG = SamplingParams(max_tokens=60, ignore_eos=True)
SAMPLED = replace(LONG, temperature=1.0)


def watched(
    both: Both, count: int, params: SamplingParams, *, drafts: bool = True, is_ahead: bool = True, **options: Any
) -> tuple[list[int], list[int]]:
    """Launches that the device has left: when the host has the tokens of a step, and when it commits them."""
    with pretended_cuda() as counts:
        engine = Engine(both.target, both.drafter if drafts else None, num_pages=64, policy="fixed", **options)
        if not is_ahead:
            engine.core.async_launch.launch = lambda *_: None  # type: ignore[method-assign]
        for prompt in random_prompts(count, longest=20, seed=1):
            engine.add_request(prompt, params)
        committing = list[int]()
        engine.on_verified.append(lambda *_: committing.append(counts.unfinished))
        for _ in range(2):
            engine.step()
        counts.clear()
        committing.clear()
        for _ in range(4):
            engine.step()
        assert counts.waits.total() == 4, "one a step"
        assert {kind for kind, _ in counts.waits} == {EVENT}
        assert counts.operations["a graph"] == (8 if drafts else 4)
        return counts.left, committing


def with_head(both: Both, kind: str) -> Both:
    """The pair with a drafter that has a sequential head, or a confidence head beside one."""
    name, _, rated = kind.partition(" ")
    config = both.here.drafter.config
    head = HeadConfig(type=name, rank=4, candidates=8, state=5 if name == "domino" else None)
    rates = {"confidence_width": config.hidden_size + 4} if rated else {}
    drafter = random_drafter(**vars(replace(config, head=head, **rates)))
    with pretended():
        return both._replace(here=both.here._replace(drafter=drafter), drafter=cast(Any, move(copy.deepcopy(drafter))))


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [LONG, SAMPLED, replace(SAMPLED, top_p=0.9), replace(SAMPLED, seed=3)],
    ids=["greedy", "sampled", "top-p", "seeded"],
)
@pytest.mark.parametrize(
    ("count", "head", "own"),
    [
        *((count, None, own) for count in (1, 3) for own in ({"drafts": False}, {})),
        (3, None, {"draft_window": 8}),
        (3, "residual", {"draft_window": 8}),
        *((3, head, {}) for head in ("markov", "dspark rated", "selector", "domino")),
    ],
    ids=str,
)
def test_the_device_has_its_next_pass_when_the_host_has_its_tokens(
    both: Both, count: int, head: str | None, own: dict[str, Any], params: SamplingParams
) -> None:
    """The host waits once a step, however many tokens of a head follow each other."""
    left, committing = watched(both if head is None else with_head(both, head), count, params, **own)
    assert len(left) == 4
    assert min(left + committing) > 0


@pytest.mark.slow
def test_the_order_before_leaves_the_device_idle(both: Both) -> None:
    """Planted: what the test above would see."""
    left, committing = watched(both, 3, LONG, drafts=False, is_ahead=False)
    assert set(left + committing) == {0}


def found(target: Any, each: list[SamplingParams], **options: Any) -> list[list[int]]:
    engine = Engine(target, **{"num_pages": 64, **options})
    results = list(engine.generate(random_prompts(len(each), longest=20, seed=1), each))
    engine.check_integrity()
    return [result.token_ids for result in results]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_pages": 12, "page_size": 4}, {"max_running": 2}], ids=str)
def test_tokens_are_the_cpus(both: Both, options: dict[str, Any]) -> None:
    """Requests end by length and by stop tokens, greedy and sampled; some come when others have ended."""
    (long,) = found(both.here.target, [replace(GREEDY, max_tokens=9)])
    stopping = replace(GREEDY, max_tokens=9, stop_token_ids=(long[4],))
    each = [stopping, replace(SEEDED, max_tokens=7), GREEDY, SEEDED]
    expected = found(both.here.target, each, **options)
    with pretended() as counts:
        assert found(both.target, each, **options) == expected
    assert counts.replayed["_attention_kernel"] > 0


LENGTHS = (14, 5)
STOPPED = 6


def chains(target: Any, drafter: Any, texts: list[list[int]], own: dict[str, Any], **options: Any) -> Any:
    """Tokens and acceptance of requests that end by length and unforeseen, and how many cycles had been launched before."""
    engine = Engine(target, drafter, **{"num_pages": 64, "policy": "fixed", **options})
    place(engine, texts)
    serve, served = engine.core.async_launch.serve, list[bool]()
    engine.core.async_launch.serve = lambda step: served.append(serve(step)) or served[-1]  # type: ignore[method-assign]
    prompts = random_prompts(3, longest=20, seed=1)
    each = [SamplingParams(max_tokens=size, ignore_eos=True, **own) for size in LENGTHS]
    each.append(replace(each[0], stop_token_ids=(texts[2][len(prompts[2]) + STOPPED],)))
    results = list(engine.generate(prompts, each))
    engine.check_integrity()
    return [(own.token_ids, own.stats.accepted_lengths, own.stats.preemptions) for own in results], sum(served)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "options"),
    [
        ({}, {"max_running": 2}),
        ({}, {"num_pages": 10, "page_size": 4}),
        ({"temperature": 0.3, "seed": 3}, {"max_running": 2}),
        ({"temperature": 0.3, "seed": 3}, {"max_running": 2, "verification": "rejection"}),
        ({}, {"max_running": 2, "draft_window": 6}),
    ],
    ids=["greedy", "few pages", "matched", "speculative", "a window"],
)
def test_chains_are_the_cpus(both: Both, own: dict[str, Any], options: dict[str, Any]) -> None:
    texts = [prompt + greedy(both.here.hf, prompt, max(LENGTHS)) for prompt in random_prompts(3, longest=20, seed=1)]
    with mock.patch.object(capacity, "find_device", return_value=Device("cuda")):  # fixed memory, as on a GPU
        expected, _ = chains(both.here.target, both.here.drafter, texts, own, **options)
    with pretended() as counts:
        found, served = chains(both.target, both.drafter, texts, own, **options)
    assert found == expected
    greedily = [text[-max(LENGTHS) :][:size] for text, size in zip(texts, LENGTHS, strict=False)]
    assert [tokens for tokens, *_ in found[:2]] == greedily or own
    assert max(length for _, lengths, _ in found for length in lengths) >= 3
    assert (sum(preempted for *_, preempted in found) > 0) == ("num_pages" in options)
    assert served >= (1 if {"num_pages", "verification"} & options.keys() else 4)
    assert counts.replayed["_attention_kernel"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 10])
def test_a_pass_that_is_moved_is_the_pass_at_that_place(both: Both, window: int | None) -> None:
    """The bits are equal, of the target and of drafts with and without a window, on pages in any order."""
    with pretended():
        options = {"policy": "fixed", "num_pages": 64, "page_size": 4}
        engine = Engine(both.target, both.drafter, draft_window=window, **options)
        passes, drafting = engine.core.runner.passes, block_proposer(engine).passes
        assert passes is not None
        assert drafting is not None
        tables = [BlockTable(4, [7, 3, 9, 5, 2, 8, 14, 10]), BlockTable(4, [4, 12, 13, 11, 15, 16, 17, 1])]
        starts, moved, length = [13, 6], torch.tensor([3, 5], device=CUDA), 5
        tokens = torch.arange(10, 20, device=CUDA)
        model = engine.core.draft_model
        assert model is not None
        for own, store, causal in ((passes, engine.core.runner.store, True), (drafting, model.store, False)):
            assert isinstance(store, DenseKVStore)
            runs = []
            for pool in (*store.keys, *store.values):
                pool.normal_()
            for by in (None, moved):
                places = starts if by is not None else [16, 11]
                segments = [Segment(table, start, length, causal) for table, start in zip(tables, places, strict=True)]
                found = own(segments, [0] * 10, range(10), {0: tokens}, by)
                assert found is not None
                batch, (logits, *_) = found
                runs.append((batch.positions.tolist(), logits[:10].clone()))
            assert runs[0][0] == runs[1][0]
            assert torch.equal(runs[0][1], runs[1][1])


@pytest.mark.slow
def test_tokens_that_are_read_before_they_came_are_seen(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the host does not wait for the event behind the copy."""
    expected = found(both.here.target, [GREEDY])
    recorded = SimpleNamespace(synchronize=lambda: None)
    with pretended():
        assert found(both.target, [GREEDY]) == expected
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(record_event=lambda: recorded))
        assert found(both.target, [GREEDY]) != expected
