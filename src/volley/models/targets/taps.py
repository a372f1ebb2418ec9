"""Tap the hidden states of chosen decoder layers with forward hooks, keeping nothing else."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from volley.errors import UnsupportedModelError


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers of a causal LM, first to last."""
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of decoder layers to tap; volley needs a decoder with `.layers`. "
            "Use another target"
        )
    return layers


class Taps:
    """Hooks that collect the output of each layer in ``layer_ids`` (-1: the input of the first) during a forward pass.

    The hooks fire until :meth:`close`, or until the end of a ``with`` block. :meth:`take` returns the states of the last forward
    pass, ``[..., len(layer_ids) · H]`` in the order of ``layer_ids``, and clears them.
    """

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        layers = decoder_layers(model)
        self.layer_ids = tuple(layer_ids)
        self._states: dict[int, Tensor] = {}
        self._left: Tensor | None = None
        self._handles = [
            layers[0].register_forward_pre_hook(self._input_hook, with_kwargs=True)
            if index == -1
            else layers[index].register_forward_hook(self._output_hook(index))
            for index in set(self.layer_ids)
        ]

    def _input_hook(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._states[-1] = args[0] if args else kwargs["hidden_states"]

    def _output_hook(self, index: int) -> Any:
        def keep(_: nn.Module, __: Any, output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else output
            if states.dim() > 3:
                raise UnsupportedModelError(
                    "a layer of this target has several streams of states (Gemma 3n), so no drafter can read them; leave "
                    "the drafter out; volley then drafts by prompt lookup"
                )
            self._states[index] = states

        return keep

    def leave(self, features: Tensor) -> None:
        """Set the states ``[T, len(layer_ids) · H]`` after a forward pass that runs all layers in one call, without hooks."""
        self._left = features[None]

    def take(self) -> Tensor:
        """Return the states of the last forward pass, ``[..., len(layer_ids) · H]``, and clear them."""
        states = [self._states[index] for index in self.layer_ids] if self._left is None else []
        features = torch.cat(states, dim=-1) if self._left is None else self._left
        self.clear()
        return features

    def clear(self) -> None:
        """Forget the states of the last forward pass."""
        self._left, self._states = None, {}

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()
