"""Compute the drafter's norms and rotations with explicit backward passes; autograd's keep fp32 copies of every activation.

On a CPU norms and rotations take most of a small drafter's training time, and matmuls very little.
"""

import ctypes
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from volley.models.drafters.drafter import DraftAttention, Drafter, RMSNorm

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # mallopt's names for its parameters (malloc.h)


class _Norm(torch.autograd.Function):
    """Compute ``x / rms(x) · weight`` over the last dimension. All tensors as large as ``x`` have its dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = weight.to(x.dtype)
        ctx.save_for_backward(x, scale)
        ctx.eps = eps
        ctx.weight_dtype = weight.dtype
        with torch.autocast(x.device.type, enabled=False):  # autocast would convert to fp32 on a GPU
            return rms_norm(x, scale.shape, scale, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, scale = ctx.saved_tensors
        size = x.shape[-1]
        square = torch.linalg.vector_norm(
            x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)
        ).square_()
        inverse = square.div_(size).add_(ctx.eps).rsqrt_().to(x.dtype)
        unit = x * inverse
        product = grad * unit
        along = (product @ scale).div_(size).unsqueeze(-1)
        grad_weight = product.reshape(-1, size).sum(0, dtype=ctx.weight_dtype)
        grad_x = torch.mul(grad, scale, out=product).sub_(unit.mul_(along)).mul_(inverse)
        return grad_x, grad_weight, None


class _Rotation(torch.autograd.Function):
    """Rotate ``x [T, heads, d]``. The backward pass rotates by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Rotate ``x`` by the angles times ``sign``. Both halves of ``cos`` and ``sin`` are equal, as in ``Rotary``."""
    half = x.shape[-1] // 2
    turned = x * cos
    sin = sin[..., :half]
    turned[..., :half].addcmul_(x[..., half:], sin, value=-sign)
    turned[..., half:].addcmul_(x[..., :half], sin, value=sign)
    return turned


def fuse(drafter: Drafter) -> None:
    """Replace the forwards of norms and projections in place. Parameters do not change."""
    for module in drafter.modules():
        if isinstance(module, RMSNorm):
            _fuse_norm(module)
        elif isinstance(module, DraftAttention):
            _fuse_rotations(module)


def _fuse_norm(norm: RMSNorm) -> None:
    def forward(x: Tensor) -> Tensor:
        normed: Tensor = _Norm.apply(x, norm.weight, norm.eps)  # type: ignore[no-untyped-call]
        return normed

    norm.forward = forward  # type: ignore[method-assign]


def _fuse_rotations(attention: DraftAttention) -> None:
    def queries(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = attention.q_norm(attention.split_heads(attention.q_proj(x)))
        rotated: Tensor = _Rotation.apply(normed, cos, sin)  # type: ignore[no-untyped-call]
        return rotated

    def keys_values(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        normed = attention.k_norm(attention.split_heads(attention.k_proj(x)))
        rotated: Tensor = _Rotation.apply(normed, cos, sin)  # type: ignore[no-untyped-call]
        return rotated, attention.split_heads(attention.v_proj(x))

    attention.queries = queries  # type: ignore[method-assign]
    attention.keys_values = keys_values  # type: ignore[method-assign]


def keep_freed_memory() -> None:
    """Let glibc keep freed memory, because page faults on new memory take longer than the computation."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # another C library has no mallopt
        for parameter, value in ((_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 << 20)):
            mallopt(parameter, value)
