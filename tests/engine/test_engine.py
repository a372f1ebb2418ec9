"""The parts of an engine and their description, and settings that change whole or not at all."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.tiny import Pair, greedy, make_pair, random_drafter, random_prompts
from volley import Engine, SamplingParams
from volley.config import CapacityConfig, DecodingConfig
from volley.errors import CapacityError, ConfigError, MismatchError
from volley.models.checkpoints.checkpoint import HeadConfig
from volley.policies.base import Policy
from volley.policies.fixed import Feedback, Fixed
from volley.proposers.scripted import ScriptedProposer

PROMPTS = random_prompts(4, longest=20, seed=9)


def standing(engine: Engine) -> tuple[Any, ...]:
    """Everything that settings decide."""
    proposer = engine.core.proposer
    return (
        engine.config,
        engine.procedure.config,
        getattr(proposer, "config", None),
        engine.policy,
        engine.policy.block_size,
        engine.config.tree_nodes,
        engine.config.denoising_steps,
    )


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_come_whole_or_by_name(pair: Pair) -> None:
    whole = Engine(
        pair.target,
        pair.drafter,
        config=DecodingConfig(policy="fixed:3", verification="coupled"),
        capacity=CapacityConfig(page_size=4, num_pages=30, max_running=2),
    )
    named = Engine(
        pair.target,
        pair.drafter,
        policy="fixed:3",
        verification="coupled",
        page_size=4,
        num_pages=30,
        max_running=2,
    )
    assert (whole.config, whole.capacity) == (named.config, named.capacity)
    for engine in (whole, named):
        assert engine.block_size == 3
        assert (engine.core.pool.num_pages, engine.core.pool.page_size) == (30, 4)


def test_one_config_may_be_whole_and_the_other_by_name(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter, config=DecodingConfig(block_size=2), num_pages=11)
    assert (engine.block_size, engine.core.pool.num_pages) == (2, 11)


def test_a_new_config_is_taken_everywhere(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter, policy="fixed")
    config = DecodingConfig(policy="feedback", denoising_steps=2, verification="coupled")
    engine.reconfigure(config)
    assert standing(engine)[:3] == (config, config, config)
    assert isinstance(engine.policy, Feedback)
    assert engine.config.denoising_steps == 2


def test_a_policy_that_stays_keeps_what_it_has_learnt(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter, policy="feedback")
    policy = engine.policy
    engine.reconfigure(DecodingConfig(policy="feedback", denoising_steps=2))
    assert engine.policy is policy
    engine.reconfigure(DecodingConfig(policy="fixed"))
    engine.reconfigure(DecodingConfig(policy="feedback"))
    assert engine.policy is not policy


class Refusing(Policy):
    """Cannot be attached, or cannot be rehearsed."""

    decide = None  # type: ignore[assignment]

    def __init__(self, where: str) -> None:
        self.where = where

    def attach(self, largest: int, costs: Any) -> None:
        super().attach(largest, costs)
        if self.where == "attach":
            raise ConfigError("not today")

    def rehearse(self) -> None:
        if self.where == "rehearse":
            raise ConfigError("not today")


REFUSED: list[dict[str, Any]] = [
    {"policy": "godput"},
    {"policy": "fixed:9", "denoising_steps": 3},
    {"policy": "pilot:nowhere", "verification": "coupled"},
    {"block_size": 7, "denoising_steps": 3},
    {"draft_window": 9, "denoising_steps": 3},
    {"kv_dtype": "int8", "policy": "feedback"},
    {"draft_kv_dtype": "int4", "policy": "feedback"},
    {"policy": Refusing("attach"), "denoising_steps": 3},
    {"policy": Refusing("rehearse"), "tree_nodes": 9},
]


@pytest.mark.parametrize("refused", REFUSED, ids=lambda options: ",".join(map(str, options)))
def test_a_config_that_is_refused_changes_nothing(pair: Pair, refused: dict[str, Any]) -> None:
    engine = Engine(pair.target, pair.drafter, policy="feedback", denoising_steps=2, num_pages=60)
    prompt = PROMPTS[0]
    request = engine.add_request(prompt, SamplingParams(max_tokens=20))
    for _ in range(3):
        engine.step()
    before = standing(engine)
    with pytest.raises(ConfigError):
        engine.reconfigure(DecodingConfig(**refused))
    assert standing(engine) == before
    while request.finish_reason is None:
        engine.step()
    assert request.result().token_ids == greedy(pair.hf, prompt, 20)


def test_a_config_that_the_proposer_refuses_changes_nothing() -> None:
    head = HeadConfig(type="dspark", rank=8)
    pair = make_pair(drafter={"head": head, "sample_from_anchor": True})
    engine = Engine(pair.target, pair.drafter, policy="feedback", num_pages=60)
    before = standing(engine)
    with pytest.raises(ConfigError):
        engine.reconfigure(DecodingConfig(policy="fixed:3", denoising_steps=2))
    assert standing(engine) == before
    engine.block_size = 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tree_nodes", 8),
        ("denoising_steps", 2),
        ("denoising_schedule", "sqrt"),
        ("denoising_threshold", 0.5),
        ("draft_window", 64),
        ("draft_kv_dtype", "int8"),
        ("policy", "feedback"),
        ("policy", "goodput:drafts"),
    ],
)
def test_settings_of_drafters_are_refused_without_one_and_change_nothing(pair: Pair, name: str, value: Any) -> None:
    given, told = {name: value}, f"{name}: only a drafter reads such a setting.*name one"
    with pytest.raises(ConfigError, match=told):
        Engine(pair.target, **given)
    with pytest.raises(ConfigError, match=told):
        Engine.from_pretrained("/a/folder/that/is/not/there", drafter=None, config=DecodingConfig(**given))
    engine = Engine(pair.target)
    before = standing(engine)
    with pytest.raises(ConfigError):
        engine.reconfigure(DecodingConfig(**given))
    assert standing(engine) == before
    assert getattr(Engine(pair.target, pair.drafter, **given).config, name) == value


def test_all_of_them_are_named_at_once_and_a_proposer_reads_them(pair: Pair) -> None:
    told = "denoising_steps, draft_window, draft_weights: only a drafter.* leave them out .passes over a canvas are max_steps"
    with pytest.raises(ConfigError, match=told):
        Engine.from_pretrained(pair.target, drafter="none", denoising_steps=2, draft_window=8, draft_weights="int8")
    assert (
        Engine(pair.target, proposer=ScriptedProposer(lambda work: [], 4), denoising_steps=2).config.denoising_steps
        == 2
    )


def test_an_object_and_its_name_are_different_policies(pair: Pair) -> None:
    one, other = Fixed(2), Fixed(2)
    engine = Engine(pair.target, pair.drafter, policy=one)
    engine.reconfigure(replace(engine.config, policy=other))
    assert engine.policy is other
    engine.reconfigure(replace(engine.config, denoising_steps=2))
    assert engine.policy is other


def test_a_pair_that_does_not_belong_together_is_refused(pair: Pair) -> None:
    with pytest.raises(MismatchError):
        Engine(pair.target, random_drafter(vocab_size=40))


# -- what it says of itself --------------------------------------------------------------------------------------------


def test_a_snapshot_counts_what_runs_and_waits(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter, policy="fixed", page_size=4, num_pages=40, max_running=2)
    idle = engine.snapshot()
    assert (idle.running, idle.waiting, idle.pages_used, idle.num_pages) == (0, 0, 0, 40)
    assert (idle.max_running, idle.max_tokens) == (2, 160)
    assert (idle.draft_seconds, idle.verify_seconds) == (0, 0)
    requests = [engine.add_request(prompt, SamplingParams(max_tokens=20)) for prompt in PROMPTS]
    assert engine.snapshot().waiting == 4
    for _ in range(3):
        engine.step()
    busy = engine.snapshot()
    assert (busy.running, busy.waiting) == (2, 2)
    assert busy.pages_used == sum(len(request.table.pages) for request in requests) > 0
    assert busy.draft_seconds > 0
    assert busy.verify_seconds > 0
    for request in requests:
        engine.abort(request)
    assert engine.snapshot().pages_used == 0
    assert not engine.has_work


def test_the_context_bounds_a_request_where_pages_are_many(pair: Pair) -> None:
    assert Engine(pair.target, num_pages=1000).snapshot().max_tokens == 512


def test_a_cycle_costs_a_draft_only_where_something_is_drafted(pair: Pair) -> None:
    """At the modelled costs of this folder's tests: 0.1 for a draft, 1 + 0.01 a token for the target."""
    engine = Engine(pair.target, pair.drafter)
    assert engine.cycle_seconds(1, 4) == pytest.approx(1.04)
    assert engine.cycle_seconds(5, 4) == pytest.approx(1.2 + 0.1)
    assert Engine(pair.target).cycle_seconds(5, 4) == pytest.approx(1.2)


def test_logits_need_pages_that_are_free(pair: Pair) -> None:
    engine = Engine(pair.target, num_pages=3, page_size=8)
    with pytest.raises(CapacityError, match="raise kv_mib or num_pages or lower max_tokens"):
        engine.next_logits([1] * 25)
    engine.add_request([1] * 12, SamplingParams(max_tokens=2))
    engine.step()
    with pytest.raises(CapacityError, match="finish or abort requests first"):
        engine.next_logits([2] * 24)


def test_logits_beside_what_is_running(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter, num_pages=40)
    request = engine.add_request(PROMPTS[0], SamplingParams(max_tokens=10))
    engine.step()
    used = engine.snapshot().pages_used
    logits = engine.next_logits(PROMPTS[1])
    with torch.inference_mode():
        expected = pair.hf(input_ids=torch.tensor([PROMPTS[1]]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
    assert engine.snapshot().pages_used == used
    while request.finish_reason is None:
        engine.step()
    assert request.result().token_ids == greedy(pair.hf, PROMPTS[0], 10)
