"""Models without memory for their weights, which are assigned later."""

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
def unfilled() -> Iterator[None]:
    """Parameters of modules that this thread makes inside are on the meta device, and tied to no other; buffers are real.

    Made under ``torch.device("meta")`` instead buffers would have to be made again, and operations that PyTorch computes there in
    Python import its compiler, with 70 MiB. transformers' ``no_init_weights`` would leave a process without initial values for
    good when two threads are in it at once.
    """
    _watch_parameters()
    before = getattr(_state, "unfilled", False)
    _state.unfilled = True
    try:
        with _NothingToFill():
            yield
    finally:
        _state.unfilled = before


@cache
def _watch_parameters() -> None:
    """Once and for good: other threads may be going over the hooks."""
    register_module_parameter_registration_hook(_emptied)  # type: ignore[arg-type]


def _emptied(_: nn.Module, __: str, own: nn.Parameter) -> nn.Parameter | None:
    if own.is_meta or not getattr(_state, "unfilled", False):
        return None
    return nn.Parameter(torch.empty(own.shape, dtype=own.dtype, device="meta"), own.requires_grad)


class _NothingToFill(TorchFunctionMode):
    """Operations in place leave a tensor without memory as it is. PyTorch keeps such a mode to one thread."""

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
