"""Draft trees change how many tokens a pass yields, never which (fp32); K/V of accepted branches end where they belong."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine import test_greedy
from tests.engine.test_greedy import BASE, COUNT, PARAMS
from tests.models.targets.test_target import ARCHITECTURES
from tests.tiny import (
    VOCAB,
    Pair,
    answered,
    block_proposer,
    eager_model,
    greedy,
    make_pair,
    random_drafter,
    teach,
    tokens,
)
from volley import Engine, SamplingParams
from volley.decode.work import DraftSpec, Phase, Shape, Verdict, Works
from volley.engine.runner import Runner
from volley.engine.step import Step
from volley.errors import ConfigError
from volley.models.targets.target import Target
from volley.policies.base import View
from volley.policies.fixed import Fixed
from volley.procedures.request import Request
from volley.proposers.block import BlockProposer

PROMPTS = BASE


def expected() -> list[list[int]]:
    return test_greedy.expected()[: len(PROMPTS)]


def tempt(engine: Engine) -> None:
    """Put another token before the best of every third position, so that the right branch is not the first."""
    inner = block_proposer(engine)

    class Tempted(BlockProposer):
        def position_logits(self, works: Works, blocks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            logits, hidden = inner.position_logits(works, blocks)
            logits = logits.clone()
            rows = torch.arange(0, len(logits), 3)
            best, token = logits[rows].max(dim=-1)
            logits[rows, (token + 1) % VOCAB] = best + 1
            return logits, hidden

    engine.core.proposer = Tempted(inner.model, inner.config)


def watch(engine: Engine) -> list[Verdict]:
    seen: list[Verdict] = []
    engine.on_verified.append(lambda request, proposal, verdict: seen.append(verdict))
    return seen


def moved(verdicts: list[Verdict]) -> int:
    return sum(verdict.path != tuple(range(1, verdict.accepted + 1)) for verdict in verdicts if verdict.path)


def taught(pair: Pair, **options: Any) -> Engine:
    engine = Engine(pair.target, pair.drafter, **{"page_size": 4, "num_pages": 200, "tree_nodes": 14, **options})
    teach(engine, {tuple(prompt): answer for prompt, answer in zip(PROMPTS, expected(), strict=True)})
    tempt(engine)
    return engine


def run(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    results = answered(engine, prompts, PARAMS)
    assert all(length <= engine.block_size for result in results for length in result.stats.accepted_lengths)
    return tokens(results)


@pytest.mark.slow
@pytest.mark.parametrize("tree_nodes", [2, 5, 14, 60])
@pytest.mark.parametrize("block_size", [1, 2, 4, 6])
def test_every_budget_and_depth(pair: Pair, tree_nodes: int, block_size: int) -> None:
    engine = taught(pair, tree_nodes=tree_nodes, block_size=block_size)
    seen = watch(engine)
    assert run(engine) == expected()
    if block_size > 2 and tree_nodes > 5:
        assert max(verdict.accepted for verdict in seen) == block_size - 1
        assert moved(seen) > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_architecture(name: str) -> None:
    """Sliding windows, capped scores, sinks: positions inside a tree are depths everywhere."""
    hf = eager_model(ARCHITECTURES[name]())
    target = Target(hf)
    plain = run(Engine(target, page_size=4, block_size=1))
    engine = Engine(target, random_drafter(), page_size=4, tree_nodes=14)
    teach(engine, {tuple(prompt): answer for prompt, answer in zip(PROMPTS, plain, strict=True)})
    tempt(engine)
    seen = watch(engine)
    assert run(engine) == plain
    assert moved(seen) > 5


class EveryOther(Fixed):
    """Trees for every other request, chains for the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[frozenset[Shape]] = set()

    def decide(self, views: Sequence[View], under_way: int) -> list[DraftSpec]:
        specs = [view.draft(self.block_size - 1, nodes=13 * (view.request_id % 2)) for view in views]
        self.shapes.add(frozenset(spec.shape for spec in specs))
        return specs


def test_trees_chains_and_prompts_share_passes(pair: Pair) -> None:
    policy = EveryOther()
    engine = taught(pair, tree_nodes=None, policy=policy, max_batch_tokens=40)
    kinds: set[frozenset[Phase]] = set()
    forward = engine.core.runner.forward

    class Spy(Runner):
        def forward(self, step: Step) -> None:
            kinds.add(frozenset(work.phase for work in step.works))
            forward(step)

    engine.core.runner = Spy(pair.target, engine.core.runner.store)
    assert run(engine) == expected()
    assert frozenset({Shape.CHAIN, Shape.TREE}) in policy.shapes
    assert frozenset({Phase.PREFILL, Phase.DECODE}) in kinds


