"""Construction of models without memory for their weights, which are assigned later."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

_state = local()


@contextmanager
def empty_weights() -> Iterator[None]:
    """Put the parameters of modules that this thread makes in the body on the meta device, untied; buffers are real.

    With ``torch.device("meta")`` buffers would have to be made again, and some operations would import PyTorch's compiler, with
    70 MiB. transformers' ``no_init_weights`` disables initialisation in the process for good if two threads use it at once.
    """
    _watch_parameters()
    before = getattr(_state, "is_active", False)
    _state.is_active = True
    try:
        with _NothingToFill():
            yield
    finally:
        _state.is_active = before


@cache
def _watch_parameters() -> None:
    """Register the hook once for the whole process, because other threads may be iterating over the hooks."""
    register_module_parameter_registration_hook(_emptied)  # type: ignore[arg-type]


def _emptied(_: nn.Module, __: str, own: nn.Parameter) -> nn.Parameter | None:
    if own.is_meta or not getattr(_state, "is_active", False):
        return None
    return nn.Parameter(torch.empty(own.shape, dtype=own.dtype, device="meta"), own.requires_grad)


class _NothingToFill(TorchFunctionMode):
    """Mode of one thread in which in-place operations leave a tensor without memory unchanged."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        first = args[0] if args else named.get("tensor")
        name = function.__name__
        if name.endswith("_") and not name.endswith("__") and isinstance(first, Tensor) and first.is_meta:
            return first
        return function(*args, **named)
