"""Initialise a new drafter with the weights of its target's last layers, which can read the features already.

The features are the output of a late layer, and the layers after it can read them. So ``fc`` begins as mostly the last tap, and
the draft layers as copies of the target's last layers with attention. The scales of those layers' norms apply to the block's own
states, not to the features. So attention to the context outweighs attention to the empty slots.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from volley.models.drafters.drafter import DraftAttention, Drafter, DraftLayer, DraftMLP, RMSNorm
from volley.models.targets.taps import decoder_layers

Part = TypeVar("Part")
LAST_TAP, OTHER_TAPS = 0.6, 0.1
"""Initial weights of the last tap and of each other tap in the features."""
SCALES = tuple(0.5 ** (step / 2) for step in range(7))
"""Scales of the last norm to try, largest first. A smaller scale would take long to grow again."""
SHARPNESS = 1.3
"""Scale of the norms of queries and keys if the target has none: about the size of its own queries and keys."""


@dataclass(frozen=True)
class Attention:
    """Matrices of a target's attention: queries ``[heads, d, H]``, keys and values ``[kv_heads, d, H]``, ``output`` ``[H, heads,
    d]``."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    output: Tensor
    query_norm: Tensor
    """Scale ``[d]`` of the norm of each head's queries."""
    key_norm: Tensor
    norm: Tensor
    """Scale ``[H]`` of the norm before it."""

    @classmethod
    def of(cls, layer: nn.Module, head_dim: int, heads: int) -> "Attention | None":
        """Return the matrices of a decoder layer, or ``None`` if it has no softmax attention with such projections."""
        module = getattr(layer, "self_attn", None)
        found = None if module is None else _projections(module, head_dim, heads)
        if module is None or found is None:
            return None
        queries, keys, values = found
        output = _matrix(module.o_proj)
        if output.shape[1] != heads * head_dim:
            return None
        sharp, width = torch.full((head_dim,), SHARPNESS), len(output)
        of_queries, of_keys = (norm_scale(getattr(module, name, None), head_dim) for name in ("q_norm", "k_norm"))
        before = norm_scale(getattr(layer, "input_layernorm", None), width)
        return cls(
            queries,
            keys,
            values,
            output.view(width, heads, head_dim),
            sharp if of_queries is None else of_queries,
            sharp if of_keys is None else of_keys,
            torch.ones(width) if before is None else before,
        )

    def copy_to(self, own: DraftAttention) -> None:
        """Copy these matrices to ``own``. If this layer has fewer K/V heads than others, each is repeated."""
        count = own.k_proj.out_features // own.head_dim
        keys = torch.arange(count) * len(self.keys) // count
        own.q_proj.weight.copy_(self.queries.flatten(0, 1))
        own.k_proj.weight.copy_(self.keys[keys].flatten(0, 1))
        own.v_proj.weight.copy_(self.values[keys].flatten(0, 1))
        own.o_proj.weight.copy_(self.output.flatten(1))
        own.q_norm.weight.copy_(self.query_norm)
        own.k_norm.weight.copy_(self.key_norm)


def _matrix(layer: nn.Linear) -> Tensor:
    return layer.weight.detach().to("cpu", torch.float32)


