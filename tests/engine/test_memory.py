"""Memory is bounded by what was configured, whatever arrives and however long a text grows."""

import random
from collections.abc import Sequence

import pytest

from tests.tiny import VOCAB, Pair, block_proposer, teach
from volley import Engine, SamplingParams
from volley.decode.work import DraftSpec
from volley.engine.runner import Runner
from volley.engine.step import Step
from volley.policies.base import Policy, View


@pytest.mark.slow
def test_two_hundred_requests_in_a_pool_too_small_for_them(pair: Pair) -> None:
    """All are answered as they are with room for all, and nothing ever grows beyond the pool."""
    chance = random.Random(0)
    prompts = [[chance.randrange(VOCAB) for _ in range(chance.randint(1, 60))] for _ in range(200)]
    params = [
        SamplingParams(max_tokens=chance.randint(1, 30), temperature=float(i % 3 == 0), seed=i) for i in range(200)
    ]
    plain = [r.token_ids for r in Engine(pair.target, num_pages=4000, block_size=1).generate(prompts, params)]
    engine = Engine(pair.target, pair.drafter, page_size=4, num_pages=36, max_batch_tokens=64, verification="coupled")
    teach(engine, {tuple(prompt): answer for prompt, answer in zip(prompts, plain, strict=True)})
    stores = engine.core.runner.store, block_proposer(engine).model.store
    size = sum(store.nbytes for store in stores)
    requests = [engine.add_request(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    most = finished = 0
    while engine.core.scheduler.has_work:
        finished += len(engine.step())
        alive = {page for request in engine.core.scheduler.running for page in request.table.pages}
        most = max(most, len(alive))
        assert all(0 <= page < 36 for page in alive)
    assert finished == 200
    assert [request.result().token_ids for request in requests] == plain
    assert sum(request.stats.preemptions for request in requests) > 20
    assert most > 30, "the pool was full"
    assert sum(store.nbytes for store in stores) == size
    assert engine.core.pool.num_used == 0
    engine.check_integrity()


class Everything(Policy):
    """Grows trees, and copies whatever is found."""

    uses_lookup = True

    def decide(self, views: Sequence[View], under_way: int) -> list[DraftSpec]:
        return [
            view.draft(view.limit, nodes=40)
            if view.request_id % 2 or not view.lookup_confidence
            else view.lookup(len(view.lookup_confidence))
            for view in views
        ]


def sizes_of_passes(engine: Engine, steps: int) -> list[int]:
    sizes: list[int] = []
    forward = engine.core.runner.forward

    class Spy(Runner):
        def forward(self, step: Step) -> None:
            forward(step)
            assert step.batch is not None
            sizes.append(len(step.batch))

    inner, engine.core.runner = engine.core.runner, Spy(engine.target, engine.core.runner.store)
    for _ in range(steps):
        engine.step()
    engine.core.runner = inner
    return sizes


def test_trees_and_copies_stay_within_a_pass_and_leave_room_for_prompts(pair: Pair) -> None:
    most = 80
    engine = Engine(pair.target, pair.drafter, policy=Everything(), max_batch_tokens=most, num_pages=400)
    for start in range(6):
        engine.add_request([start, 1, 2, 3] * 5, SamplingParams(max_tokens=60))
    sizes = sizes_of_passes(engine, 8)
    late = engine.add_request([7] * 60, SamplingParams(max_tokens=8))
    steps = 0
    while not late.num_output:
        sizes += sizes_of_passes(engine, 1)
        steps += 1
    assert max(sizes) <= most
    assert sum(size > most // 2 for size in sizes) > 3, "passes are used"
    assert steps <= 60 * 2 // (most - 6 * pair.drafter.config.block_size) + 2, (
        "half of what chains leave is for prompts"
    )


def test_chains_that_fill_a_pass_do_not_starve_prompts(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter, policy="fixed", max_batch_tokens=16, num_pages=400)
    early = [engine.add_request([start, 1, 2], SamplingParams(max_tokens=80)) for start in range(6)]
    while not all(request.num_output for request in early):
        engine.step()
    late = engine.add_request([7] * 20, SamplingParams(max_tokens=8))
    for _ in range(20 // 2):
        engine.step()
    assert late.num_output
    assert not any(request.finish_reason for request in early)
