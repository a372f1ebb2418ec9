"""Requests whose logits are not finite: each ends alone with an error, beside and before others whose answers do not change."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, GptOssConfig, MixtralConfig

from tests import hybrid
from tests.diffusion_gemma import random_model
from tests.procedures.test_denoising import BOTH_WAYS, masked_model
from tests.tiny import SHAPE, VOCAB, eager_model, random_drafter, target_config, tokens
from volley import DiffusionParams, Engine, SamplingParams
from volley.decode.rules import TokenRule
from volley.engine import capacity
from volley.errors import NonFiniteError
from volley.memory.device import Device
from volley.models.targets.diffusion_gemma import DiffusionGemma
from volley.models.targets.families import SDAR
from volley.models.targets.target import Target
from volley.proposers.scripted import ScriptedProposer

BAD = 47
"""The token whose embedding is spoilt: no drafter's mask, and no token of a good prompt."""
GOOD = [[*range(5, 5 + length)] for length in (7, 20, 33, 40)]
SPOILT = [5, BAD, 6, *range(9, 40)]
COMMON: dict[str, Any] = {
    **SHAPE,
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ROWS = {"page_size": 4, "num_pages": 128}


class Never(TokenRule):
    """Forbids the spoilt token, so that only its prompts have it."""

    def __init__(self, *_: object) -> None:
        pass

    def take(self, token_id: int) -> None:
        pass

    def apply(self, logits: Tensor, paths: Any) -> Tensor:
        logits[:, BAD] = -torch.inf
        return logits


def spoilt(target: Target) -> Target:
    """``target``, for which the activations of :data:`BAD` are NaN."""

    def spoil(_: object, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output.masked_fill((given[0] == BAD).unsqueeze(-1), torch.nan)

    target.model.get_input_embeddings().register_forward_hook(spoil)
    return target


@functools.cache
def qwen() -> Target:
    return spoilt(Target(eager_model(target_config())))


@functools.cache
def of(name: str) -> Target:
    """A target of another family."""
    if name in hybrid.CONFIGS:
        return spoilt(Target(eager_model(hybrid.CONFIGS[name]())))
    config = {
        "gemma2": lambda: Gemma2Config(**COMMON, sliding_window=12, query_pre_attn_scalar=8),
        "gpt_oss": lambda: GptOssConfig(**COMMON, sliding_window=12, num_local_experts=4, num_experts_per_tok=2),
        "mixtral": lambda: MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    }[name]()
    return spoilt(Target(eager_model(config)))


def drafting(**options: Any) -> Callable[[], Engine]:
    return lambda: Engine(qwen(), random_drafter(), **ROWS, **options)


CASES: dict[str, Callable[[], Engine]] = {
    "fp32": lambda: Engine(qwen(), **ROWS),
    "int8": lambda: Engine(qwen(), kv_dtype="int8", **ROWS),
    "int4": lambda: Engine(qwen(), kv_dtype="int4", **ROWS),
    "small passes": lambda: Engine(qwen(), max_batch_tokens=16, **ROWS),
    "chains": drafting(policy="fixed:6"),
    "goodput": drafting(),
    "trees": drafting(tree_nodes=9),
    "a window of the drafter": drafting(policy="fixed:6", draft_window=16),
    "quantised K/V of the drafter": drafting(policy="fixed:6", draft_kv_dtype="int8"),
    **{
        name: functools.partial(lambda name: Engine(of(name), **ROWS), name)
        for name in ("gemma2", "gpt_oss", "mixtral")
    },
    **{name: functools.partial(lambda name: Engine(of(name), **ROWS), name) for name in hybrid.KINDS},
}
SAMPLING: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=12),
    "sampled": SamplingParams(max_tokens=12, temperature=0.9, seed=3),
    "nucleus": SamplingParams(max_tokens=12, temperature=0.9, top_p=0.8, top_k=9, min_p=0.01, seed=3, logprobs=True),
}


