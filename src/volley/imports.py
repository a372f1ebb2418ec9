"""Faster imports: a process that neither compiles nor shards models imports transformers with 140 MiB and two seconds less.

On a CPU half of what transformers imports is PyTorch's compiler, with SymPy, and its sharded tensors. Its import uses them only
for a few decorators and for types in ``isinstance`` checks.
"""

import gc
import sys
from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_STANDS_FOR = (_COMPILER, f"{_COMPILER}._trace_wrapped_higher_order_op")
_DECORATORS = {"disable", "allow_in_graph", "assume_constant_result"}
"""Decorators that only matter to the compiler."""
_CALLED_LATER = {"TransformGetItemToIndex"}


def import_transformers() -> None:
    """Import transformers without PyTorch's compiler and sharded tensors, unless one of them is already imported.

    The compiler still loads when something uses it later. transformers itself can then no longer shard models in this process,
    nor compile a few of its functions. A library must therefore leave this choice to its users: the command line calls it for a
    CPU.
    """
    if _COMPILER in sys.modules or "transformers" in sys.modules:
        return
    with _without_compiler(), _without_sharding(), _read_once():
        from transformers import PreTrainedModel, initialization  # noqa: F401
        from transformers.models.auto import modeling_auto  # noqa: F401


@contextmanager
def quick_imports() -> Iterator[None]:
    """Disable the garbage collector's repeated scans of modules during imports and afterwards.

    That saves a sixth of the import time of PyTorch and transformers.
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
    """Placeholder for a module while transformers is imported; the first unknown name loads the real module."""

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
    """Return a function unchanged, as a decorator with or without options."""
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
    """Make PyTorch look like a build without ``torch.distributed``, which transformers supports."""
    import torch.distributed as dist

    is_available = dist.is_available
    dist.is_available = lambda: False
    try:
        yield
    finally:
        dist.is_available = is_available


@contextmanager
def _read_once() -> Iterator[None]:
    """Give ``transformers.models`` the table of classes that ``transformers`` has made by reading all of its source files.

    It would read them again, for a fifth of the whole import.
    """
    import transformers

    define = None
    with suppress(ImportError, AttributeError):  # a version of transformers that is not known yet
        from transformers.utils import import_utils

        define = import_utils.define_import_structure
    if define is None:
        yield
        return
    models = Path(str(transformers.__file__)).parent / "models"

    def known(path: Any, prefix: str | None = None) -> Any:
        if prefix is not None or Path(path) != models / "__init__.py":
            return define(path, prefix=prefix)
        return {
            needed: {name.removeprefix("models."): own for name, own in of.items() if name.startswith("models.")}
            for needed, of in define(models, prefix="models").items()
        }

    import_utils.define_import_structure = known
    try:
        yield
    finally:
        import_utils.define_import_structure = define
