"""Greedy and seeded answers in bf16, and from int8 and int4 weights, are those of plain decoding, token for token.

In fp32 all answers are; in bf16 because each row of a pass is computed alike in whatever pass it is. The reference is one
prompt at a time, without a drafter, prompts read in one pass.
"""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.tiles import needs_kernels
from tests.tiny import random_drafter, tokens
from volley import Engine, GenerationResult, SamplingParams, native
from volley.errors import ConfigError
from volley.files import REFERENCE
from volley.native import Product, Weights

QUESTIONS = [
    "Tom has 5 boxes with 8 pencils each. He gives away 12 pencils. How many pencils are left?",
    "Write a function to check whether a number is even.",
    "How do I use `grep`?",
    "Explain “Ownership” in Rust.",
]
CHATS = [[{"role": "user", "content": text}] for text in QUESTIONS]
GREEDY = SamplingParams(max_tokens=64, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=3)
WEIGHTS: list[Weights] = ["bf16", "int8", "int4"]


@functools.cache
def loaded(weights: Weights) -> Engine:
    return Engine.from_pretrained(weights=weights)


@functools.cache
def plain(weights: Weights, params: SamplingParams) -> list[list[int]]:
    engine = Engine(loaded(weights).target, prefix_caching=False)
    return [next(engine.generate([chat], params)).token_ids for chat in CHATS]


def run(weights: Weights, params: SamplingParams, **options: Any) -> list[GenerationResult]:
    pair = loaded(weights)
    engine = Engine(pair.target, pair.drafter, **options)
    results = list(engine.generate(CHATS, params))
    engine.check_integrity()
    return results


SCHEDULES: list[dict[str, Any]] = [
    {"block_size": 1},
    {"block_size": 8, "max_running": 1},
    {"block_size": 8, "max_batch_tokens": 32},
    {"policy": "fixed", "tree_nodes": 12},
    {"policy": "fixed", "tree_nodes": 24, "max_running": 1, "max_batch_tokens": 512},
    {"policy": "goodput"},
    {"policy": "goodput", "max_running": 1},
    {"policy": "goodput", "max_batch_tokens": 32},
]


OF_CODES = (SCHEDULES[0], SCHEDULES[3], SCHEDULES[5])
"""Codes change the products alone."""


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(
    ("weights", "options"),
    [(kind, options) for kind in WEIGHTS for options in (SCHEDULES if kind == "bf16" else OF_CODES)],
    ids=str,
)
def test_greedy_answers(weights: Weights, options: dict[str, Any]) -> None:
    results = run(weights, GREEDY, **options)
    assert tokens(results) == plain(weights, GREEDY)


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(
    ("weights", "options"),
    [*(("bf16", SCHEDULES[number]) for number in (2, 3, 5)), ("int8", SCHEDULES[3]), ("int4", SCHEDULES[5])],
    ids=str,
)
def test_seeded_answers(weights: Weights, options: dict[str, Any]) -> None:
    assert tokens(run(weights, SAMPLED, **options)) == plain(weights, SAMPLED)


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("options", [{"policy": "fixed"}, {"tree_nodes": 12, "max_batch_tokens": 32}], ids=str)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_forced_preemption(weights: Weights, options: dict[str, Any]) -> None:
    results = run(weights, GREEDY, num_pages=14, **options)
    assert tokens(results) == plain(weights, GREEDY)
    assert sum(result.stats.preemptions for result in results) > 0


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("weights", WEIGHTS)
def test_prefix_hits(weights: Weights) -> None:
    pair = loaded(weights)
    engine = Engine(pair.target, pair.drafter, policy="fixed")
    for attempt in range(2):
        results = list(engine.generate(CHATS, GREEDY))
        assert tokens(results) == plain(weights, GREEDY)
        assert all(bool(result.stats.cached_tokens) == bool(attempt) for result in results)


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("draft_weights", ["int8", "int4"])
def test_draft_weights_change_drafts_alone(draft_weights: Weights) -> None:
    engine = Engine.from_pretrained(loaded("bf16").target, REFERENCE / "drafter", draft_weights=draft_weights)
    assert engine.drafter is not None
    assert engine.drafter.fused is not None
    assert {product.kind for layer in engine.drafter.fused[0] for product in layer.products} == {draft_weights}
    results = list(engine.generate(CHATS, GREEDY))
    assert tokens(results) == plain("bf16", GREEDY)
    plainly = Engine.from_pretrained(engine.target, REFERENCE / "drafter", draft_weights="bf16", policy="fixed")
    coded = Engine(engine.target, engine.drafter, policy="fixed")
    drafted, lengths = (
        [result.stats.acceptance_length for result in each.generate(CHATS, GREEDY)] for each in (plainly, coded)
    )
    assert sum(lengths) > 0.8 * sum(drafted)


