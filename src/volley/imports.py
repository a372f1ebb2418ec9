"""Quick imports. transformers for a process that neither compiles models nor divides them takes 140 MiB and two seconds less.

On a CPU half of what transformers imports is PyTorch's compiler, with SymPy, and its sharded tensors. It uses them while it is
imported for a few decorators and for types that are asked for with ``isinstance``.
"""

import gc
import sys
from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_STANDS_FOR = (_COMPILER, f"{_COMPILER}._trace_wrapped_higher_order_op")
_DECORATORS = {"disable", "allow_in_graph", "assume_constant_result"}
"""What they say to the compiler matters to no one else."""
_CALLED_LATER = {"TransformGetItemToIndex"}


def import_transformers() -> None:
    """Import transformers without PyTorch's compiler and sharded tensors, unless one of them is imported already.

    Whoever wants the compiler later gets it. transformers itself cannot divide models in this process any more, nor compile a
    few functions of its own, so a library must leave this to its users: the command line calls it for a CPU.
    """
    if _COMPILER in sys.modules or "transformers" in sys.modules:
        return
    with _without_compiler(), _without_sharding():
        from transformers import PreTrainedModel, initialization  # noqa: F401
        from transformers.models.auto import modeling_auto  # noqa: F401


@contextmanager
def quick_imports() -> Iterator[None]:
    """Keep the garbage collector from looking through all modules again and again while they are imported, and afterwards.

    That saves a sixth of the time of importing PyTorch and transformers.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _StandIn(ModuleType):
    """Stands for a module while transformers is imported; the first name it does not know brings the module itself."""

    __path__: MutableSequence[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _DECORATORS:
            return _unchanged
        if name not in _CALLED_LATER:
            _step_aside()
            return getattr(import_module(self.__name__), name)
        return lambda *args, **options: getattr(import_module(self.__name__), name)(*args, **options)


def _unchanged(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """A decorator that leaves a function as it is, with options or without."""
    return function or _unchanged


@contextmanager
def _without_compiler() -> Iterator[None]:
    sys.modules.update((name, _StandIn(name)) for name in _STANDS_FOR)
    try:
        yield
    finally:
        _step_aside()


def _step_aside() -> None:
    import torch

    for name in _STANDS_FOR:
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]
    if isinstance(vars(torch).get("_dynamo"), _StandIn):
        del torch._dynamo


@contextmanager
def _without_sharding() -> Iterator[None]:
    """As in builds of PyTorch that have no ``torch.distributed``, which transformers knows."""
    import torch.distributed as dist

    is_available = dist.is_available
    dist.is_available = lambda: False
    try:
        yield
    finally:
        dist.is_available = is_available
