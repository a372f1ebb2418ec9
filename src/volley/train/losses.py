"""Compute the training loss over the target's vocabulary, against tokens and distributions, without holding all logits."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

CHUNK = (
    256  # rows whose logits exist at a time: few enough for a CPU's cache, enough to make packing the head worthwhile
)
PACE_FLOOR = 0.5


def default_gamma(block_size: int) -> float:
    """Return γ, which is 4, 5, 7 for B = 8, 10, 16 (DFlash §A.1): B / 2 up to 10, then linear through 7 at 16."""
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def slot_weights(block_size: int, decay: str, gamma: float | None) -> Tensor:
    """Return the weights ``[B − 1]`` of slots 1 … B−1: exp(−(k−1)/γ) (DFlash eq. 4), or 1 for ``pace_weights`` to multiply."""
    if decay != "decay":
        return torch.ones(block_size - 1)
    return torch.exp(-torch.arange(block_size - 1) / (gamma or default_gamma(block_size)))


def with_bias(hidden: Tensor, head: Tensor) -> Tensor:
    """Append a column of ones to ``hidden`` if the last column of ``head`` is a bias (see ``FrozenTarget.head``)."""
    return hidden if head.shape[1] == hidden.shape[1] else torch.nn.functional.pad(hidden, (0, 1), value=1.0)


def target_probs(final: Tensor, head: Tensor, softcap: float | None = None) -> Tensor:
    """Return the target's distributions ``[R, V]`` for its final states ``final [R, H]``."""
    logits = with_bias(final, head) @ head.t()
    if softcap is not None:
        logits = (softcap * torch.tanh(logits.float() / softcap)).to(head.dtype)
    return logits.softmax(-1)


def pace_weights(label_losses: Tensor, slots: Tensor) -> Tensor:
    """Return the D-PACE (arXiv 2605.18810) weights ``[R]`` of the rows of whole blocks; ``slots`` count from 0 in each block.

    The weight of slot j is Σ_{m ≥ j} Π_{i ≤ m} q̃_i with q̃ = (1 − PACE_FLOOR) · e^{−loss} + PACE_FLOOR, the part of the expected
    length that depends on slot j.
    """
    blocks = (slots == 0).cumsum(0) - 1
    chances = torch.zeros(int(blocks[-1]) + 1, int(slots.max()) + 1, device=slots.device)
    chances[blocks, slots] = (1 - PACE_FLOOR) * (-label_losses).exp() + PACE_FLOOR
    reached = chances.cumprod(1)
    return reached.flip(1).cumsum(1).flip(1)[blocks, slots]


@dataclass(frozen=True)
class Objective:
    """Loss of a row: cross-entropy against the label, with a share ``soft`` against the target's distribution p (its forward
    KL up to p's entropy, which is constant)."""

    soft: float = 0.0
    softcap: float | None = None
    """Softcap of the target's logits."""
    draft_softcap: float | None = None
    """Softcap of the drafter's logits."""

    def __call__(self, logits: Tensor, labels: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss ``[R]``, its gradient ``[R, V]`` by ``logits`` before their cap, and the label's cross-entropy ``[R]``.

        ``target [R, V]`` holds the target's distributions.
        """
        if (cap := self.draft_softcap) is not None:
            bent = torch.tanh(logits.float() / cap)
            losses, gradient, of_label = replace(self, draft_softcap=None)(
                (cap * bent).to(logits.dtype), labels, target
            )
            return losses, gradient.mul_((1 - bent.square()).to(gradient.dtype)), of_label
        probs = logits.softmax(-1)
        rows = torch.arange(len(labels), device=labels.device)
        of_label = -probs[rows, labels].float().clamp(min=1e-38).log()
        losses, gradient = of_label.clone(), probs
        if target is not None:
            expected = torch.linalg.vecdot(target, logits).float()
            losses += self.soft * (logits[rows, labels].float() - expected)
            gradient.sub_(target, alpha=self.soft)
        gradient[rows, labels] -= 1 - self.soft
        return losses, gradient, of_label


class _BlockLoss(torch.autograd.Function):
    """Computes the gradient together with the loss, chunk by chunk, so that logits exist for one chunk at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        head: Tensor,
        labels: Tensor,
        weights: Tensor,
        final: Tensor | None,
        objective: Objective,
        blocks: Tensor | None,
        measure: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = weights.clone()
        gradient = torch.empty_like(states)
        losses, of_labels = torch.empty(2, len(labels), device=states.device)
        correct = torch.zeros(len(labels), dtype=torch.bool, device=states.device)
        for rows in _chunks(len(labels), blocks):
            logits = states[rows] @ head.t()
            if measure:
                correct[rows] = logits.argmax(-1) == labels[rows]
            target = None if final is None else target_probs(final[rows], head, objective.softcap)
            losses[rows], slope, of_labels[rows] = objective(logits, labels[rows], target)
            if blocks is not None:
                weights[rows] *= pace_weights(of_labels[rows], blocks[rows])
            slope.mul_(weights[rows, None].to(slope.dtype))
            gradient[rows] = slope @ head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(of_labels, correct)
        return torch.dot(losses, weights), of_labels, correct

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None, None, None, None, None, None, None


def _chunks(count: int, blocks: Tensor | None) -> list[slice]:
    """Return slices of ``CHUNK`` rows; with ``blocks`` each slice starts at the first slot of a block."""
    bounds = list(range(0, count, CHUNK))
    if blocks is not None:
        starts = (blocks == 0).nonzero()[:, 0]
        last = torch.searchsorted(starts, torch.tensor(bounds, device=starts.device), right=True) - 1
        bounds = sorted(set(starts[last].tolist()))
    return [slice(start, end) for start, end in zip(bounds, [*bounds[1:], count], strict=True)]


def block_loss(
    states: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: Tensor,
    objective: Objective,
    *,
    final: Tensor | None = None,
    blocks: Tensor | None = None,
    measure: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Σ weights·loss of ``states [R, H]`` through the frozen ``head [V, H]``, and for each row the label's cross-entropy
    and whether its argmax is right.

    ``labels`` and ``weights`` are ``[R]``. An objective that compares with the target needs its final states ``final [R, H]``
    for the same positions. If ``blocks [R]``, each row's slot in its block, are given, ``pace_weights`` multiply the weights.
    Without ``measure`` the argmax, a fifth of the work on a CPU, is left out.
    """
    rows = with_bias(states, head), head, labels, weights.float(), final if objective.soft else None
    result: tuple[Tensor, Tensor, Tensor] = _BlockLoss.apply(*rows, objective, blocks, measure)  # type: ignore[no-untyped-call]
    return result


def accepted_prefix(correct: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the teacher-forced acceptance of blocks: leading correct slots of ``correct [N, B − 1]``, plus the bonus token.

    Return the mean over blocks with a valid slot, and the acceptance rate ``[B − 1]`` of each slot over its valid uses.
    """
    leading = (correct & valid).long().cumprod(-1).sum(-1) + 1
    used = valid.any(-1)
    accuracy = (correct & valid).sum(0) / valid.sum(0).clamp(min=1)
    return leading[used].float().mean() if used.any() else torch.tensor(1.0), accuracy