@needs_kernels
@pytest.mark.parametrize(
    ("weights", "has_dot_products", "expected"),
    [("bf16", True, "int8"), ("bf16", False, "bf16"), ("int8", False, "int8"), ("int4", True, "int4")],
)
def test_draft_weights_that_nobody_chose(
    weights: Weights, has_dot_products: bool, expected: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target in codes shares its head with the drafter; there is another one only beside bf16."""
    monkeypatch.setattr(native, "has_dot_products", has_dot_products)
    drafter = Engine.from_pretrained(loaded(weights).target, REFERENCE / "drafter").drafter
    assert drafter is not None
    assert drafter.fused is not None
    assert {product.kind for layer in drafter.fused[0] for product in layer.products} == {expected}
    own = drafter.own_head
    assert (own.kind if isinstance(own, Product) else None) == (expected if expected != weights else None)


def test_nobody_chose_codes_where_nothing_multiplies_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", False)
    drafter = Engine.from_pretrained().drafter
    assert drafter is not None
    assert drafter.fused is None
    assert drafter.own_head is None


@needs_kernels
@pytest.mark.parametrize("weights", WEIGHTS[1:])
def test_the_kinds_of_weights_answer_differently(weights: Weights) -> None:
    """Or most of the tests above would prove nothing."""
    assert plain(weights, GREEDY) != plain("bf16", GREEDY)


@pytest.mark.slow
@needs_kernels
def test_a_product_that_depends_on_the_number_of_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head sums in parts, each rounded, once it has several rows, as products of libraries may."""
    pair = loaded("bf16")
    engine, head, weight = (
        Engine(pair.target, pair.drafter, policy="fixed"),
        pair.target._head,
        pair.target.kept_head[: pair.target.vocab_size],
    )
    whole, part = head.forward, weight.shape[1] // 8

    def dependent(x: Tensor) -> Tensor:
        if len(x) == 1:
            alone: Tensor = whole(x)
            return alone
        parts = zip(torch.split(x, part, dim=1), torch.split(weight, part, dim=1), strict=True)
        return functools.reduce(torch.add, [own @ of_part.T for own, of_part in parts])

    assert tokens(list(engine.generate(CHATS, GREEDY))) == plain("bf16", GREEDY)
    monkeypatch.setattr(head, "forward", dependent)
    assert tokens(list(engine.generate(CHATS, GREEDY))) != plain("bf16", GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("available", [pytest.param(True, marks=needs_kernels), False])
def test_greedy_answers_are_those_of_transformers_up_to_ties(available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels and without: PyTorch's operations take over. A token's logit is the best but for two roundings."""
    monkeypatch.setattr(native, "available", available)
    engine = Engine.from_pretrained(policy="fixed")
    layer = engine.target.model.get_decoder().layers[0]
    assert ("forward" in vars(layer)) == available
    assert "forward" in vars(layer.mlp.down_proj) or available, "oneDNN's products"
    model = AutoModelForCausalLM.from_pretrained(REFERENCE / "target", dtype=torch.bfloat16).eval()
    for chat, result in zip(CHATS, engine.generate(CHATS, GREEDY), strict=True):
        prompt = engine.encode(chat)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + result.token_ids])).logits[0, len(prompt) - 1 : -1].float()
        assert best_up_to_rounding(logits, result.token_ids)
        assert not best_up_to_rounding(logits, [*result.token_ids[1:], 5]), "or the test would see nothing"


def best_up_to_rounding(logits: Tensor, token_ids: list[int]) -> bool:
    best = logits.amax(dim=-1)
    chosen = logits.gather(-1, torch.tensor(token_ids)[:, None])[:, 0]
    return bool((best - chosen <= 2**-6 * best.abs()).all())


def test_codes_need_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", False)
    with pytest.raises(ConfigError, match="use weights='bf16' here"):
        Engine.from_pretrained(weights="int8")
    with pytest.raises(ConfigError, match="use weights='bf16' here"):
        Engine.from_pretrained(draft_weights="int4")


def test_how_to_load_what_is_loaded_is_refused() -> None:
    pair = loaded("bf16")
    how: list[dict[str, Any]] = [{"weights": "int8"}, {"tensor_parallel": True}]
    for options in how:
        with pytest.raises(ConfigError, match="say how a target is loaded; give its folder"):
            Engine.from_pretrained(pair.target, None, **options)
    with pytest.raises(ConfigError, match="says how a drafter is loaded; give its folder"):
        Engine.from_pretrained(pair.target, random_drafter(), draft_weights="int8")


def test_an_unknown_kind_of_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown kind of weights 'fp8'"):
        Engine.from_pretrained(weights="fp8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown kind of draft weights 'int5'; did you mean 'int8'"):
        Engine.from_pretrained(draft_weights="int5")  # type: ignore[arg-type]
