"""One ragged pass gives every request the logits that it would have alone. Passes on made-up text are timed: the clock is read,
but a test asks only that it moved."""

import pytest
import torch

from tests.made_up import request
from tests.tiny import Pair, greedy, random_prompts
from volley import Engine, SamplingParams
from volley.decode.work import DraftSpec, Proposal, Rule, Shape, Work
from volley.engine.runner import Runner
from volley.engine.step import Step
from volley.memory.batch import RaggedBatch
from volley.memory.kv_cache import PagePool
from volley.memory.kv_store import make_store
from volley.models.drafters.draft_model import DraftModel
from volley.models.targets.target import Target
from volley.procedures.request import Request

PROMPTS = random_prompts(3, longest=12, seed=5)


TIMED = Runner.seconds


def runner_for(pair: Pair, model: DraftModel | None = None) -> Runner:
    target = pair.target
    return Runner(target, make_store("auto", target.kv_shapes, 200, target.dtype, target.device), model)


@torch.inference_mode()
def whole(pair: Pair, token_ids: list[int]) -> torch.Tensor:
    return pair.hf(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]


@torch.inference_mode()
def test_prompts_chains_and_trees_share_a_pass(pair: Pair) -> None:
    runner, pool = runner_for(pair, Engine(pair.target, pair.drafter, num_pages=4).core.draft_model), PagePool(50, 4)
    requests = [request(prompt) for prompt in PROMPTS]
    for own in requests:
        assert pool.grow(own.table, own.length + 8)
    step = Step([own.procedure.read(own, own.length) for own in requests])
    runner.forward(step)
    assert step.logits is not None
    assert [work.rows for work in step.works] == [slice(0, 1), slice(1, 2), slice(2, 3)]
    for own, work in zip(requests, step.works, strict=True):
        torch.testing.assert_close(step.logits[work.rows], whole(pair, own.token_ids)[-1:], rtol=1e-3, atol=1e-4)
        own.computed = own.length
        own.append([7], 0)

    works: list[Work[Request]] = [Work(own, DraftSpec(Shape.CHAIN, Rule.GREEDY, 2, 2)) for own in requests]
    works[0].proposal = Proposal([5, 6])
    works[1].proposal = Proposal([5, 6, 8], parents=(0, 0, 1))
    texts = [[[], [5], [5, 6]], [[], [5], [6], [5, 8]], [[]]]
    step = Step(works)
    runner.forward(step)
    assert step.logits is not None
    assert step.batch is not None
    assert step.features is not None
    assert step.features.shape == (len(step.batch), 2 * 32)
    for own, work, paths in zip(requests, works, texts, strict=True):
        expected = torch.stack([whole(pair, [*own.token_ids, *path])[-1] for path in paths])
        torch.testing.assert_close(step.logits[work.rows], expected, rtol=1e-3, atol=1e-4)


@torch.inference_mode()
def test_a_chunk_of_a_prompt_needs_no_logits(pair: Pair) -> None:
    runner, pool, own = runner_for(pair), PagePool(50, 4), request(list(range(9)))
    assert pool.grow(own.table, 9)
    step = Step([own.procedure.read(own, 4)])
    runner.forward(step)
    assert step.logits is not None
    assert len(step.logits) == 0
    assert step.works[0].rows == slice(0, 0)
    assert step.features is None, "nobody taps it"


@pytest.mark.parametrize(("tokens", "requests"), [(1, 1), (12, 3), (600, 1)])
def test_a_timed_pass_has_as_many_tokens_as_it_says(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tokens: int, requests: int
) -> None:
    """One of 600 tokens is longer than the context of 512: it is timed without any text before it."""
    seen: list[RaggedBatch] = []
    forward = Target.forward

    def spied(self: Target, batch: RaggedBatch, *others: object) -> object:
        seen.append(batch)
        return forward(self, batch, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(Target, "forward", spied)
    assert TIMED(runner_for(pair), tokens, requests) > 0
    assert {(len(batch), len(batch.segments)) for batch in seen} == {(tokens, requests)}


def test_texts_that_run_do_not_notice_a_timed_pass(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter, policy="fixed", num_pages=20)
    prompt = random_prompts(1, seed=3)[0]
    request = engine.add_request(prompt, SamplingParams(max_tokens=12))
    while request.finish_reason is None:
        engine.step()
        assert TIMED(engine.core.runner, 4, 2) > 0
    assert request.result().token_ids == greedy(pair.hf, prompt, 12)
