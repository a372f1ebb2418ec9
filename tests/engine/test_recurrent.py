"""Targets with recurrent layers in the engine: transformers' own tokens, whatever is drafted, cut, shared and taken away."""

import copy
import functools
from typing import Any

import pytest
import torch

from tests.chi_square import chi_square_p, joint_counts
from tests.engine.test_sampled import TOKENS, V, exact_law, sampled
from tests.hybrid import BASE, CONFIGS, COUNT, KINDS, PROMPTS, answers, expected, model, target
from tests.tiny import Pair, answered, eager_model, greedy, random_drafter, teach, tokens
from volley import Engine, GenerationResult, SamplingParams
from volley.engine.recovery import recover
from volley.engine.recurrent import RecurrentStates
from volley.engine.step import Step
from volley.errors import ConfigError
from volley.memory.recurrent_pass import Wanted
from volley.models.targets.target import Target
from volley.proposers.scripted import ScriptedProposer

PARAMS = SamplingParams(max_tokens=COUNT)


def taught(name: str, **options: Any) -> Engine:
    """An engine whose drafter is right four times of five."""
    own = target(name)
    engine = Engine(
        own, random_drafter(num_target_layers=own.num_layers), **{"page_size": 4, "num_pages": 160, **options}
    )
    teach(engine, answers(name))
    return engine


def states(engine: Engine) -> RecurrentStates:
    assert engine.core.recurrent is not None
    return engine.core.recurrent


