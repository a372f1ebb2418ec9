"""A CUDA device that is not there: tensors that say they are on it, compute on the CPU, and count what a real one would do.

Inside :func:`pretended_cuda` every operation on such tensors is counted, and so is every time the host would wait for the device:
a value that is read, a copy that is not asynchronous and from pinned memory, an index whose size depends on data. Operations on
tensors of both devices are errors, as on a real one. Triton kernels are counted, and run in the interpreter if that is asked for.

A copy to pinned memory is there once an event recorded behind it has been waited for. Of launches that came after the event the
host knows nothing then, and the device may be at work on these. A CUDA graph is a list of operations with the memory that each
had at its capture: a replay runs these and no Python between them, and counts as one launch. Waits and copies from the host in a
capture are errors.
"""

import importlib
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from volley.memory import kernels
from volley.memory.kernels import launching

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
_COPIES = {"to", "_to_copy"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"}
_SIZED_BY_DATA = {"nonzero", "masked_select", "unique", "_unique2", "unique_consecutive", "unique_dim"}
_FREE = {"detach", "detach_", "lift_fresh", "_unsafe_view", "view", "_reshape_alias"}
SYNCHRONISED = "all work is waited for"
"""The kind of wait of ``torch.cuda.synchronize``."""
EVENT = "an event is waited for"
_UNSET = {"empty", "empty_like", "empty_strided", "new_empty"}
"""Here these make zeros: a kernel that is only counted leaves them as they are."""


@dataclass
class Counts:
    operations: Counter[str] = field(default_factory=Counter)
    """Launches on the device, by operation or kernel."""
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Waits of the host, by kind and place in volley."""
    copies: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Asynchronous copies to the device."""
    replayed: Counter[str] = field(default_factory=Counter)
    """Operations and kernels within graphs that were replayed; :attr:`operations` has ``a graph`` for each replay."""
    launched: int = 0
    finished: int = 0
    """Number of launches that the host knows to be done: those before the one it waited for."""
    left: list[int] = field(default_factory=list)
    """Launches that were unfinished right after each wait: work that the device has meanwhile."""
    compiled: set[tuple[object, ...]] = field(default_factory=set)
    """Kernels that Triton would have compiled so far; :meth:`clear` leaves it."""

    @property
    def unfinished(self) -> int:
        """A GPU may still be at work on so many launches."""
        return self.launched - self.finished

    def clear(self) -> None:
        for counter in (self.operations, self.waits, self.copies, self.replayed):
            counter.clear()
        self.left.clear()


class OnDevice(Tensor):
    """A tensor that says it is on the device; ``inner`` holds its values on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnDevice":
        with torch.inference_mode(False):  # views of it, made in inference mode, must be possible
            made = Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=CUDA,
            )
        made.inner = inner
        return made

    def __init__(self, _: Tensor) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _current().run(operation, args, kwargs or {})

    def __repr__(self) -> str:
        return f"OnDevice({self.inner!r})"

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def contiguous(self, **_: Any) -> "OnDevice":
        if self.inner.is_contiguous():
            return OnDevice(self.inner)
        return OnDevice(_current().do("clone", self.inner.contiguous))

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Any:
        return _current().run(torch.ops.aten.copy_.default, (self, source, non_blocking), {})

    def __invert__(self) -> Any:
        return torch.bitwise_not(self)

    def detach(self) -> "OnDevice":
        return OnDevice(self.inner.detach())

    def tolist(self) -> Any:
        _current().wait("a list is read")
        return self.inner.tolist()

    def __int__(self) -> int:
        _current().wait("a number is read")
        return int(self.inner)

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __getitem__(self, key: Any) -> "OnDevice":
        device, inner = _current(), self.inner
        place_of = device.index(key)
        return OnDevice(device.do("index", lambda: inner[place_of]) if _is_advanced(key) else inner[place_of])

    def __setitem__(self, key: Any, value: Any) -> None:
        device = _current()
        if isinstance(value, Tensor) and not isinstance(value, OnDevice) and value.dim():
            raise RuntimeError(f"values on the CPU are put into a tensor on the device at {place()}")
        inner, place_of = self.inner, device.index(key)
        given = value.inner if isinstance(value, OnDevice) else value
        device.do("index" if _is_advanced(key) else "copy_", lambda: inner.__setitem__(place_of, given))


class PretendedCuda(TorchDispatchMode):
    """Runs operations; made by :func:`pretended_cuda`."""

    def __init__(self, *, runs_kernels: bool) -> None:
        super().__init__()
        self.counts = Counts()
        self._runs_kernels = runs_kernels
        self._pinned: dict[int, Tensor] = {}  # by address, which is kept
        self._graph: list[tuple[str, Callable[[], Any]]] | None = None  # while one is captured
        self._coming: list[
            tuple[int, Callable[[], Any]]
        ] = []  # copies to pinned memory, by the launches before their end

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(operation, args, kwargs or {})

    def wait(self, kind: str, finished: int | None = None) -> None:
        """The host waits until so many launches are done; all of them if nothing is said."""
        counts = self.counts
        if self._graph is not None:
            raise RuntimeError(f"{kind} while a graph is captured, at {place()}")
        counts.waits[kind, place()] += 1
        counts.finished = max(counts.finished, counts.launched if finished is None else finished)
        counts.left.append(counts.unfinished)
        while self._coming and self._coming[0][0] <= counts.finished:
            self._coming.pop(0)[1]()

    def record_event(self) -> Any:
        """In place of ``torch.cuda.Stream.record_event``."""
        recorded = self.counts.launched
        return SimpleNamespace(synchronize=lambda: self.wait(EVENT, recorded))

    def do(self, name: str, operation: Callable[[], Any]) -> Any:
        """Run one operation of the device. A graph that is captured will run it again, and write to the memory of this result."""
        result = operation()
        self.counts.operations[name] += name not in _UNSET
        self.counts.launched += name not in _UNSET
        if self._graph is not None and name not in _UNSET:
            outputs = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]

            def again() -> None:
                found = [x for x in tree_flatten(operation())[0] if isinstance(x, Tensor)]
                for output, own in zip(outputs, found, strict=True):
                    if own is not output:
                        output.copy_(own)

            self._graph.append((name, again))
        return result

    def capture(self, run: Callable[[], object], device: torch.device) -> Callable[[], None]:
        """In place of ``volley.memory.kernels.launching.capture``."""
        assert device.type == "cuda"
        before, self._graph = Counter(self.counts.operations), []
        try:
            run()
        finally:
            graph, self._graph = self._graph, None
            self.counts.operations.clear()
            self.counts.operations.update(before)

        def replay() -> None:
            self.counts.operations["a graph"] += 1
            self.counts.launched += 1
            for name, operation in graph:
                self.counts.replayed[name] += 1
                operation()

        return replay

    def waits(self, run: Callable[[], object], device: torch.device) -> bool:
        """In place of ``volley.memory.kernels.launching.waits``."""
        assert device.type == "cuda"
        before = self.counts.waits.total()
        run()
        return self.counts.waits.total() > before

    def index(self, key: Any) -> Any:
        """The key of an index as the CPU takes it."""
        parts = []
        for part in key if isinstance(key, tuple) else (key,):
            if isinstance(part, OnDevice):
                if part.dtype == torch.bool:
                    self.wait("a boolean index")
                part = part.inner
            elif isinstance(part, list | range) or (isinstance(part, Tensor) and part.dim()):
                self.wait("an index from the CPU")
            parts.append(part)
        return tuple(parts) if isinstance(key, tuple) else parts[0]

    def run(self, operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        flat, spec = tree_flatten((args, kwargs))
        ours = [x for x in flat if isinstance(x, OnDevice)]
        others = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, OnDevice) and x.dim()]
        name = operation._schema.name.partition("::")[2]
        wanted = _device_asked(name, flat, kwargs)
        to_device = wanted is not None and wanted.type == "cuda"
        if name in ("pin_memory", "_pin_memory"):  # needs a real device
            return self._pin(args[0].clone())
        if kwargs.get("pin_memory") and not to_device:
            return self._pin(operation(*args, **{**kwargs, "pin_memory": False}))
        if not ours and not to_device:
            return operation(*args, **kwargs)
        self._check(name, args, kwargs, ours, others, wanted)
        plain = [x.inner if isinstance(x, OnDevice) else CPU if isinstance(x, torch.device) else x for x in flat]
        plain_args, plain_kwargs = tree_unflatten(plain, spec)
        plain_kwargs.pop("pin_memory", None)
        if name == "histc" and not plain_args[0].is_floating_point():  # a CPU counts no integers
            counted, *bins = plain_args
            return OnDevice(self.do(name, lambda: operation(counted.float(), *bins, **plain_kwargs)))
        if name == "copy_" and ours and self._is_pinned(args[0]):
            return self._copy_back(args[0], plain_args[1])
        result = operation(*plain_args, **plain_kwargs) if operation.is_view or name in _FREE else None
        if result is None or not _is_view(result, plain):
            result = self.do(name, lambda: operation(*plain_args, **plain_kwargs))
        if name in _UNSET:
            result.zero_()
        if name in _COPIES and wanted is not None and wanted.type == "cpu":
            return result.clone() if any(result is x.inner for x in ours) else result
        return _returned(result, ours, others)

    def _check(self, name: str, args: Any, kwargs: Any, ours: Any, others: Any, wanted: torch.device | None) -> None:
        """Count what a real device would wait for; refuse what it would refuse."""
        if name in _COPIES and wanted is not None:
            if wanted.type == "cpu":
                self.wait("a copy to the CPU")
            elif others:
                self._copied(bool(kwargs.get("non_blocking")), others)
        elif name == "copy_" and others:
            if isinstance(args[0], OnDevice):
                self._copied(bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2])), others)
            elif not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
                self.wait("a copy to the CPU")
        elif name in _READS:
            self.wait("a value is read")
        elif name in _SIZED_BY_DATA:
            self.wait(name)
        elif name in _INDEXING:
            if not isinstance(args[0], OnDevice):
                raise RuntimeError(f"{name}: a tensor on the CPU is indexed by one on the device at {place()}")
            self.index(tuple(part for part in args[1] if part is not None))
            if any(other is not part for other in others for part in args[2:3]) and args[2:] and args[2] in others:
                raise RuntimeError(f"{name}: values are on the CPU at {place()}")
        elif ours and others:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, at {place()}")

    def _copied(self, asynchronous: bool, sources: list[Tensor]) -> None:
        if self._graph is not None:
            raise RuntimeError(f"a copy from the host while a graph is captured, at {place()}")
        if asynchronous and all(map(self._is_pinned, sources)):
            self.counts.copies["a copy to the device", place()] += 1
        else:
            self.wait("a copy to the device")

    def _pin(self, values: Tensor) -> Tensor:
        self._pinned[values.untyped_storage().data_ptr()] = values
        return values

    def _is_pinned(self, values: Tensor) -> bool:
        return not isinstance(values, OnDevice) and values.untyped_storage().data_ptr() in self._pinned

    def _copy_back(self, pinned: Tensor, values: Tensor) -> Tensor:
        """The device begins a copy to the host, whose memory holds something else until that is done."""
        pinned.zero_()
        taken = self.do("copy_", values.clone)
        self._coming.append((self.counts.launched, lambda: pinned.copy_(taken)))
        return pinned

    def launch(self, kernel: Any, grid: tuple[int, ...], device: torch.device, *given: Any, **constants: Any) -> None:
        """In place of ``volley.memory.kernels.launching.launch``."""
        assert device.type == "cuda", f"a kernel is launched for {device} at {place()}"
        if any(isinstance(x, Tensor) and not isinstance(x, OnDevice) for x in given):
            raise ValueError(f"Pointer argument cannot be accessed from Triton (cpu tensor?) at {place()}")
        plain = [x.inner if isinstance(x, OnDevice) else x for x in given]
        self.counts.compiled.add(_specialised(kernel, plain, constants))
        self.do(kernel.fn.__name__, lambda: kernel[grid](*plain, **constants) if self._runs_kernels else None)


def _specialised(kernel: Any, given: list[Any], constants: dict[str, Any]) -> tuple[object, ...]:
    """Return all that Triton compiles a kernel anew for: constants, types, numbers that are 1 or multiples of 16, alignment."""
    spared = getattr(kernel, "do_not_specialize", None) or getattr(kernel, "kwargs", {}).get("do_not_specialize") or ()
    kinds = list[object]()
    for name, value in zip(kernel.arg_names, given, strict=False):
        if isinstance(value, Tensor):
            kinds.append((value.dtype, value.data_ptr() % 16 == 0))
        elif isinstance(value, int):
            kinds.append((value.bit_length() < 32, *(() if name in spared else (value == 1, value % 16 == 0))))
        else:
            kinds.append(type(value))
    return (kernel.fn.__name__, *kinds, *sorted(constants.items()))


def _is_view(result: Any, given: list[Any]) -> bool:
    """Return whether a result is memory that an operation was given: ``to`` and ``reshape`` may copy."""
    ours = {x.untyped_storage().data_ptr() for x in given if isinstance(x, Tensor)}
    return all(x.untyped_storage().data_ptr() in ours for x in tree_flatten(result)[0] if isinstance(x, Tensor))


def _returned(result: Any, ours: list[OnDevice], others: list[Tensor]) -> Any:
    """Return an operation's result, on the device; an operation in place returns the tensor it was given."""
    known: dict[int, Tensor] = {id(x.inner): x for x in ours}
    copied = {id(x) for x in others}

    def wrap(x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, OnDevice):
            return x
        return known.get(id(x)) if id(x) in known else OnDevice(x.clone() if id(x) in copied else x)

    return tree_map(wrap, result)


def _device_asked(name: str, flat: list[Any], kwargs: dict[str, Any]) -> torch.device | None:
    asked = kwargs.get("device")
    if asked is None and name == "to":
        asked = next((x for x in flat if isinstance(x, torch.device)), None)
        tensors = [x for x in flat if isinstance(x, Tensor)]
        asked = tensors[1].device if asked is None and len(tensors) > 1 else asked
    return None if asked is None else torch.device(asked)


def _is_advanced(key: Any) -> bool:
    return any(isinstance(part, Tensor | list | range) for part in (key if isinstance(key, tuple) else (key,)))


def place() -> str:
    """Return the line of volley at which the host is, or from which it called something else."""
    frames = [frame for frame in traceback.extract_stack() if "pretended_gpu" not in frame.filename]
    for part in ("/volley/", "/transformers/"):
        for frame in reversed(frames):
            if part in frame.filename:
                return f"{frame.filename.rpartition(part)[2]}:{frame.lineno}"
    return "elsewhere"


_running: list[PretendedCuda] = []


def _current() -> PretendedCuda:
    assert _running, "tensors of a pretended device are used inside pretended_cuda() only"
    return _running[-1]


def move(module: nn.Module) -> nn.Module:
    """All tensors of a module to the device."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                part._parameters[name] = nn.Parameter(OnDevice(weight.data), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = OnDevice(buffer)
        for name, value in list(vars(part).items()):
            if isinstance(value, Tensor) and not isinstance(value, OnDevice):
                setattr(part, name, OnDevice(value))
    return module


@contextmanager
def pretended_cuda(free_bytes: int = 2**28, *, runs_kernels: bool = False) -> Iterator[Counts]:
    """The device is there inside. It ``runs_kernels`` in Triton's interpreter, or counts them and leaves what they write zero."""
    device = PretendedCuda(runs_kernels=runs_kernels)
    facts = SimpleNamespace(name="pretended", multi_processor_count=132)
    answers: dict[str, Callable[..., Any]] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "empty_cache": lambda: None,
        "get_device_properties": lambda *_: facts,
        "get_device_capability": lambda *_: (9, 0),
        "mem_get_info": lambda *_: (free_bytes, 2 * free_bytes),
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "synchronize": lambda *_: device.wait(SYNCHRONISED),
        "current_stream": lambda *_: SimpleNamespace(record_event=device.record_event),
    }
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with ExitStack() as stack:
            for name, answer in answers.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, answer))
            for name in ("attention", "inject", "noise", "rows"):
                importlib.import_module(f"{kernels.__name__}.{name}")
            real = launching.launch
            for name, module in list(sys.modules.items()):
                if name.startswith(kernels.__name__ + ".") and getattr(module, "launch", None) is real:
                    stack.enter_context(mock.patch.object(module, "launch", device.launch))
            stack.enter_context(mock.patch.object(launching, "capture", device.capture))
            stack.enter_context(mock.patch.object(launching, "waits", device.waits))
            _running.append(device)
            stack.callback(_running.pop)
            stack.enter_context(device)
            yield device.counts
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
