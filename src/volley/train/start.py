"""What a new drafter begins with: the target's layers behind the first tap, and the scale of its last norm."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from volley.models.drafters.drafter import Drafter, RMSNorm
from volley.models.targets.taps import decoder_layers

OTHER_TAPS = 0.3
"""Times their random weights, what the other taps begin with beside the first."""
OTHER_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
"""Layers with one of these have norms behind their attention as well, which a draft layer has not."""


@torch.no_grad()
def start_at_target(drafter: Drafter, target: PreTrainedModel) -> None:
    """Give a new drafter what it can take over from its target.

    Its states go through the same head, so its last norm has the same scale. Where the target's layers are of a draft layer's
    kind and shape, draft layer i begins as the one i + 1 behind the first tap, and what is injected as that tap's states: so
    its keys, values and queries know how to read a text before anything is learnt.
    """
    norm = getattr(target.get_decoder(), "norm", None)
    if isinstance(norm, nn.Module):
        _copy_scale(drafter.norm, norm)
    first = min(drafter.config.target_layer_ids)
    sources = list(decoder_layers(target))[first + 1 :][: len(drafter.layers)]
    if len(sources) < len(drafter.layers):
        return
    pairs = [_matching(own, source) for own, source in zip(drafter.layers, sources, strict=True)]
    if not all(pairs):
        return
    for own, theirs in (pair for layer in pairs for pair in layer):
        if isinstance(own, RMSNorm):
            _copy_scale(own, theirs)
        else:
            own.weight.copy_(theirs.weight)  # type: ignore[operator, arg-type, union-attr]
    _inject(drafter, first, sources[0].input_layernorm)  # type: ignore[arg-type]


def _matching(own: nn.Module, source: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """The modules of a draft layer, each with the target's; none where one is missing or of another shape."""
    if any(hasattr(source, name) for name in OTHER_NORMS):
        return []
    theirs, pairs = dict(source.named_modules()), []
    for name, module in own.named_modules():
        shapes = dict(_shapes(module))
        if shapes:
            if name not in theirs or dict(_shapes(theirs[name])) != shapes:
                return []
            pairs.append((module, theirs[name]))
    return pairs


def _shapes(module: nn.Module) -> Iterator[tuple[str, torch.Size]]:
    """Of its own parameters."""
    for name, parameter in module.named_parameters(recurse=False):
        yield name, parameter.shape


def _inject(drafter: Drafter, tap: int, norm: nn.Module) -> None:
    """Let the injected features begin as the states of ``tap``, normed as the layer behind it norms them."""
    width = drafter.config.hidden_size
    place = drafter.config.target_layer_ids.index(tap) * width
    weight: Tensor = drafter.fc.weight
    if weight.shape[1] != width * len(drafter.config.target_layer_ids):
        return
    weight.mul_(OTHER_TAPS)
    weight[:, place : place + width].diagonal().add_(1.0)
    _copy_scale(drafter.hidden_norm, norm)


def _copy_scale(own: RMSNorm, norm: nn.Module) -> None:
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.shape != own.weight.shape:
        return
    probe = torch.ones_like(weight)
    probe[1::2] = -1  # of mean 0 and size 1, which every kind of norm leaves alone but for its scale
    scale = (norm(probe[None])[0] / probe).float()
    if bool(scale.isfinite().all()):
        own.weight.copy_(scale)
