"""Digests of weights, which tell models apart."""

import hashlib

import torch
from torch import Tensor, nn

SAMPLED = 64
"""Numbers of a weight, about."""


def sample(weight: Tensor) -> Tensor:
    """Some of a weight's numbers in bf16, so that it does not matter whether it was loaded in fp32 or bf16.

    A weight that was given up (``accelerate(release=True)``), or of which only codes are read, has kept them.
    """
    kept: Tensor | None = getattr(weight, "sample", None)
    if kept is not None:
        return kept
    flat = weight.detach().flatten()
    return flat[:: stride(flat.numel())].to("cpu", torch.bfloat16).clone()


def stride(size: int) -> int:
    """How far numbers of :func:`sample` are apart in a weight of so many; the first is one of them."""
    return max(1, size // SAMPLED)


def target_fingerprint(model: nn.Module) -> str:
    """A digest of every weight's name, shape and a sample of its numbers: another training gives another one."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict(keep_vars=True).items()):
        digest.update(f"{name}{list(weight.shape)}".encode() + sample(weight).float().numpy().tobytes())
    return digest.hexdigest()[:32]


def drafter_fingerprint(drafter: nn.Module) -> str:
    """A digest of every weight as a checkpoint keeps it."""
    digest = hashlib.sha256()
    for name, weight in sorted(drafter.state_dict().items()):
        digest.update(f"{name}{list(weight.shape)}".encode())
        digest.update(weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]
