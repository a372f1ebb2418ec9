"""The chunked loss against torch's own operations."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from volley.train import losses
from volley.train.losses import (
    Objective,
    accepted_prefix,
    block_loss,
    default_gamma,
    pace_weights,
    slot_weights,
    target_probs,
)

HARD = Objective()


class Rows(NamedTuple):
    hidden: Tensor
    head: Tensor
    labels: Tensor
    weights: Tensor
    final: Tensor


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Rows:
    monkeypatch.setattr(losses, "CHUNK", 4)
    torch.manual_seed(0)
    hidden = torch.randn(11, 6, requires_grad=True)
    return Rows(hidden, torch.randn(9, 6), torch.randint(0, 9, (11,)), torch.rand(11), torch.randn(11, 6))


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("soft", [0.0, 0.3, 1.0])
def test_every_mixture_is_what_it_says(rows: Rows, soft: float, cap: float | None) -> None:
    """Forward KL up to the target's entropy; the gradient is that of torch, through the drafter's cap if any."""
    loss, each, _ = block_loss(*rows[:4], Objective(soft, draft_softcap=cap), final=rows.final)
    (found,) = torch.autograd.grad(3 * loss, rows.hidden)

    logits = rows.hidden @ rows.head.t()
    log_q = (logits if cap is None else cap * torch.tanh(logits / cap)).log_softmax(-1)
    p = (rows.final @ rows.head.t()).softmax(-1)
    hard = torch.nn.functional.nll_loss(log_q, rows.labels, reduction="none")
    expected = (1 - soft) * hard + soft * -(p * log_q).sum(-1)
    torch.testing.assert_close(each, hard)
    torch.testing.assert_close(loss, (expected * rows.weights).sum())
    torch.testing.assert_close(found, torch.autograd.grad(3 * (expected * rows.weights).sum(), rows.hidden)[0])


def test_the_targets_law_follows_its_logit_softcap(rows: Rows) -> None:
    expected = (3 * torch.tanh(rows.final @ rows.head.t() / 3)).softmax(-1)
    torch.testing.assert_close(target_probs(rows.final, rows.head, 3.0), expected)


def test_a_head_with_bias_is_one_more_column(rows: Rows) -> None:
    bias = torch.randn(9)
    loss, _, correct = block_loss(rows.hidden, torch.cat([rows.head, bias[:, None]], 1), *rows[2:4], HARD)
    (gradient,) = torch.autograd.grad(loss, rows.hidden)
    logits = rows.hidden @ rows.head.t() + bias
    expected = (cross_entropy(logits, rows.labels, reduction="none") * rows.weights).sum()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, rows.hidden)[0])
    assert torch.equal(correct, logits.argmax(-1) == rows.labels)


def test_without_measuring_only_the_argmax_is_missing(rows: Rows) -> None:
    loss, each, correct = block_loss(*rows[:4], HARD, measure=False)
    measured = block_loss(*rows[:4], HARD)
    assert torch.equal(loss, measured[0])
    assert torch.equal(each, measured[1])
    assert not correct.any()


@pytest.mark.parametrize("objective", [HARD, Objective(0.5)])
def test_bf16_loss_is_close_to_fp32(rows: Rows, objective: Objective) -> None:
    exact, _, _ = block_loss(*rows[:4], objective, final=rows.final)
    hidden, head, final = (x.bfloat16() for x in (rows.hidden, rows.head, rows.final))
    rounded, _, _ = block_loss(hidden, head, *rows[2:4], objective, final=final)
    torch.testing.assert_close(rounded, exact, rtol=0.02, atol=0.0)


def test_pace_weighs_each_slot_by_what_hangs_on_it() -> None:
    """Slot by slot; blocks of all lengths, more rows than one chunk holds, weights that were there before."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 8, (90,), generator=generator).tolist()
    slots = torch.cat([torch.arange(length) for length in lengths])
    hidden, head = torch.randn(len(slots), 5, generator=generator), torch.randn(11, 5, generator=generator)
    labels = torch.randint(11, (len(slots),), generator=generator)
    before = torch.rand(len(slots), generator=generator)
    _, plain, _ = block_loss(hidden, head, labels, torch.ones(len(slots)), HARD)
    expected, row = torch.zeros(()), 0
    for length in lengths:
        chances = [0.5 * math.exp(-loss) + 0.5 for loss in plain[row : row + length].tolist()]
        for slot in range(length):
            weight = sum(math.prod(chances[: m + 1]) for m in range(slot, length))
            expected += weight * before[row + slot] * plain[row + slot]
        row += length
    states = hidden.clone().requires_grad_()
    total, each, _ = block_loss(states, head, labels, before, HARD, blocks=slots)
    torch.testing.assert_close(total, expected)
    assert torch.equal(each, plain)
    total.backward()
    weighted = hidden.clone().requires_grad_()
    weights = before * pace_weights(plain, slots)
    block_loss(weighted, head, labels, weights, HARD)[0].backward()
    torch.testing.assert_close(states.grad, weighted.grad)


def test_slot_weights_are_the_papers() -> None:
    assert [default_gamma(size) for size in (16, 10, 8)] == [7, 5, 4]
    assert 5 < default_gamma(13) < 7
    torch.testing.assert_close(slot_weights(8, "decay", None), torch.exp(-torch.arange(7) / 4))
    torch.testing.assert_close(slot_weights(8, "decay", 2.0), torch.exp(-torch.arange(7) / 2))
    assert torch.equal(slot_weights(8, "pace", None), torch.ones(7))


def test_acceptance_counts_leading_hits_and_the_bonus() -> None:
    correct = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 1], [1, 0, 0]]).bool()
    valid = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [0, 0, 0]]).bool()
    tau, accuracy = accepted_prefix(correct, valid)
    assert tau == pytest.approx((3 + 1 + 3) / 3)
    assert accuracy.tolist() == pytest.approx([2 / 3, 1, 1 / 2])