def run(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[GenerationResult]:
    results = answered(engine, prompts, PARAMS)
    assert states(engine).num_held == 0
    return results


def longest(results: list[GenerationResult]) -> int:
    return max(length for result in results for length in result.stats.accepted_lengths)


@pytest.mark.slow
def test_answers_vary() -> None:
    """Or the tests below would prove little."""
    for name in CONFIGS:
        assert len({tuple(answer) for answer in expected(name)}) > 5
        assert len({token for answer in expected(name) for token in answer}) > 12


HARD: list[dict[str, Any]] = [
    {"policy": "fixed", "num_pages": 16, "max_batch_tokens": 11},
    {"tree_nodes": 9, "num_pages": 24, "num_states": 5},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", HARD, ids=["chains", "trees"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family(name: str, options: dict[str, Any]) -> None:
    """With small chunks of prompts, forced preemption, and few states; the second time with prefixes."""
    engine = taught(name, **options)
    results = [*run(engine), *run(engine)]
    assert tokens(results) == expected(name) * 2
    assert longest(results) > 3
    assert sum(result.stats.preemptions for result in results) > 0


def test_plain_decoding_without_a_drafter_and_copies() -> None:
    for policy in ("fixed", "goodput"):
        engine = Engine(target("qwen3_5_text"), page_size=4, policy=policy)
        assert tokens(run(engine)) == expected("qwen3_5_text")


def test_logits_of_a_prompt_beside_running_requests() -> None:
    engine = taught("qwen3_5_text")
    request = engine.add_request(PROMPTS[0], PARAMS)
    engine.step()
    with torch.inference_mode():
        own = model("qwen3_5_text")(input_ids=torch.tensor([PROMPTS[1]]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(engine.next_logits(PROMPTS[1]), own, rtol=1e-3, atol=1e-3)
    while request.finish_reason is None:
        engine.step()
    assert request.result().token_ids == expected("qwen3_5_text")[0]


# -- faults that the tests above would find ----------------------------------------------------------------------------


def keep_everything(own: RecurrentStates, step: Step) -> None:
    """States move to the end of each draft, right or wrong."""
    assert step.recurrent is not None
    assert step.batch is not None
    wanted = []
    for index, (work, segment) in enumerate(zip(step.works, step.batch.segments, strict=True)):
        assert work.request.table.state is not None
        wanted.append(Wanted(index, segment.length - 1, work.request.table.state))
    step.recurrent.write(wanted)


@pytest.mark.parametrize("name", KINDS)
def test_a_state_that_is_not_rolled_back_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(RecurrentStates, "keep", keep_everything)
    assert tokens(run(taught(name, policy="fixed", prefix_caching=False))) != expected(name)
    assert tokens(run(taught(name, block_size=1, prefix_caching=False))) == expected(name), (
        "plain decoding cuts nothing"
    )


def test_a_convolution_that_is_not_rolled_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = taught("qwen3_5_text", policy="fixed")
    right, store = states(engine).keep, states(engine).store

    def keep(step: Step) -> None:
        before = [state.clone() for state in store.states]
        keep_everything(states(engine), step)
        wrong = [history.clone() for history in store.histories]
        for state, own in zip(store.states, before, strict=True):
            state.copy_(own)
        right(step)
        for history, other in zip(store.histories, wrong, strict=True):
            history.copy_(other)

    monkeypatch.setattr(engine.core.recurrent, "keep", keep)
    assert tokens(run(engine)) != expected("qwen3_5_text")


def test_a_snapshot_of_other_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = taught("qwen3_5_text", policy="fixed")
    assert tokens(run(engine)) == expected("qwen3_5_text")
    monkeypatch.setattr(states(engine).store, "copy", lambda source, target: None)
    assert tokens(run(engine)) != expected("qwen3_5_text")


# -- the prefix cache --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_hits_are_the_same_with_speculation_on_and_off(name: str) -> None:
    cached = []
    for options in ({"policy": "fixed"}, {"block_size": 1}, {"tree_nodes": 9}):
        engine = taught(name, **options)
        run(engine)
        results = run(engine)
        assert tokens(results) == expected(name)
        cached.append([result.stats.cached_tokens for result in results])
    assert cached[0] == cached[1] == cached[2]
    # All of a prompt but its last page, which always has a token to compute.
    assert cached[0] == [(len(prompt) - 1) // 4 * 4 for prompt in PROMPTS]


@pytest.mark.parametrize("name", KINDS)
def test_answers_are_found_as_prefixes_too(name: str) -> None:
    """The second turn of a conversation starts at the newest snapshot of the first, one of every fourth page."""
    for window in (None, 4):
        engine = taught(name, policy="fixed", draft_window=window)
        run(engine, PROMPTS[:1])
        turn = [*PROMPTS[0], *expected(name)[0], 5, 6, 7]
        engine.block_size = 1
        (second,) = run(engine, [turn])
        assert second.token_ids == greedy(model(name), turn, COUNT)
        assert second.stats.cached_tokens == (len(PROMPTS[0]) + COUNT - 1) // 16 * 16 > len(PROMPTS[0])


def test_a_junction_of_prompts_is_found_by_the_third() -> None:
    """The second prompt computes what it shares with the first again, and leaves a snapshot where they part."""
    engine = Engine(target("qwen3_5_text"), page_size=4, policy="fixed")
    shared = BASE[2][:18]
    prompts = [[*shared, *own] for own in ([1, 2, 3, 4, 5, 6, 7], [9, 9, 9, 9, 9, 8], [7, 7, 7])]
    results = [run(engine, [prompt])[0] for prompt in prompts]
    assert tokens(results) == [greedy(model("qwen3_5_text"), prompt, COUNT) for prompt in prompts]
    assert [result.stats.cached_tokens for result in results] == [0, 0, 16]


def test_a_preempted_request_goes_on_from_its_newest_snapshot() -> None:
    engine = taught("qwen3_5_text", policy="fixed")
    request = engine.add_request(PROMPTS[0], PARAMS)
    while request.num_output < 12:
        engine.step()
    engine.core.scheduler.preempt(request)
    length = request.length
    assert states(engine).num_held == 0
    assert engine.core.kv_manager.admit(request, length)
    assert request.computed == (length - 1) // 16 * 16, "at most four pages are computed again"
    engine.core.scheduler.finish(request)


def test_the_least_recently_used_snapshot_makes_room() -> None:
    engine = Engine(target("qwen3_5_text"), page_size=4, policy="fixed", num_states=4, max_running=1)
    for prompt in PROMPTS[:4]:
        run(engine, [prompt])
        assert len(states(engine).snapshots) <= 4
    again = run(engine, PROMPTS[3:4])[0]
    assert again.stats.cached_tokens > 0
    assert run(engine, PROMPTS[:1])[0].stats.cached_tokens == 0


@pytest.mark.parametrize("later", range(10, 18))
def test_a_snapshot_that_gives_its_slot_away_in_the_same_step_leaves_the_others_states_alone(later: int) -> None:
    """One slot is spare: an answer that reaches its fourth page takes it, and the end of a prompt takes it again."""
    engine = Engine(target("qwen3_5_text"), page_size=4, policy="fixed", num_states=3, max_running=2, num_pages=80)
    first, second = PROMPTS[0][:5], PROMPTS[1][:9]
    one = engine.add_request(first, SamplingParams(max_tokens=24, ignore_eos=True))
    while one.num_output < later:
        engine.step()
    two = engine.add_request(second, SamplingParams(max_tokens=2, ignore_eos=True))
    while two.finish_reason is None:
        engine.step()
    (again,) = engine.generate([second], SamplingParams(max_tokens=8, ignore_eos=True))
    assert again.token_ids == greedy(model("qwen3_5_text"), second, 8)
    engine.abort(one)


def test_a_cache_that_is_reset_holds_no_snapshots() -> None:
    engine = taught("qwen3_5_text", policy="fixed")
    run(engine, PROMPTS[:1])
    assert states(engine).snapshots
    engine.reset_prefix_cache()
    assert not states(engine).snapshots
    assert run(engine, PROMPTS[:1])[0].stats.cached_tokens == 0


def test_requests_wait_for_states() -> None:
    engine = taught("qwen3_5_text", policy="fixed", num_states=2)
    for prompt in PROMPTS:
        engine.add_request(prompt, PARAMS)
    most = 0
    while engine.core.scheduler.has_work:
        engine.step()
        most = max(most, len(engine.core.scheduler.running))
    assert most == 2


def test_few_states_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_states is 1"):
        Engine(target("qwen3_5_text"), num_states=1)


def test_exact_answers_in_bf16_are_not_promised() -> None:
    own = Target(copy.deepcopy(model("qwen3_5_text")).to(torch.bfloat16))
    with pytest.raises(ConfigError, match="exact=True cannot be kept"):
        Engine(own, page_size=4, exact=True)


def test_a_lost_slot_is_found() -> None:
    engine = taught("qwen3_5_text")
    request = engine.add_request(PROMPTS[0], PARAMS)
    engine.step()
    request.table.state = None
    with pytest.raises(AssertionError, match="lost or used twice"):
        engine.check_integrity()


# -- recovery and sampling ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["forward", "keep"])
def test_a_step_that_raises_costs_one_request(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    engine = taught("qwen3_5_text", policy="fixed")
    part: Any = engine.core.runner if phase == "forward" else engine.core.recurrent
    inner = getattr(part, phase)

    def broken(step: Step) -> None:
        inner(step)
        if any(work.request.request_id == 2 and work.request.num_output > 6 for work in step.works):
            raise OSError("broken")

    monkeypatch.setattr(part, phase, broken)
    requests, faults = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS], []
    while engine.core.scheduler.has_work:
        try:
            engine.step()
        except OSError as error:
            faults += recover(engine, error)
    assert [request.request_id for request, _ in faults] == [2]
    for request, answer in zip(requests, expected("qwen3_5_text"), strict=True):
        assert request.request_id == 2 or request.token_ids[request.num_prompt :] == answer
    engine.check_integrity()
    assert states(engine).num_held == 0


@functools.cache
def small_pair(name: str = "qwen3_5_text") -> Pair:
    config = CONFIGS[name]()
    config.vocab_size, config.initializer_range = V, 0.2
    hf = eager_model(config, seed=3)
    own = Target(eager_model(config, seed=3))
    drafter = random_drafter(4, vocab_size=V, block_size=4, mask_token_id=5, num_target_layers=own.num_layers)
    return Pair(own, drafter, hf)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("qwen3_5_text", options) for options in ({"verification": "rejection"}, {"tree_nodes": 7})),
        *((name, {"verification": "rejection"}) for name in ("kimi_linear", "nemotron_h")),
    ],
    ids=str,
)
def test_sampled_answers_have_the_targets_distribution(name: str, options: dict[str, Any]) -> None:
    params = SamplingParams(temperature=1.2, max_tokens=TOKENS)
    sequences, accepted = sampled(params, small_pair(name), seeds=800, **options)
    assert chi_square_p(joint_counts(sequences, V), exact_law(params, small_pair(name))) > 1e-3
    assert accepted > 0.2, "drafts must have been accepted for this to mean anything"


@pytest.mark.slow
def test_states_that_are_not_rolled_back_change_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecurrentStates, "keep", keep_everything)
    params = SamplingParams(temperature=1.2, max_tokens=TOKENS)
    options: dict[str, Any] = {"verification": "rejection", "prefix_caching": False}
    sequences, _ = sampled(params, small_pair(), seeds=800, **options)
    assert chi_square_p(joint_counts(sequences, V), exact_law(params, small_pair())) < 1e-6


def test_a_script_drafts_for_a_hybrid_target() -> None:
    answer = expected("kimi_linear")[0]
    engine = Engine(
        target("kimi_linear"),
        proposer=ScriptedProposer(lambda work: answer[work.request.num_output :], 8),
        policy="fixed",
    )
    (result,) = run(engine, PROMPTS[:1])
    assert result.token_ids == answer
    assert result.stats.acceptance_length > 5
