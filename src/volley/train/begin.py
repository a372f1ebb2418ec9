"""The weights a new drafter begins with: those of its target's last layers, so that it begins by reading features as they do.

The features are the output of a late layer, which the layers behind it know how to read. So ``fc`` begins as mostly the last
tap, and the draft layers as copies of the target's last layers that have attention. Features pass through no scale of those
layers' norms, only the block's own states do: what is read of the context then outweighs the empty slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from volley.models.drafters.drafter import DraftAttention, Drafter, DraftMLP, RMSNorm
from volley.models.targets.taps import decoder_layers

Part = TypeVar("Part")
LAST_TAP, OTHER_TAPS = 0.6, 0.1
"""How much of each tap the features begin as."""
SCALES = tuple(0.5 ** (step / 2) for step in range(7))
"""Of the last norm, the largest first. A smaller one would take long to grow again."""
SHARPNESS = 1.3
"""Scale of the norms of queries and keys where the target has none: about what its own queries and keys have."""


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
        """Those of a decoder layer; ``None`` where it has no softmax attention with such projections."""
        module = getattr(layer, "self_attn", None)
        projections = None if module is None else _projections(module, head_dim, heads)
        if module is None or projections is None:
            return None
        output = module.o_proj.weight.detach().float()
        if output.shape[1] != heads * head_dim:
            return None
        found = [norm_scale(getattr(module, name, None), head_dim) for name in ("q_norm", "k_norm")]
        query_norm, key_norm = (torch.full((head_dim,), SHARPNESS) if norm is None else norm for norm in found)
        before = norm_scale(getattr(layer, "input_layernorm", None), len(output))
        before = torch.ones(len(output)) if before is None else before
        queries, keys, values = projections
        return cls(queries, keys, values, output.unflatten(1, (heads, head_dim)), query_norm, key_norm, before)

    def copy_to(self, own: DraftAttention) -> None:
        """Give ``own`` these matrices; of more or fewer heads those of the same place, none of another size."""
        size = own.head_dim
        if size != self.queries.shape[1]:
            return
        kv_heads, groups = own.k_proj.out_features // size, own.q_proj.out_features // own.k_proj.out_features
        have, shared = len(self.keys), len(self.queries) // len(self.keys)
        keys = torch.arange(kv_heads) % have
        queries = (keys[:, None] * shared + torch.arange(groups) % shared).flatten()
        uses = torch.bincount(queries, minlength=len(self.queries))
        own.q_proj.weight.copy_(self.queries[queries].flatten(0, 1))
        own.k_proj.weight.copy_(self.keys[keys].flatten(0, 1))
        own.v_proj.weight.copy_(self.values[keys].flatten(0, 1))
        own.o_proj.weight.copy_((self.output[:, queries] / uses[queries][:, None]).flatten(1))
        own.q_norm.weight.copy_(self.query_norm)
        own.k_norm.weight.copy_(self.key_norm)


def _projections(module: nn.Module, head_dim: int, heads: int) -> list[Tensor] | None:
    """Queries, keys and values ``[heads, d, H]``; a gate beside the queries is left out."""
    if isinstance(together := getattr(module, "qkv_proj", None), nn.Linear):
        kv = (together.out_features - heads * head_dim) // 2
        parts: list[Any] = list(torch.split(together.weight.detach().float(), [heads * head_dim, kv, kv]))
    elif all(isinstance(getattr(module, f"{name}_proj", None), nn.Linear) for name in "qkvo"):
        parts = [getattr(module, f"{name}_proj").weight.detach().float() for name in "qkv"]
    else:
        return None
    gated = len(parts[0]) == 2 * heads * head_dim  # each head's queries, then its gate
    if len(parts[0]) != heads * head_dim * (1 + gated) or len(parts[1]) % head_dim or len(parts[1]) != len(parts[2]):
        return None
    queries = parts[0].unflatten(0, (heads, -1))[:, :head_dim]
    return [queries, *(part.unflatten(0, (-1, head_dim)) for part in parts[1:])]


@dataclass(frozen=True)
class MLP:
    """Matrices of a target's gated MLP, ``gate`` and ``up`` ``[I, H]``, ``down [H, I]``, and the scale of the norm before it."""

    gate: Tensor
    up: Tensor
    down: Tensor
    norm: Tensor

    @classmethod
    def of(cls, layer: nn.Module) -> "MLP | None":
        """Those of a decoder layer; ``None`` for experts and for MLPs without a gate."""
        module = getattr(layer, "mlp", None) or getattr(layer, "feed_forward", None)
        down = getattr(module, "down_proj", None)
        if not isinstance(down, nn.Linear):
            return None
        if isinstance(together := getattr(module, "gate_up_proj", None), nn.Linear):
            gate, up = together.weight.detach().float().chunk(2)
        elif all(isinstance(getattr(module, name, None), nn.Linear) for name in ("gate_proj", "up_proj")):
            gate, up = (getattr(module, name).weight.detach().float() for name in ("gate_proj", "up_proj"))
        else:
            return None
        names = ("pre_feedforward_layernorm", "post_attention_layernorm")  # with the first, the second is of an output
        norms = [getattr(layer, name) for name in names if hasattr(layer, name)]
        scale = norm_scale(norms[0], gate.shape[1]) if norms and hasattr(layer, "input_layernorm") else None
        return cls(gate, up, down.weight.detach().float(), torch.ones(gate.shape[1]) if scale is None else scale)

    def copy_to(self, own: DraftMLP) -> None:
        """Give ``own`` these matrices: of a wider MLP the first neurons; those that this one lacks begin without a say."""
        count = min(len(self.gate), own.gate_proj.out_features)
        own.gate_proj.weight[:count] = self.gate[:count]
        own.up_proj.weight[:count] = self.up[:count]
        own.down_proj.weight.zero_()
        own.down_proj.weight[:, :count] = self.down[:, :count]