def check_alone(make: Callable[[], Engine], params: SamplingParams, *, has_prefixes: bool = True) -> None:
    """A spoilt request beside good ones, and good ones after it, which have the pages that it had."""
    params = replace(params, rules=(*params.rules, Never)) if params.diffusion is None else params
    want = tokens(list(make().generate(GOOD, params)))
    assert all(len(answer) == params.max_tokens for answer in want)
    engine = make()
    first, *beside = engine.generate([SPOILT, *GOOD], params)
    engine.check_integrity()
    assert (first.finish_reason, first.token_ids, first.text) == ("error", [], "")
    assert "not finite" in (first.error or "")
    assert tokens(beside) == want
    assert all(result.error is None for result in beside)
    assert tokens(list(engine.generate(GOOD, params))) == want
    (again,) = engine.generate([SPOILT], params)
    assert again.finish_reason == "error"
    assert again.stats.cached_tokens == 0, "its pages have left the prefix cache"
    if has_prefixes:
        (hit,) = engine.generate([GOOD[-1]], params)
        assert hit.stats.cached_tokens > 0, "those of others have not"
    engine.check_integrity()
    assert engine.snapshot().pages_used == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_spoilt_request_ends_alone(case: str) -> None:
    check_alone(CASES[case], SAMPLING["greedy"])


@pytest.mark.parametrize("sampling", ["sampled", "nucleus"])
@pytest.mark.parametrize("case", ["fp32", "chains", "trees", "nemotron_h"])
def test_a_sampled_one_too(case: str, sampling: str) -> None:
    check_alone(CASES[case], SAMPLING[sampling])


@pytest.mark.parametrize("mode", ["diffusion", "self", "autoregressive"])
@pytest.mark.parametrize("family", ["sdar", "in place"])
def test_a_canvas_too(family: str, mode: Any) -> None:
    target = spoilt(masked_model(SDAR if family == "in place" else BOTH_WAYS).target)
    canvas = DiffusionParams(mode=mode, canvas_length=4, max_steps=None if mode == "self" else 2)
    bias = ((BAD, -100.0),)  # no canvas has the spoilt token
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, diffusion=canvas, logit_bias=bias)
    check_alone(lambda: Engine(target, **ROWS), params)


def test_a_canvas_of_random_tokens_too() -> None:
    target = spoilt(DiffusionGemma(random_model(is_sharp=True)))
    assert target.diffusion is not None
    target.diffusion = replace(target.diffusion, defaults=replace(target.diffusion.defaults, canvas_length=8))
    engine = Engine(target, page_size=8, num_pages=128)
    params = SamplingParams(max_tokens=8, temperature=0.0, diffusion=DiffusionParams(max_steps=3))
    results = list(engine.generate([SPOILT, *GOOD], params))
    assert results[0].finish_reason == "error"
    assert tokens(results[1:]) == [next(engine.generate([prompt], params)).token_ids for prompt in GOOD]
    engine.check_integrity()


