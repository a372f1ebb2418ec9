"""Memory is bounded by what was configured, whatever arrives and however long a text grows."""

import random

from tests.tiny import VOCAB, Pair, make_pair, teach
from volley import Engine, SamplingParams


def test_two_hundred_requests_in_a_pool_too_small_for_them(pair: Pair) -> None:
    """All are answered as they are with room for all, and nothing ever grows beyond the pool."""
    chance = random.Random(0)
    prompts = [[chance.randrange(VOCAB) for _ in range(chance.randint(1, 60))] for _ in range(200)]
    params = [
        SamplingParams(max_tokens=chance.randint(1, 30), temperature=float(i % 3 == 0), seed=i) for i in range(200)
    ]
    plain = [r.token_ids for r in Engine(pair.target, num_pages=4000).generate(prompts, params)]
    engine = Engine(pair.target, pair.drafter, page_size=4, num_pages=36, max_batch_tokens=64, verification="match")
    teach(engine, {tuple(prompt): answer for prompt, answer in zip(prompts, plain, strict=True)})
    stores = engine.runner.store, engine.runner.draft_store
    size = sum(store.nbytes for store in stores)
    requests = [engine.add_request(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    most = finished = 0
    while engine.scheduler.has_work:
        finished += len(engine.step())
        alive = {page for request in engine.scheduler.running for page in request.table.pages}
        most = max(most, len(alive))
        assert all(0 <= page < 36 for page in alive)
    assert finished == 200
    assert [request.result().token_ids for request in requests] == plain
    assert sum(request.stats.preemptions for request in requests) > 20
    assert most > 30, "the pool was full"
    assert sum(store.nbytes for store in stores) == size
    assert engine.pool.num_used == 0
    engine.check_integrity()


def test_a_draft_window_keeps_the_drafters_cache_constant_over_8k_tokens() -> None:
    pair = make_pair(max_position_embeddings=8192)
    engine = Engine(pair.target, pair.drafter, draft_window=64, max_running=1, num_pages=512, max_batch_tokens=2048)
    size = engine.runner.draft_store.nbytes
    prompt = [7 * i % VOCAB for i in range(8192 - 40)]
    request = engine.add_request(prompt, SamplingParams(max_tokens=40))
    pages: set[tuple[int, ...]] = set()
    while request.finish_reason is None:
        engine.step()
        pages.add(tuple(request.draft_table.pages))
    assert len(request.token_ids) == 8192
    assert len(pages - {()}) == 1, "the same pages from the first chunk to the last token"
    assert size == engine.runner.draft_store.nbytes < engine.runner.store.nbytes / 50
