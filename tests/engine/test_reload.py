"""A drafter takes another's place while requests run: no token changes, and what is refused changes nothing."""

from typing import cast

import pytest
import torch

from tests.procedures.test_denoising import BOTH_WAYS, masked_model
from tests.tiny import greedy, make_pair, random_drafter, random_prompts
from volley import Engine, SamplingParams
from volley.engine.reload import replace_drafter
from volley.errors import ConfigError, MismatchError
from volley.models.drafters.drafter import Drafter
from volley.policies.fixed import Fixed
from volley.procedures.self_speculative import SelfSpeculative


def other_drafter(drafter: Drafter) -> Drafter:
    """A drafter of the same shape with other weights."""
    torch.manual_seed(1)
    return Drafter(drafter.config).eval()


@pytest.mark.parametrize("options", [{}, {"draft_window": 8}, {"policy": "fixed"}, {"num_pages": 24, "page_size": 4}])
def test_running_requests_keep_their_tokens(options: dict[str, object]) -> None:
    pair = make_pair()
    prompts = random_prompts(4)
    want = [greedy(pair.hf, prompt, 24) for prompt in prompts]
    engine = Engine(pair.target, pair.drafter, **options)
    requests = [engine.add_request(prompt, SamplingParams(max_tokens=24)) for prompt in prompts]
    for _ in range(3):
        engine.step()
    assert any(request.num_output for request in requests)
    replace_drafter(engine, other_drafter(pair.drafter))
    assert engine.drafter is not pair.drafter
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert [request.result().token_ids for request in requests] == want
    assert len(engine.target.model.model.layers[0]._forward_hooks) <= 1, "the old engine's hooks are gone"


def test_what_was_refused_changes_nothing() -> None:
    pair = make_pair()
    engine = Engine(pair.target, pair.drafter)
    request = engine.add_request(random_prompts(1)[0], SamplingParams(max_tokens=16))
    engine.step()
    before, pool = engine.drafter, engine.core.pool
    with pytest.raises(MismatchError):
        replace_drafter(engine, random_drafter(hidden_size=48))
    assert (engine.drafter, engine.core.pool) == (before, pool)
    while request.finish_reason is None:
        engine.step()
    engine.check_integrity()
    assert request.result().token_ids == greedy(pair.hf, random_prompts(1)[0], 16)


@pytest.mark.parametrize("window", [None, 8])
def test_kv_of_one_shape_take_no_more_memory(window: int | None) -> None:
    pair = make_pair()
    engine = Engine(pair.target, pair.drafter, draft_window=window or 0)
    target_store, draft_store = engine.core.runner.store, engine.core.draft_model.store
    replace_drafter(engine, other_drafter(pair.drafter))
    assert engine.core.runner.store is target_store
    assert engine.core.draft_model.store is draft_store
    replace_drafter(engine, random_drafter(num_hidden_layers=1))
    assert engine.core.runner.store is target_store
    assert engine.core.draft_model.store is not draft_store
    (result,) = engine.generate(random_prompts(1), SamplingParams(max_tokens=8))
    assert result.token_ids == greedy(pair.hf, random_prompts(1)[0], 8)


def test_a_policy_object_stays_with_its_drafter() -> None:
    pair = make_pair()
    engine = Engine(pair.target, pair.drafter, policy=Fixed(4))
    with pytest.raises(ConfigError, match="give each engine its own, and each drafter"):
        replace_drafter(engine, other_drafter(pair.drafter))
    assert engine.drafter is pair.drafter
    (result,) = engine.generate(random_prompts(1), SamplingParams(max_tokens=8))
    assert result.token_ids == greedy(pair.hf, random_prompts(1)[0], 8)


def test_what_was_refused_leaves_what_self_speculation_has_learnt() -> None:
    engine = Engine(masked_model(BOTH_WAYS).target, policy=Fixed(1), page_size=8)
    procedure = engine.procedures.by_mode["self"]
    assert isinstance(procedure, SelfSpeculative)
    steps = procedure.steps
    with pytest.raises(ConfigError, match="give each engine its own"):
        replace_drafter(engine, cast(Drafter, None))
    assert procedure.steps is steps
