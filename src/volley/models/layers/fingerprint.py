"""Digests of weights, which identify models."""

import hashlib

import torch
from torch import Tensor, nn

SAMPLED = 64
"""Approximate number of sampled values of a weight."""


def sample(weight: Tensor) -> Tensor:
    """Sample a weight's numbers in bf16, so that loading it in fp32 or bf16 gives the same sample.

    A released weight (``accelerate(release=True)``), or one of which only codes are read, has kept its sample.
    """
    kept: Tensor | None = getattr(weight, "sample", None)
    if kept is not None:
        return kept
    flat = weight.detach().flatten()
    return flat[:: stride(flat.numel())].to("cpu", torch.bfloat16).clone()


def stride(size: int) -> int:
    """Return the distance between the numbers of :func:`sample` in a weight of ``size`` numbers, from the first on."""
    return max(1, size // SAMPLED)


def target_fingerprint(model: nn.Module) -> str:
    """Return a digest of every weight's name, shape and sample, which changes with training."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict(keep_vars=True).items()):
        digest.update(f"{name}{list(weight.shape)}".encode() + sample(weight).float().numpy().tobytes())
    return digest.hexdigest()[:32]


def drafter_fingerprint(drafter: nn.Module) -> str:
    """Return a digest of every weight as a checkpoint stores it."""
    digest = hashlib.sha256()
    for name, weight in sorted(drafter.state_dict().items()):
        digest.update(f"{name}{list(weight.shape)}".encode())
        digest.update(weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]
