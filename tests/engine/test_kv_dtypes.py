"""Quantised pools: with speculation and without, the same tokens and the same law, whatever the scheduling (fp32).

The target with a quantised pool is another function than without, so the reference is plain decoding on a pool of the
same kind, one request at a time.
"""

import functools
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.chi_square import chi_square_p, joint_counts, joint_law
from tests.conftest import TinyPair
from tests.engine.test_sampled import PROMPT, TOKENS, V, sampled
from tests.memory.reference import reference_attention
from tests.tiny import Pair, answered, greedy, make_pair, random_prompts, teach, tokens
from volley import Engine, GenerationResult, SamplingParams
from volley.errors import ConfigError
from volley.memory.kv_store import KVDtype, QuantisedKVStore

COUNT = 16
BASE = random_prompts(5, longest=35, seed=1)
PROMPTS = [*BASE, BASE[0] + [1, 2, 3], BASE[3]]
PARAMS = SamplingParams(max_tokens=COUNT)
QUANTISED: list[KVDtype] = ["int8", "int4"]


@functools.cache
def plain(kv_dtype: KVDtype) -> list[list[int]]:
    pair = make_pair()
    engine = Engine(pair.target, page_size=4, num_pages=40, kv_dtype=kv_dtype, prefix_caching=False)
    return [next(engine.generate([prompt], PARAMS)).token_ids for prompt in PROMPTS]


def taught(pair: Pair, kv_dtype: KVDtype, **options: Any) -> Engine:
    engine = Engine(pair.target, pair.drafter, **{"page_size": 4, "num_pages": 160, "kv_dtype": kv_dtype, **options})
    teach(engine, {tuple(prompt): answer for prompt, answer in zip(PROMPTS, plain(kv_dtype), strict=True)})
    return engine


def run(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[GenerationResult]:
    return answered(engine, prompts, PARAMS)


@pytest.mark.slow
def test_the_kind_of_pool_matters() -> None:
    """Or the tests below would prove little."""
    dense = [greedy(make_pair().hf, prompt, COUNT) for prompt in PROMPTS]
    assert plain("auto") == dense
    assert plain("int4") != dense
    assert len({tuple(answer) for answer in plain("int4")}) > 4


@pytest.mark.parametrize(("kv_dtype", "draft_kv_dtype"), list(product(["auto", *QUANTISED], repeat=2)))
def test_every_combination_of_pools(pair: Pair, kv_dtype: KVDtype, draft_kv_dtype: KVDtype) -> None:
    results = run(taught(pair, kv_dtype, draft_kv_dtype=draft_kv_dtype))
    assert tokens(results) == plain(kv_dtype)
    assert max(length for result in results for length in result.stats.accepted_lengths) >= 5


@pytest.mark.parametrize("kv_dtype", QUANTISED)
def test_the_slow_attention_gives_the_same_tokens(kv_dtype: KVDtype) -> None:
    pair = make_pair()
    pair.target.attention = reference_attention
    assert tokens(run(taught(pair, kv_dtype, draft_kv_dtype=kv_dtype))) == plain(kv_dtype)


class Leaky(QuantisedKVStore):
    """A planted bias: what a pass has just written is read exactly, only later passes see it quantised."""

    def write(self, layer: int, slots: slice | Tensor, keys: Tensor, values: Tensor) -> None:
        super().write(layer, slots, keys, values)
        index = torch.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots
        self.fresh = {int(slot): row for row, slot in enumerate(index)}
        self.exact = self.rotate(layer, keys), self.rotate(layer, values)

    def read(self, layer: int, slots: slice | Tensor) -> tuple[Tensor, Tensor]:
        read = super().read(layer, slots)
        index = torch.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots
        found = [(i, self.fresh[slot]) for i, slot in enumerate(index.tolist()) if slot in self.fresh]
        for mine, exact in zip(read, self.exact, strict=True):
            mine[[i for i, _ in found]] = exact[[row for _, row in found]]
        return read


def leak(engine: Engine) -> None:
    engine.core.runner.store.__class__ = Leaky


@pytest.mark.slow
def test_reading_fresh_vectors_unquantised_is_seen(pair: Pair) -> None:
    engine = Engine(pair.target, page_size=4, num_pages=40, kv_dtype="int4", prefix_caching=False)
    leak(engine)
    leaking = [run(engine, [prompt])[0].token_ids for prompt in PROMPTS]
    engine = taught(pair, "int4")
    teach(engine, {tuple(prompt): answer for prompt, answer in zip(PROMPTS, leaking, strict=True)})
    leak(engine)
    assert tokens(run(engine)) != leaking


# -- the law -----------------------------------------------------------------------------------------------------------

HOT = SamplingParams(temperature=1.0, max_tokens=TOKENS)


@functools.cache
def small() -> Pair:
    return make_pair(4, {"vocab_size": V, "block_size": 4, "mask_token_id": 5}, vocab_size=V, initializer_range=0.2)


@functools.cache
def exact_law(kv_dtype: KVDtype) -> Tensor:
    """Probability of each of the V³ answers, from whole passes over every prefix."""
    engine = Engine(small().target, num_pages=4, kv_dtype=kv_dtype)
    return joint_law(lambda texts: torch.stack([engine.next_logits(text) for text in texts.tolist()]), PROMPT, HOT)


@pytest.mark.slow
def test_the_law_of_whole_answers_is_the_quantised_targets() -> None:
    options: dict[str, Any] = {"kv_dtype": "int4", "draft_kv_dtype": "int8", "verification": "rejection"}
    sequences, accepted = sampled(HOT, small(), 3000, **options)
    assert chi_square_p(joint_counts(sequences, V), exact_law("int4")) > 1e-3
    assert accepted > 0.2
    assert chi_square_p(joint_counts(sequences, V), exact_law("auto")) < 1e-6, "the unquantised law is another one"


# -- options -----------------------------------------------------------------------------------------------------------


def test_head_sizes_that_are_no_power_of_two() -> None:
    pair = make_pair(head_dim=10, drafter={"head_dim": 10})
    prompt, options = [1, 2, 3], {"kv_dtype": "int4", "draft_kv_dtype": "int4"}
    (speculative,) = Engine(pair.target, pair.drafter, **options).generate(prompt, PARAMS)  # type: ignore[arg-type]
    (alone,) = Engine(pair.target, kv_dtype="int4", block_size=1).generate(prompt, PARAMS)
    assert speculative.token_ids == alone.token_ids


def test_a_head_size_that_does_not_fit(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.target, "kv_shapes", [(2, 7)] * 4)
    with pytest.raises(ConfigError, match=r"head size 7 is odd .* use int8 or auto"):
        Engine(pair.target, kv_dtype="int4")


def test_unknown_kinds_are_refused(pair: Pair) -> None:
    with pytest.raises(ConfigError, match=r"unknown kind of K/V 'fp8'; .*int4"):
        Engine(pair.target, kv_dtype="fp8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown kind of K/V 'int2'"):
        Engine(pair.target, pair.drafter, draft_kv_dtype="int2")  # type: ignore[arg-type]


def test_from_pretrained_in_half_precision(tiny_pair: TinyPair) -> None:
    options: dict[str, Any] = {"kv_dtype": "int8", "draft_kv_dtype": "int4"}
    engine = Engine.from_pretrained(tiny_pair.target, tiny_pair.drafter, dtype=torch.bfloat16, **options)
    (result,) = engine.generate("def f(x):", SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(result.token_ids) == 8
