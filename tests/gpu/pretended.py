"""A CUDA device that is not there: its tensors compute on the CPU, and it is noted what a GPU would wait for.

A use of tensors of both devices that CUDA refuses is an error here too. What makes the host wait (a value read, a copy
that is not asynchronous) is noted with its place. Triton kernels run in the interpreter and refuse tensors of the host.
"""

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from volley.memory.kernels import launching

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
_COPIES = {"_to_copy", "to", "copy_"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_READS = {"_local_scalar_dense", "is_nonzero", "item", "equal", "allclose"}
_COUNTS = {"nonzero", "masked_select", "unique", "_unique2", "unique_consecutive"}


class Notes:
    """What was seen since the last :meth:`clear`."""

    def __init__(self) -> None:
        self.waits: Counter[tuple[str, str]] = Counter()
        """Kinds and places."""
        self.copies = 0
        """Asynchronous ones from the host."""
        self.launches: Counter[str] = Counter()

    def wait(self, kind: str) -> None:
        self.waits[kind, _place()] += 1

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]


NOTES = Notes()


def _place() -> str:
    frames = [f for f in reversed(traceback.extract_stack(limit=80)) if __file__ not in f.filename]
    for package in ("/volley/", "/transformers/"):
        for frame in frames:
            if package in frame.filename:
                return f"{frame.filename.split(package)[-1]}:{frame.lineno}"
    return "?"


class Pretended(Tensor):
    """A tensor of the pretended device; ``inner`` has its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Pretended":
        with torch.inference_mode(False):  # views of it, made within inference mode, must be possible
            made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=CUDA,
                requires_grad=False,
            )
        made.inner = inner
        return made  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Pretended({self.inner!r})"

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.inner.nbytes

    def contiguous(self, **_: Any) -> "Pretended":  # type: ignore[override]
        return Pretended(self.inner.contiguous())

    def detach(self) -> "Pretended":
        return Pretended(self.inner.detach())

    def tolist(self) -> Any:
        NOTES.wait("read")
        return self.inner.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __getitem__(self, key: Any) -> "Pretended":
        return Pretended(self.inner[_on_host(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, Tensor) and not isinstance(value, Pretended) and value.dim():
            if any(isinstance(part, Tensor | list | range) for part in _parts(key)):
                raise RuntimeError(f"index_put_: values are on the host, at {_place()}")
            NOTES.wait("copy to the device")
        self.inner[_on_host(key)] = value.inner if isinstance(value, Pretended) else value

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


class _Device(TorchDispatchMode):
    """Tensors that are made on the device, or copied to it, are pretended ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


def _parts(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def _on_host(key: Any) -> Any:
    """The key of an indexing without pretended tensors."""
    parts = []
    for part in _parts(key):
        if isinstance(part, Tensor | list | range):
            _note_index(part)
        parts.append(part.inner if isinstance(part, Pretended) else part)
    return tuple(parts) if isinstance(key, tuple) else parts[0]


def _note_index(index: Any) -> None:
    if not isinstance(index, Pretended):
        if not isinstance(index, Tensor) or index.dim():
            NOTES.wait("index from the host")
    elif index.dtype == torch.bool:
        NOTES.wait("boolean index")


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    flat, spec = tree_flatten((args, kwargs))
    ours = [x for x in flat if isinstance(x, Pretended)]
    theirs = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, Pretended) and x.dim()]
    name: str = func._schema.name.split("::")[1]
    device = kwargs.get("device")
    if not ours and (device is None or torch.device(device).type != "cuda"):
        return func(*args, **kwargs)
    goes_to = torch.device(device).type if device is not None else "cuda"
    _check(name, ours, theirs, args, kwargs, goes_to)
    inner = [x.inner if isinstance(x, Pretended) else CPU if isinstance(x, torch.device) else x for x in flat]
    args, kwargs = tree_unflatten(inner, spec)
    if device is not None:
        kwargs = {**kwargs, "device": CPU}
    output = func(*args, **kwargs)
    if goes_to == "cpu":
        return output
    same = {id(x.inner): x for x in ours}
    return tree_map_only(Tensor, lambda x: same[id(x)] if id(x) in same else Pretended(x), output)


def _check(name: str, ours: list[Pretended], theirs: list[Tensor], args: Any, kwargs: Any, goes_to: str) -> None:
    """Refuse what CUDA refuses; note what waits."""
    if name in _COPIES:
        if goes_to == "cpu" or (name == "copy_" and not isinstance(args[0], Pretended)):
            NOTES.wait("copy to the host")
        elif theirs:
            is_asynchronous = kwargs.get("non_blocking") and all(id(x) in _PINNED for x in theirs)
            if is_asynchronous:
                NOTES.copies += 1
            else:
                NOTES.wait("copy to the device")
    elif name in _INDEXING:
        if not isinstance(args[0], Pretended):
            raise RuntimeError(f"{name}: indices are on the device, the tensor is not, at {_place()}")
        for index in args[1]:
            if index is not None:
                _note_index(index)
        if any(all(x is not index for index in args[1]) for x in theirs):
            raise RuntimeError(f"{name}: values are on the host, at {_place()}")
    elif name in _READS:
        NOTES.wait("read")
    elif name in _COUNTS:
        NOTES.wait("count")
    elif ours and theirs:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, at {_place()}")


_PINNED: dict[int, Tensor] = {}


def _pin(tensor: Tensor) -> Tensor:
    pinned = tensor.clone()
    _PINNED[id(pinned)] = pinned
    return pinned


def _launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any) -> None:
    assert device == CUDA
    NOTES.launches[kernel.fn.__name__] += 1
    for argument in arguments:
        if isinstance(argument, Tensor) and not isinstance(argument, Pretended):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
    kernel[grid](*(x.inner if isinstance(x, Pretended) else x for x in arguments), **constants)


@contextmanager
def pretended_cuda() -> Iterator[Notes]:
    """Let ``cuda:0`` be there, and say what is seen of it."""
    torch._C._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch, _Device():
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="pretended"))
        patch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 2**30))
        patch.setattr(Tensor, "pin_memory", _pin)
        patch.setattr(launching, "launch", _launch)
        patch.setattr(launching, "num_processors", lambda _: 132)
        NOTES.clear()
        try:
            yield NOTES
        finally:
            _PINNED.clear()
            torch._C._set_only_lift_cpu_tensors(False)  # type: ignore[attr-defined]


def move(module: nn.Module) -> nn.Module:
    """Parameters, buffers and other tensors of ``module`` on the pretended device."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                part._parameters[name] = nn.Parameter(Pretended(weight.data), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = Pretended(buffer)
        for name, value in list(vars(part).items()):
            if isinstance(value, Tensor):
                setattr(part, name, Pretended(value))
    return module