def decode_until(engine: Engine, prompt: list[int], length: int) -> Request:
    request = engine.add_request(prompt, SamplingParams(max_tokens=100))
    while len(request.token_ids) < length:
        engine.step()
    return request


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_compacted_pages_hold_what_prefill_would_have_written(pair: Pair, page_size: int) -> None:
    engine = taught(pair, page_size=page_size)
    seen = watch(engine)
    requests = [decode_until(engine, prompt, len(prompt) + 12) for prompt in PROMPTS[:3]]
    assert moved(seen) > 3
    for request in requests:
        fresh = Engine(pair.target, pair.drafter, page_size=page_size, num_pages=200)
        whole = decode_until(fresh, request.token_ids[: request.computed], request.computed + 1)
        assert whole.computed == request.computed
        for own in (engine, fresh):
            own.core.kv_manager.settle()
        for stores in (
            (engine.core.runner.store, fresh.core.runner.store),
            (block_proposer(engine).model.store, block_proposer(fresh).model.store),
        ):
            rows = [own.table.slot_array(0, own.computed) for own in (request, whole)]
            for layer in range(len(stores[0].keys)):
                for ours, theirs in zip(*((s.keys[layer], s.values[layer]) for s in stores), strict=True):
                    torch.testing.assert_close(ours[rows[0]], theirs[rows[1]], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_answers_written_by_trees_are_found_as_prefixes(pair: Pair) -> None:
    """Published pages are the compacted ones: a second turn on them gives the tokens of a cold start."""
    engine = taught(pair)
    untaught = BlockProposer(block_proposer(engine).model, engine.config)
    assert run(engine, PROMPTS[:2]) == expected()[:2]
    for prompt, answer in zip(PROMPTS[:2], expected(), strict=False):
        turn = [*prompt, *answer, 5, 6]
        engine.core.proposer = untaught
        (second,) = engine.generate([turn], PARAMS)
        assert second.token_ids == greedy(pair.hf, turn, COUNT)
        assert second.stats.cached_tokens >= len(prompt) + COUNT - 5


def test_log_probabilities_are_those_of_plain_decoding(pair: Pair) -> None:
    params = [SamplingParams(max_tokens=COUNT, logprobs=True, temperature=t, seed=3) for t in (0.0, 1.0, 0.7)]
    plain = list(Engine(pair.target, block_size=1).generate(PROMPTS[:3], params))
    engine = Engine(pair.target, pair.drafter, tree_nodes=14)
    teach(engine, {tuple(p): r.token_ids for p, r in zip(PROMPTS, plain, strict=False)})
    tempt(engine)
    for result, reference in zip(engine.generate(PROMPTS[:3], params), plain, strict=True):
        assert result.token_ids == reference.token_ids
        assert result.logprobs == pytest.approx(reference.logprobs, abs=1e-4)


@pytest.mark.parametrize("num_pages", [8, 9])
def test_the_end_of_context_and_pool_clips_the_tree(num_pages: int) -> None:
    """Eight pages hold the context of 32 tokens and no more: near its end there is no room for a tree beside it."""
    small = make_pair(max_position_embeddings=32)
    prompt = list(range(20))
    answer = greedy(small.hf, prompt, 12)
    engine = Engine(small.target, small.drafter, page_size=4, num_pages=num_pages, tree_nodes=25)
    teach(engine, {tuple(prompt): answer})
    tempt(engine)
    sizes: list[int] = []
    engine.on_verified.append(lambda request, proposal, verdict: sizes.append(len(proposal.token_ids)))
    (result,) = engine.generate(prompt, SamplingParams(max_tokens=100))
    assert result.finish_reason == "length"
    assert result.token_ids == answer
    assert result.stats.preemptions == 0
    assert sorted(sizes)[-1] in (11, 15)


def test_a_tree_takes_no_pages_from_other_requests(pair: Pair) -> None:
    """A tree needs no preemption if a chain needs none."""
    two = PROMPTS[:2]
    pages = sum(-(-(len(prompt) + COUNT) // 4) for prompt in two)
    engine = taught(pair, num_pages=pages, tree_nodes=40)
    results = list(engine.generate(two, PARAMS))
    assert [result.token_ids for result in results] == expected()[:2]
    assert all(result.stats.preemptions == 0 for result in results)


def test_what_a_tree_cannot_be_combined_with_is_refused(pair: Pair) -> None:
    for options, message in (
        ({"tree_nodes": 1}, "a tree has 2 or more, anchor included"),
        ({"tree_nodes": 8, "denoising_steps": 2}, "a tree grows from the probabilities of one draft pass"),
        ({"tree_nodes": 8, "verification": "rejection"}, "rejection sampling is biased on a tree"),
    ):
        with pytest.raises(ConfigError, match=message):
            Engine(pair.target, pair.drafter, **options)
    with pytest.raises(ConfigError, match="tree_nodes: only a drafter reads such a setting"):
        Engine(pair.target, tree_nodes=8)
    engine = Engine(pair.target, pair.drafter, tree_nodes=8)
    with pytest.raises(ConfigError, match="use denoising_steps=1"):
        engine.reconfigure(replace(engine.config, denoising_steps=2))
    assert (engine.config.tree_nodes, engine.config.denoising_steps) == (8, 1)
    engine.reconfigure(replace(engine.config, tree_nodes=None, denoising_steps=2))
