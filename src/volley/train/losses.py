"""The training loss over the target's vocabulary, against tokens and distributions, without holding the logits."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

CHUNK = 256  # rows whose logits exist at a time: few enough for the processor's cache, enough to pack the head for
PACE_FLOOR = 0.5


def default_gamma(block_size: int) -> float:
    """γ = 4, 5, 7 for B = 8, 10, 16 (DFlash §A.1): B / 2 up to 10, then straight through 7 at 16."""
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def slot_weights(block_size: int, decay: str, gamma: float | None) -> Tensor:
    """Weights ``[B − 1]`` of slots 1 … B−1: exp(−(k−1)/γ) (DFlash eq. 4), or all 1 (which ``pace_weights`` multiply)."""
    if decay != "decay":
        return torch.ones(block_size - 1)
    return torch.exp(-torch.arange(block_size - 1) / (gamma or default_gamma(block_size)))


def _with_bias(hidden: Tensor, head: Tensor) -> Tensor:
    """Append a column of ones to ``hidden`` if ``head`` carries a bias as its last column (see ``FrozenTarget.head``)."""
    return hidden if head.shape[1] == hidden.shape[1] else torch.nn.functional.pad(hidden, (0, 1), value=1.0)


def target_probs(final: Tensor, head: Tensor, softcap: float | None = None) -> Tensor:
    """The target's distribution ``[R, V]`` for its final states ``final [R, H]``."""
    logits = _with_bias(final, head) @ head.t()
    if softcap is not None:
        logits = (softcap * torch.tanh(logits.float() / softcap)).to(head.dtype)
    return logits.softmax(-1)


def pace_weights(label_losses: Tensor, slots: Tensor) -> Tensor:
    """D-PACE (arXiv 2605.18810) weights ``[R]`` of the rows of whole blocks, one after the other; ``slots`` count from 0 in each.

    Slot j weighs Σ_{m ≥ j} Π_{i ≤ m} q̃_i with q̃ = (1 − PACE_FLOOR) · e^{−loss} + PACE_FLOOR: the part of the expected length that
    depends on slot j.
    """
    blocks = (slots == 0).cumsum(0) - 1
    chances = torch.zeros(int(blocks[-1]) + 1, int(slots.max()) + 1, device=slots.device)
    chances[blocks, slots] = (1 - PACE_FLOOR) * (-label_losses).exp() + PACE_FLOOR
    reached = chances.cumprod(1)
    return reached.flip(1).cumsum(1).flip(1)[blocks, slots]


@dataclass(frozen=True)
class Objective:
    """Loss of a row: cross-entropy against the label, but for a share ``soft`` against the target's distribution p (its forward
    KL up to p's entropy, which no drafter changes)."""

    soft: float = 0.0
    softcap: float | None = None
    """Softcap of the target's logits."""
    draft_softcap: float | None = None
    """Softcap of the drafter's logits."""

    def __call__(self, logits: Tensor, labels: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Loss ``[R]``, its gradient ``[R, V]`` by ``logits`` before their cap, and the label's cross-entropy ``[R]``.

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
    """The gradient is formed beside the loss, chunk by chunk, so that no ``[R, V]`` tensor outlives its chunk."""

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
    """Slices of ``CHUNK`` rows; with ``blocks`` each slice starts at the first slot of a block."""
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
    """Σ weights·loss of ``states [R, H]`` through the frozen ``head [V, H]``, each label's cross-entropy and whether the row's
    argmax is right.

    ``labels`` and ``weights`` are ``[R]``. An objective that compares with the target needs its final states ``final [R, H]``
    for the same positions. ``blocks [R]``, each row's slot in its block, multiplies the weights by ``pace_weights``. Without
    ``measure`` the argmax, a fifth of the work on a CPU, is left out.
    """
    rows = _with_bias(states, head), head, labels, weights.float(), final if objective.soft else None
    result: tuple[Tensor, Tensor, Tensor] = _BlockLoss.apply(*rows, objective, blocks, measure)  # type: ignore[no-untyped-call]
    return result


def accepted_prefix(correct: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Teacher-forced acceptance of blocks: leading correct slots of ``correct [N, B − 1]``, plus the bonus token.

    Returns the mean over blocks with a valid slot, and the acceptance rate ``[B − 1]`` of each slot over all its valid uses.
    """
    leading = (correct & valid).long().cumprod(-1).sum(-1) + 1
    used = valid.any(-1)
    accuracy = (correct & valid).sum(0) / valid.sum(0).clamp(min=1)
    return leading[used].float().mean() if used.any() else torch.tensor(1.0), accuracy