def norm_scale(norm: nn.Module | None, width: int) -> Tensor | None:
    """What a norm multiplies its unit input by ``[width]``, however it keeps that (Gemma: 1 + weight)."""
    weight = getattr(norm, "weight", None)
    if norm is None or weight is None or weight.shape != (width,):
        return None
    probe = torch.ones_like(weight)
    probe[1::2] = -1  # of mean 0 and size 1, which every kind of norm leaves alone but for its scale
    scale = (norm(probe[None])[0] / probe).detach().float()
    return scale if bool(scale.isfinite().all()) else None


@torch.no_grad()
def begin_from_target(drafter: Drafter, target: PreTrainedModel) -> None:
    """Give a new drafter the weights of the last layers of ``target``; what does not fit it stays random."""
    begin_at_head(drafter, target)
    taps, width, count = drafter.config.num_taps, drafter.config.hidden_size, len(drafter.layers)
    shares = torch.tensor([OTHER_TAPS] * (taps - 1) + [LAST_TAP])
    drafter.fc.weight.copy_((shares[:, None, None] * torch.eye(width)).permute(1, 0, 2).flatten(1))
    text, layers = target.config.get_text_config(), list(decoder_layers(target))
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or width // heads
    attentions = [own for layer in layers if (own := Attention.of(layer, head_dim, heads)) is not None]
    mlps = [mlp for layer in layers if (mlp := MLP.of(layer)) is not None]
    drafted: list[Any] = list(drafter.layers)
    for layer, attention in zip(drafted, _last(attentions, count), strict=bool(attentions)):
        layer.input_layernorm.weight.copy_(attention.norm)
        attention.copy_to(layer.self_attn)
    for layer, mlp in zip(drafted, _last(mlps, count), strict=bool(mlps)):
        layer.post_attention_layernorm.weight.copy_(mlp.norm)
        mlp.copy_to(layer.mlp)


def _last(found: Sequence[Part], count: int) -> list[Part]:
    """The last ``count``; of fewer the first as often as it takes."""
    return [*list(found[:1]) * (count - len(found)), *found[-count:]]


@torch.no_grad()
def begin_at_head(drafter: Drafter, target: PreTrainedModel) -> None:
    """Give a new drafter the scale of the target's last norm: its states go through the same head."""
    scale = norm_scale(getattr(target.get_decoder(), "norm", None), len(drafter.norm.weight))
    if scale is not None:
        drafter.norm.weight.copy_(scale)


@torch.no_grad()
def soften(norm: RMSNorm, loss: Callable[[], float]) -> None:
    """Shrink the last ``norm`` to where ``loss`` is least.

    The states of new layers still resemble the embedding of their own token, and with a tied head that token gets a large logit
    for nothing: more loss than from logits that are all alike.
    """
    whole, losses = norm.weight.clone(), dict[float, float]()
    for scale in SCALES:
        norm.weight.copy_(whole * scale)
        losses[scale] = loss()
        if losses[scale] > min(losses.values()):
            break
    norm.weight.copy_(whole * min(losses, key=losses.__getitem__))
