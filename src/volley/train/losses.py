"""The training loss: weighted cross-entropy over the target's vocabulary, hard and soft, without holding the logits."""

from typing import Any

import torch
from torch import Tensor

CHUNK = 256  # rows whose logits exist at a time: few enough for the processor's cache, enough to pack the head for


def default_gamma(block_size: int) -> float:
    """γ = 4, 5, 7 for B = 8, 10, 16 (DFlash §A.1): B / 2 up to 10, then straight through 7 at 16."""
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def slot_weights(block_size: int, decay: str, gamma: float | None) -> Tensor:
    """Weights ``[B − 1]`` of slots 1 … B−1: exp(−(k−1)/γ) (DFlash eq. 4), or all 1."""
    if decay == "uniform":
        return torch.ones(block_size - 1)
    return torch.exp(-torch.arange(block_size - 1) / (gamma or default_gamma(block_size)))


def _with_bias(hidden: Tensor, head: Tensor) -> Tensor:
    """A head with a bias carries it as one more column (see ``FrozenTarget.head``); its input is then a 1."""
    return hidden if head.shape[1] == hidden.shape[1] else torch.nn.functional.pad(hidden, (0, 1), value=1.0)


def expected_head_rows(hidden: Tensor, head: Tensor, softcap: float | None = None) -> Tensor:
    """e = Σ_v p(v)·W_v ``[R, H]`` under the target's p = softmax(W·h) for its final states ``hidden [R, H]``.

    The soft label of a position: all that its distribution contributes to loss and gradient (``_WeightedCrossEntropy``).
    """
    rows = []
    for chunk in torch.split(_with_bias(hidden, head), CHUNK):
        logits = chunk @ head.t()
        if softcap is not None:
            logits = softcap * torch.tanh(logits.float() / softcap)
        rows.append(logits.softmax(-1).to(head.dtype) @ head)
    return torch.cat(rows) if rows else hidden.new_empty(0, head.shape[1])


class _WeightedCrossEntropy(torch.autograd.Function):
    """The gradient is formed beside the loss, chunk by chunk, so that no ``[R, V]`` tensor outlives its chunk.

    With logits linear in ``hidden``, a label distribution p enters only through its expected head row e = Σ_v p(v)·W_v:
    the cross-entropy is logsumexp(W·h) − e·h and its gradient Σ_v q(v)·W_v − e. A hard label y has e = W_y.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        weights: Tensor,
        soft: Tensor | None,
        alpha: float,
        measure: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(hidden)
        losses = torch.empty(len(labels), device=hidden.device)
        correct = torch.zeros(len(labels), dtype=torch.bool, device=hidden.device)
        for start in range(0, len(labels), CHUNK):
            rows = slice(start, start + CHUNK)
            chunk, chosen = hidden[rows], labels[rows]
            logits = chunk @ head.t()
            if measure:
                correct[rows] = logits.argmax(-1) == chosen
            probs = logits.softmax(-1)
            losses[rows] = -probs.gather(1, chosen[:, None])[:, 0].float().clamp(min=1e-38).log()
            goal = head[chosen]
            if soft is not None:
                mixed = torch.lerp(goal, soft[rows], alpha)
                losses[rows] += (chunk * (goal - mixed)).sum(-1).float()
                goal = mixed
            gradient[rows] = (probs @ head).sub_(goal).mul_(weights[rows, None].to(hidden.dtype))
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(losses, correct)
        return torch.dot(losses, weights), losses, correct

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None, None, None, None, None, None


def weighted_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: Tensor,
    soft: Tensor | None = None,
    alpha: float = 0.0,
    measure: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ weights·CE of ``hidden [R, H]`` through the frozen ``head [V, H]``, each row's CE and whether its argmax is right.

    ``labels`` and ``weights`` are ``[R]``. With ``soft [R, H]`` (``expected_head_rows`` of the target), a share ``alpha`` of
    each row's cross-entropy is taken against the target's distribution: its forward KL up to the target's entropy,
    which no drafter changes. Without ``measure`` the argmax, a fifth of the work on a CPU, is left out.
    """
    rows = _with_bias(hidden, head), head, labels, weights.float(), soft if alpha else None
    result: tuple[Tensor, Tensor, Tensor] = _WeightedCrossEntropy.apply(*rows, alpha, measure)  # type: ignore[no-untyped-call]
    return result


def accepted_prefix(correct: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Teacher-forced acceptance of blocks: leading correct slots of ``correct [N, B − 1]``, plus the bonus token.

    Returns the mean over blocks with a valid slot, and the acceptance rate ``[B − 1]`` of each slot over all its valid uses.
    """
    leading = (correct & valid).long().cumprod(-1).sum(-1) + 1
    used = valid.any(-1)
    accuracy = (correct & valid).sum(0) / valid.sum(0).clamp(min=1)
    return leading[used].float().mean() if used.any() else torch.tensor(1.0), accuracy
