"""The chunked loss against torch's own cross-entropy and KL divergence."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from volley.train import losses
from volley.train.losses import accepted_prefix, default_gamma, expected_head_rows, slot_weights, weighted_cross_entropy


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, ...]:
    monkeypatch.setattr(losses, "CHUNK", 4)
    torch.manual_seed(0)
    hidden = torch.randn(11, 6, requires_grad=True)
    return hidden, torch.randn(9, 6), torch.randint(0, 9, (11,)), torch.rand(11), torch.randn(11, 6)


def test_hard_loss_and_gradient_equal_torchs(rows: tuple[torch.Tensor, ...]) -> None:
    hidden, head, labels, weights, _ = rows
    loss, each, correct = weighted_cross_entropy(hidden, head, labels, weights)
    (gradient,) = torch.autograd.grad(2 * loss, hidden)
    logits = hidden @ head.t()
    expected = cross_entropy(logits, labels, reduction="none")
    (expected_gradient,) = torch.autograd.grad(2 * (expected * weights).sum(), hidden)
    torch.testing.assert_close(each, expected)
    torch.testing.assert_close(loss, (expected * weights).sum())
    torch.testing.assert_close(gradient, expected_gradient)
    assert torch.equal(correct, logits.argmax(-1) == labels)


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_soft_loss_is_forward_kl_up_to_the_targets_entropy(rows: tuple[torch.Tensor, ...], alpha: float) -> None:
    hidden, head, labels, weights, target_hidden = rows
    soft = expected_head_rows(target_hidden, head)
    loss, _, _ = weighted_cross_entropy(hidden, head, labels, weights, soft, alpha)
    (gradient,) = torch.autograd.grad(loss, hidden)
    logits, probs = hidden @ head.t(), (target_hidden @ head.t()).softmax(-1)
    kl = (probs * (probs.log() - logits.log_softmax(-1))).sum(-1)
    entropy = -(probs * probs.log()).sum(-1)
    hard = cross_entropy(logits, labels, reduction="none")
    mixed = ((1 - alpha) * hard + alpha * kl) * weights
    (expected_gradient,) = torch.autograd.grad(mixed.sum(), hidden)
    torch.testing.assert_close(loss, mixed.sum() + alpha * (entropy * weights).sum())
    torch.testing.assert_close(gradient, expected_gradient)


def test_soft_labels_follow_the_targets_logit_softcap(rows: tuple[torch.Tensor, ...]) -> None:
    _, head, _, _, target_hidden = rows
    probs = (3 * torch.tanh(target_hidden @ head.t() / 3)).softmax(-1)
    torch.testing.assert_close(expected_head_rows(target_hidden, head, 3.0), probs @ head)


def test_a_head_with_bias_is_one_more_column(rows: tuple[torch.Tensor, ...]) -> None:
    hidden, head, labels, weights, _ = rows
    bias = torch.randn(9)
    loss, _, _ = weighted_cross_entropy(hidden, torch.cat([head, bias[:, None]], 1), labels, weights)
    (gradient,) = torch.autograd.grad(loss, hidden)
    expected = (cross_entropy(hidden @ head.t() + bias, labels, reduction="none") * weights).sum()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, hidden)[0])


def test_without_measuring_only_the_argmax_is_missing(rows: tuple[torch.Tensor, ...]) -> None:
    hidden, head, labels, weights, _ = rows
    loss, each, correct = weighted_cross_entropy(hidden, head, labels, weights, measure=False)
    measured = weighted_cross_entropy(hidden, head, labels, weights)
    assert torch.equal(loss, measured[0])
    assert torch.equal(each, measured[1])
    assert not correct.any()


def test_bf16_loss_is_close_to_fp32(rows: tuple[torch.Tensor, ...]) -> None:
    hidden, head, labels, weights, _ = rows
    exact, _, _ = weighted_cross_entropy(hidden, head, labels, weights)
    rounded, _, _ = weighted_cross_entropy(hidden.bfloat16(), head.bfloat16(), labels, weights)
    torch.testing.assert_close(rounded, exact, rtol=0.02, atol=0.0)


def test_slot_weights_are_the_papers() -> None:
    assert [default_gamma(size) for size in (16, 10, 8)] == [7, 5, 4]
    assert 5 < default_gamma(13) < 7
    torch.testing.assert_close(slot_weights(8, "decay", None), torch.exp(-torch.arange(7) / 4))
    torch.testing.assert_close(slot_weights(8, "decay", 2.0), torch.exp(-torch.arange(7) / 2))
    assert torch.equal(slot_weights(8, "uniform", None), torch.ones(7))


def test_acceptance_counts_leading_hits_and_the_bonus() -> None:
    correct = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 1], [1, 0, 0]]).bool()
    valid = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [0, 0, 0]]).bool()
    tau, accuracy = accepted_prefix(correct, valid)
    assert tau == pytest.approx((3 + 1 + 3) / 3)
    assert accuracy.tolist() == pytest.approx([2 / 3, 1, 1 / 2])
