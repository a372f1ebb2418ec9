"""Nothing of a step outlives it: what requests, states and policies keep holds no work, no draft and no logits."""

import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.test_policies import Climbing, Copying, made, random_pilot
from tests.tiny import VOCAB, Pair, random_prompts
from volley import Engine, SamplingParams
from volley.decode.work import DraftSpec, Proposal, Verdict, Work
from volley.engine.engine import Engine as AnyEngine
from volley.engine.step import Step
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_store import KVStore
from volley.models.drafters.backlog import Backlog
from volley.policies.base import Cycle, Policy, View

OF_ONE_STEP = (Work, DraftSpec, Proposal, Verdict, View, Cycle, Step, RaggedBatch, Segment)
NOT_STATE = (nn.Module, KVStore, Backlog, torch.dtype, torch.device, type, random.Random)
"""Models and K/V, those to be made too, which are no part of any step."""
SKIPPED = {"stats", "chunks", "target", "hf", "model"}
DEPTH = 7


def fields_of(thing: Any) -> Iterator[tuple[str, Any]]:
    """The fields of an object, or the items of a collection."""
    if isinstance(thing, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in thing.items())
        return
    if isinstance(thing, list | tuple | set | deque):
        yield from ((f"[{index}]", value) for index, value in enumerate(thing))
        return
    names = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    names += list(getattr(thing, "__dict__", {}))
    for name in names:
        if name not in SKIPPED and not name.startswith("__") and hasattr(thing, name):
            yield f".{name}", getattr(thing, name)


def leftovers(thing: Any, path: str, seen: set[int], depth: int = DEPTH) -> Iterator[str]:
    """Return where an object holds something of a step."""
    if isinstance(thing, OF_ONE_STEP) or (isinstance(thing, torch.Tensor) and thing.dim() > 1):
        yield f"{path}: {type(thing).__name__}"
        return
    if depth == 0 or id(thing) in seen or isinstance(thing, NOT_STATE) or callable(thing):
        return
    if isinstance(thing, str | bytes | int | float | range | torch.Tensor | None):
        return
    seen.add(id(thing))
    for name, value in fields_of(thing):
        yield from leftovers(value, path + name, seen, depth - 1)


def held(engine: AnyEngine, requests: list[Any]) -> list[str]:
    seen: set[int] = set()
    owners = {
        "policy": engine.policy,
        "requests": requests,
        "runner": engine.core.runner,
        "pacing": engine.core.pacing,
        "scheduler": engine.core.scheduler,
        "proposer": engine.core.proposer,
        "kv_manager": engine.core.kv_manager,
        "procedure": engine.procedure,
    }
    return [place for name, owner in owners.items() for place in leftovers(owner, name, seen)]


PROMPTS = [[*prompt, *prompt] for prompt in random_prompts(4, longest=15, seed=2)]
PARAMS = [
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=12, temperature=1.0),
    SamplingParams(max_tokens=12, temperature=1.0, seed=4, stop_token_ids=(7,)),
    SamplingParams(max_tokens=12, repetition_penalty=1.2, logprobs=True, top_logprobs=2),
]
POLICIES: list[Any] = ["goodput", "feedback", "fixed", Climbing, Copying, random_pilot]
OPTIONS: list[dict[str, Any]] = [{}, {"denoising_steps": 2}, {"draft_window": 6, "num_pages": 20}]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_nothing_of_a_step_is_kept(pair: Pair, policy: Any, options: dict[str, Any]) -> None:
    engine = Engine(pair.target, pair.drafter, **{"policy": made(policy), "page_size": 4, "num_pages": 90, **options})
    requests = [engine.add_request(p, params) for p, params in zip(PROMPTS, PARAMS, strict=True)]
    while engine.has_work:
        engine.step()
        assert held(engine, requests) == []


class Hoarding(Policy):
    """Keeps one thing of every step."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.kept: dict[str, Any] = {}

    def decide(self, views: Any, under_way: int) -> list[DraftSpec]:
        specs = [view.draft(2) for view in views]
        if self.what in ("views", "asks"):
            self.kept["before"] = [views, specs][self.what == "asks"]
        return specs

    def observe(self, cycles: Any) -> None:
        if self.what == "cycles":
            self.kept["after"] = tuple(cycles)


@pytest.mark.parametrize("what", ["views", "asks", "cycles"])
def test_a_policy_that_keeps_something_is_seen(pair: Pair, what: str) -> None:
    engine = Engine(pair.target, pair.drafter, policy=Hoarding(what))
    request = engine.add_request(PROMPTS[0], PARAMS[0])
    for _ in range(2):
        engine.step()
    assert held(engine, [request])
    assert all(place.startswith("policy.kept") for place in held(engine, [request]))


@pytest.mark.parametrize("where", ["runner", "scheduler", "kv_manager", "request"])
def test_logits_and_works_that_are_kept_are_seen(pair: Pair, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    engine = Engine(pair.target, pair.drafter, policy="fixed")
    request = engine.add_request(PROMPTS[0], PARAMS[0])
    keep = engine.core.kv_manager.keep

    def spied(step: Step) -> None:
        assert step.logits is not None
        assert step.logits.shape[-1] == VOCAB
        if where == "request":
            request.scores.append(step.works)  # type: ignore[arg-type]
        elif where == "runner":
            engine.core.runner.logits = step.logits  # type: ignore[attr-defined]
        else:
            getattr(engine.core, where).last = [step]
        keep(step)

    monkeypatch.setattr(engine.core.kv_manager, "keep", spied)
    engine.step()
    assert [place.split(":")[0] for place in held(engine, [request])] == [
        {
            "request": "requests[0].scores[0][0]",
            "runner": "runner.logits",
            "scheduler": "scheduler.last[0]",
            "kv_manager": "scheduler.kv_manager.last[0]",
        }[where]
    ]
