"""Penalties and biases against a plain loop, and the shapes in which drafts reach them."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from volley.decode.rules import (
    Bits,
    Constraint,
    TokenRule,
    allowed_probs,
    apply_rules,
    few_tokens,
    make_rules,
    only_token,
)
from volley.decode.sampling import scores_of, token_probs
from volley.errors import ConfigError
from volley.params import SamplingParams

V = 9
TOKENS = st.lists(st.integers(0, V - 1), max_size=6)
PENALTY = st.sampled_from([0.0, 0.5, -2.0, 1.25])


def reference(row: list[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """One row, one token at a time, from the definition."""
    times, bias = Counter(output), dict(params.logit_bias)
    result = []
    for token, logit in enumerate(row):
        if token in prompt or token in output:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * times[token]
        logit -= params.presence_penalty * (times[token] > 0)
        result.append(logit + bias.get(token, 0.0))
    return result


def taken(params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> tuple[TokenRule, ...]:
    rules = make_rules(params, prompt, V, torch.device("cpu"))
    for token in output:
        for rule in rules:
            rule.take(token)
    return rules


@given(
    prompt=TOKENS,
    output=TOKENS,
    paths=st.lists(TOKENS, min_size=1, max_size=5),
    frequency=PENALTY,
    presence=PENALTY,
    repetition=st.sampled_from([1.0, 0.5, 1.7]),
    bias=st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100, width=32), max_size=3),
    seed=st.integers(0, 99),
)
def test_every_row_is_what_a_plain_loop_makes_of_it(
    prompt: list[int],
    output: list[int],
    paths: list[list[int]],
    frequency: float,
    presence: float,
    repetition: float,
    bias: dict[int, float],
    seed: int,
) -> None:
    params = SamplingParams(
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        logit_bias=tuple(bias.items()),
    )
    logits = torch.randn(len(paths), V, generator=torch.Generator().manual_seed(seed)) * 4
    before = logits.clone()
    rules = taken(params, prompt, output)
    got = apply_rules(rules, logits, paths)
    assert torch.equal(apply_rules(rules, logits, paths), got), "a rule takes only what is final"
    for row, path in enumerate(paths):
        want = reference(logits[row].tolist(), params, prompt, [*output, *path])
        torch.testing.assert_close(got[row], torch.tensor(want))
    assert torch.equal(logits, before), "the target's own logits stay as they are"


def test_half_precision_is_processed_in_single() -> None:
    logits = torch.zeros(1, V, dtype=torch.bfloat16)
    processed: Tensor = apply_rules(taken(SamplingParams(frequency_penalty=0.001), [], [3]), logits, [()])
    assert processed.dtype == torch.float32
    assert processed[0, 3] == pytest.approx(-0.001)


def test_nothing_asked_is_nothing_changed() -> None:
    assert not taken(SamplingParams(temperature=1.0, top_k=3), [1], [2])
    for change in ({"presence_penalty": 1}, {"repetition_penalty": 0.9}, {"logit_bias": {4: 1.0}}):
        assert len(taken(SamplingParams(**change), [1], [2])) == 1


@pytest.mark.parametrize("bad", [{1.7: 1.0}, {"1.7": 1.0}, {"5": 1.0, 5: 2.0}, ((5, 1.0), (5, 2.0))])
def test_biases_name_each_token_once_by_its_number(bad: object) -> None:
    with pytest.raises(ConfigError, match="logit_bias"):
        SamplingParams(logit_bias=bad)  # type: ignore[arg-type]
    assert SamplingParams(logit_bias={"5": 1.0, np.int64(6): 2.0}).logit_bias == ((5, 1.0), (6, 2.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("tiny", [{"temperature": 1e-40}, {"temperature": 1e-6}, {"temperature": 1.0, "top_p": 1e-46}])
def test_values_too_small_for_single_precision_still_give_a_law(tiny: dict[str, float]) -> None:
    law = token_probs(torch.tensor([[0.5, 2.0, 1.0]]), SamplingParams(**tiny))  # type: ignore[arg-type]
    assert law.tolist() == [[0.0, 1.0, 0.0]]


def test_choices_have_seeds_of_their_own() -> None:
    params = SamplingParams(seed=5)
    seeds = [params.for_choice(index).seed for index in range(50)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 50
    assert seeds == [params.for_choice(index).seed for index in range(50)]
    assert SamplingParams().for_choice(3).seed is None


def test_top_logprobs_are_the_likeliest_in_order() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 0.0]])
    law = logits.log_softmax(-1)
    assert [[token for token, _ in row] for _, _, row in scores_of(logits, [0, 0], 2)] == [[1, 2], [0, 2]]
    assert scores_of(logits, [0, 0], 9)[1].likeliest[2] == (1, pytest.approx(float(law[1, 1])))


class Given(Constraint):
    """The first token of a path says which of ``masks`` its row has; the empty path has none."""

    def __init__(self, masks: Sequence[Bits]) -> None:
        self.masks = masks

    def take(self, token_id: int) -> None:
        pass

    def mask(self, path: Sequence[int]) -> Bits | None:
        return self.masks[path[0]] if path else None

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        return 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.6}, {"temperature": 0.6, "top_p": 0.7}, {"top_k": 3}, {"min_p": 0.1}], ids=str
)
def test_laws_under_a_mask_are_those_of_the_masked_logits(sampling: dict[str, float], dtype: torch.dtype) -> None:
    size, chance = 5000, np.random.default_rng(3)
    masks = [np.packbits(chance.random(size) < share, bitorder="little") for share in (0.0005, 0.4, 0.001, 0.99)]
    assert [few_tokens(mask) is None for mask in masks] == [False, True, False, True]
    params = SamplingParams(**{"temperature": 1.0, **sampling})  # type: ignore[arg-type]
    logits, rule = 3 * torch.randn(6, size, generator=torch.Generator().manual_seed(1)).to(dtype), Given(masks)
    for paths in ([(0,), (1,), (2,), (), (3,), (0,)], [(0,)] * 6, [(1,)] * 6):
        found = allowed_probs([rule], logits, paths, params)
        torch.testing.assert_close(found, token_probs(apply_rules([rule], logits, paths), params))
        alone = [allowed_probs([rule], logits[row : row + 1], [path], params) for row, path in enumerate(paths)]
        assert torch.equal(found, torch.cat(alone)), "a row depends on itself alone"


@pytest.mark.parametrize("size", [1, 63, 64, 200, 1000])
@pytest.mark.parametrize("share", [0.01, 0.2, 0.9, 1.0])
def test_the_softmax_of_what_a_mask_allows(size: int, share: float) -> None:
    """In one loop in C, and by PyTorch's operations."""
    allowed = np.random.default_rng(size).random(size) < share
    allowed[size // 2] = True
    rule, params = Given([np.packbits(allowed, bitorder="little")]), SamplingParams(temperature=0.5)
    logits = 40 * torch.randn(1, size, generator=torch.Generator().manual_seed(size))
    logits[0, ::7] = -torch.inf
    logits[0, size // 2] = 300.0
    found = allowed_probs([rule], logits, [(0,)], params)
    torch.testing.assert_close(found, token_probs(apply_rules([rule], logits, [(0,)]), params))
    assert not found[0, torch.from_numpy(~allowed)].any(), "0 to the bit"
    assert not found[0, logits[0] == -torch.inf].any()


@pytest.mark.parametrize("size", [1, 63, 64, 200, 1000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_masks_forbid_what_they_lack_and_nothing_else(size: int, share: float) -> None:
    chance = np.random.default_rng(size)
    allowed = chance.random((2, size)) < share
    masks = [np.packbits(row, bitorder="little") for row in allowed]
    rule = Given(masks)
    logits = torch.randn(3, size)
    before = logits.clone()
    expected = torch.where(torch.from_numpy(np.stack([*allowed, np.ones(size, dtype=bool)])), logits, -torch.inf)
    assert torch.equal(apply_rules([rule], logits, [(0,), (1,), ()]), expected)
    by_columns = torch.empty_strided((3, size), (1, 3)).copy_(logits)  # not contiguous: the slow way
    assert torch.equal(rule.apply(by_columns, [(0,), (1,), ()]), expected)
    assert torch.equal(logits, before), "the rows are the caller's"
    for row, mask in zip(allowed, masks, strict=True):
        tokens, all_tokens = few_tokens(mask), np.flatnonzero(row).tolist()
        assert tokens is None or tokens.tolist() == all_tokens
        assert tokens is not None or len(all_tokens) > 16
        assert only_token(mask) == (all_tokens[0] if len(all_tokens) == 1 else None)