def _projections(module: nn.Module, head_dim: int, heads: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the matrices of queries, keys and values ``[heads, d, H]``, without a gate that is stored with the queries."""
    if isinstance(together := getattr(module, "qkv_proj", None), nn.Linear):
        kv = (together.out_features - heads * head_dim) // 2
        queries, keys, values = torch.split(_matrix(together), [heads * head_dim, kv, kv])
    elif all(isinstance(getattr(module, f"{name}_proj", None), nn.Linear) for name in "qkvo"):
        queries, keys, values = (_matrix(getattr(module, f"{name}_proj")) for name in "qkv")
    else:
        return None
    width = queries.shape[1]
    is_gated = len(queries) == 2 * heads * head_dim  # each head's queries, then its gate
    if len(queries) != heads * head_dim * (1 + is_gated) or len(keys) % head_dim or len(keys) != len(values):
        return None
    by_head = queries.view(heads, -1, width)[:, :head_dim]
    return by_head, keys.view(-1, head_dim, width), values.view(-1, head_dim, width)


@dataclass(frozen=True)
class MLP:
    """Matrices of a target's gated MLP, ``gate`` and ``up`` ``[I, H]``, ``down [H, I]``, and the scale of the norm before it."""

    gate: Tensor
    up: Tensor
    down: Tensor
    norm: Tensor

    @classmethod
    def of(cls, layer: nn.Module) -> "MLP | None":
        """Return the matrices of a decoder layer, or ``None`` for experts and for MLPs without a gate."""
        module = getattr(layer, "mlp", None) or getattr(layer, "feed_forward", None)
        output = getattr(module, "down_proj", None)
        if not isinstance(output, nn.Linear):
            return None
        if isinstance(together := getattr(module, "gate_up_proj", None), nn.Linear):
            gate, up = _matrix(together).chunk(2)
        elif all(isinstance(getattr(module, name, None), nn.Linear) for name in ("gate_proj", "up_proj")):
            gate, up = (_matrix(getattr(module, name)) for name in ("gate_proj", "up_proj"))
        else:
            return None
        names = (
            "pre_feedforward_layernorm",
            "post_attention_layernorm",
        )  # beside the first, the second norms an output
        norms = [getattr(layer, name) for name in names if hasattr(layer, name)]
        scale = norm_scale(norms[0], gate.shape[1]) if norms and hasattr(layer, "input_layernorm") else None
        return cls(gate, up, _matrix(output), torch.ones(gate.shape[1]) if scale is None else scale)

    def copy_to(self, own: DraftMLP) -> None:
        """Copy these matrices to ``own``: the first neurons of a wider MLP. Neurons that this MLP lacks begin with output 0."""
        count = min(len(self.gate), own.gate_proj.out_features)
        own.gate_proj.weight[:count] = self.gate[:count]
        own.up_proj.weight[:count] = self.up[:count]
        own.down_proj.weight.zero_()
        own.down_proj.weight[:, :count] = self.down[:, :count]


def norm_scale(norm: nn.Module | None, width: int) -> Tensor | None:
    """Return the factors ``[width]`` by which a norm multiplies its unit input, however it stores them (Gemma: 1 + weight);
    ``None`` if they cannot be read."""
    weight = getattr(norm, "weight", None)
    if norm is None or weight is None or weight.shape != (width,):
        return None
    probe = torch.ones_like(weight)
    probe[1::2] = -1  # mean 0 and RMS 1, so that every type of norm only applies its scale
    scale = (norm(probe[None])[0] / probe).detach().to("cpu", torch.float32)
    return scale if bool(scale.isfinite().all()) else None


@torch.no_grad()
def begin_from_target(drafter: Drafter, target: PreTrainedModel) -> None:
    """Copy the weights of the last layers of ``target`` to a new drafter; weights of other shapes stay random."""
    begin_at_head(drafter, target)
    taps, width, count = drafter.config.num_taps, drafter.config.hidden_size, len(drafter.layers)
    shares = torch.tensor([OTHER_TAPS] * (taps - 1) + [LAST_TAP])
    drafter.fc.weight.copy_((shares[:, None, None] * torch.eye(width)).permute(1, 0, 2).flatten(1))
    text, layers = target.config.get_text_config(), list(decoder_layers(target))
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or width // heads
    attentions = _last(layers, lambda layer: Attention.of(layer, head_dim, heads), count)
    mlps, own = _last(layers, MLP.of, count), cast(Iterable[DraftLayer], drafter.layers)
    for layer, attention in zip(own, attentions, strict=bool(attentions)):
        layer.input_layernorm.weight.copy_(attention.norm)
        attention.copy_to(layer.self_attn)
    for layer, mlp in zip(own, mlps, strict=bool(mlps)):
        layer.post_attention_layernorm.weight.copy_(mlp.norm)
        mlp.copy_to(layer.mlp)


def _last(layers: Iterable[nn.Module], read: Callable[[nn.Module], Part | None], count: int) -> list[Part]:
    """Return the parts that ``read`` finds in the last ``count`` layers with one. If there are fewer, repeat the first."""
    found: list[Part] = []
    for layer in reversed(list(layers)):
        if len(found) < count and (part := read(layer)) is not None:
            found.insert(0, part)
    return found[:1] * (count - len(found)) + found


@torch.no_grad()
def begin_at_head(drafter: Drafter, target: PreTrainedModel) -> None:
    """Copy the scale of the target's last norm to a new drafter, whose states go through the same head."""
    scale = norm_scale(getattr(target.get_decoder(), "norm", None), len(drafter.norm.weight))
    if scale is not None:
        drafter.norm.weight.copy_(scale)


@torch.no_grad()
def soften(norm: RMSNorm, loss: Callable[[], float]) -> None:
    """Scale the last ``norm`` down to the least ``loss``.

    The states of new layers still resemble the embedding of their own token. With a tied head that token gets a large logit,
    which is wrong, and the loss is higher than for equal logits.
    """
    whole, losses = norm.weight.clone(), dict[float, float]()
    for scale in SCALES:
        norm.weight.copy_(whole * scale)
        losses[scale] = loss()
        if losses[scale] > min(losses.values()):
            break
    norm.weight.copy_(whole * min(losses, key=losses.__getitem__))