@pytest.mark.parametrize("drafts", [False, True])
def test_passes_in_fixed_memory_that_are_launched_ahead(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass launched before the tokens are read is dropped if a row is not finite."""
    monkeypatch.setattr(capacity, "find_device", lambda _: Device("cuda"))
    answered = 4

    def make() -> Engine:
        engine = Engine(qwen(), random_drafter() if drafts else None, policy="fixed:4" if drafts else "fixed:1", **ROWS)
        engine.core.async_launch.is_used = True
        return engine

    check_alone(make, SAMPLING["greedy"])
    # A request that is spoilt while it decodes, with a pass launched on its last token.
    forced = SamplingParams(max_tokens=12, logit_bias={BAD: 100.0})
    engine = make()
    requests = [
        engine.add_request(GOOD[0], replace(SAMPLING["greedy"], max_tokens=answered)),
        engine.add_request(GOOD[1], forced),
    ]
    while engine.has_work:
        engine.step()
    assert requests[0].finish_reason == "length"
    assert (requests[1].finish_reason, requests[1].token_ids[len(GOOD[1]) :]) == ("error", [BAD])


@pytest.mark.slow
def test_fused_layers_in_bf16() -> None:
    model = eager_model(target_config()).to(torch.bfloat16)
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = torch.nan
    target = Target(model)
    check_alone(lambda: Engine(target, **ROWS), SAMPLING["greedy"])
    check_alone(
        lambda: Engine(target, random_drafter().to(torch.bfloat16), policy="fixed:6", **ROWS), SAMPLING["greedy"]
    )


# -- drafts ----------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.parametrize("name", ["qwen", "gemma2", *hybrid.KINDS])
@pytest.mark.parametrize("place", [0, 2])
def test_a_wrong_draft_that_is_not_finite_changes_nothing(name: str, sampling: str, place: int) -> None:
    """Its K/V spoil rows before it, which do not see it: 0 · NaN is NaN."""
    target = qwen() if name == "qwen" else of(name)
    params = replace(SAMPLING[sampling], rules=(Never,))
    want = tokens(list(Engine(target, **ROWS).generate(GOOD, params)))
    answers = {tuple(prompt): answer for prompt, answer in zip(GOOD, want, strict=True)}
    tried = list[int]()

    def script(work: Any) -> list[int]:
        request = work.request
        answer = answers[tuple(request.token_ids[: request.num_prompt])]
        following = answer[request.num_output :][: work.spec.positions]
        tried.append(len(following))
        return [*following[:place], BAD, *following[place + 1 :]][: len(following)]

    engine = Engine(target, proposer=ScriptedProposer(script, 6), policy="fixed:6", **ROWS)
    results = list(engine.generate(GOOD, params))
    assert tokens(results) == want
    assert {result.finish_reason for result in results} == {"length"}
    assert len(tried) > len(GOOD)
    engine.check_integrity()


@pytest.mark.parametrize("options", [{"policy": "fixed:6"}, {"tree_nodes": 9}, {}])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_drafter_that_is_not_finite_changes_no_distribution(sampling: str, options: dict[str, Any]) -> None:
    drafter = random_drafter()
    drafter.norm.weight.fill_(torch.nan)
    params = SAMPLING[sampling]
    found = list(Engine(qwen(), drafter, **ROWS, **options).generate(GOOD, params))
    assert {result.finish_reason for result in found} == {"length"}
    if sampling == "greedy":
        assert tokens(found) == tokens(list(Engine(qwen(), **ROWS).generate(GOOD, params)))


# -- what is told ----------------------------------------------------------------------------------------------------------
def test_tokens_before_the_spoilt_row_are_right() -> None:
    plain = SamplingParams(max_tokens=3, rules=(Never,))
    (want,) = Engine(qwen(), **ROWS).generate([GOOD[1]], plain)

    class Then(Never):
        def __init__(self, *_: object) -> None:
            self.left = 3

        def take(self, token_id: int) -> None:
            self.left -= 1

        def apply(self, logits: Tensor, paths: Any) -> Tensor:
            for row, path in zip(logits, paths, strict=True):
                row[BAD] = -torch.inf if len(path) < self.left else torch.inf
            return logits

    for options in ({}, {"policy": "fixed:6"}):
        engine = Engine(qwen(), random_drafter() if options else None, **ROWS, **options)
        (result,) = engine.generate([GOOD[1]], SamplingParams(max_tokens=9, rules=(Then,), logprobs=True))
        assert (result.finish_reason, result.token_ids) == ("error", [*want.token_ids, BAD])
        assert len(result.logprobs or []) == 4


def test_a_stream_raises_behind_its_last_chunk() -> None:
    engine = Engine(qwen(), **ROWS)
    stream = engine.stream(GOOD[0], SamplingParams(max_tokens=9, logit_bias={BAD: 100.0}))
    assert next(stream).token_ids == [BAD]
    with pytest.raises(NonFiniteError, match=r"behind 8 tokens are not finite"):
        next(stream)
    assert not engine.has_work


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"prompt_logprobs": 1}, {"max_tokens": 0, "prompt_logprobs": 0}])
def test_a_prompt_that_is_only_read_or_scored_ends_so_too(fields: dict[str, Any]) -> None:
    engine = Engine(qwen(), max_batch_tokens=16, **ROWS)
    bad, good = engine.generate([SPOILT, GOOD[2]], SamplingParams(**{"max_tokens": 2, **fields}))
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    (again,) = engine.generate([SPOILT], SamplingParams(max_tokens=1))
    assert again.stats.cached_tokens == 0
