"""Store K and V for every layer of one model and every slot of a pool, in the model's dtype or quantised.

Attention reads only stored K/V, even a token's own. So with a quantised store, too, a token's result does not depend on
whether it was computed alone, in a block or in a prompt chunk.
"""

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, get_args

import torch
from torch import Tensor

from volley.config import KVDtype
from volley.errors import unknown_key
from volley.memory.kv_cache import BlockTable
from volley.memory.quantise import SCALE_DTYPE, Codec, Int8Codec, RotatedInt4Codec

_PRIVATE: dict[str, Any] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
_CODECS: dict[str, type[Codec]] = {"int8": Int8Codec, "int4": RotatedInt4Codec}


class LatentShape(tuple[int, int]):
    """Shape ``(kv_heads, head_dim)`` of a layer whose values are its keys."""

    __slots__ = ()


class KVStore(ABC):
    """K and V of one model: per layer ``[slots, kv_heads, head_dim]``, sizes may differ by layer.

    A store may keep vectors in a rotated basis. :meth:`read` returns them in that basis, :meth:`rotate` takes queries into it
    and :meth:`unrotate` takes outputs back. :meth:`extract` returns vectors in the model's basis.
    """

    def __init__(self) -> None:
        self.on_move: list[Callable[[Tensor, Tensor], None]] = []
        """Called with the arguments of :meth:`move`, because other processes hold other heads of the same K/V."""

    @abstractmethod
    def write(self, layer: int, slots: slice | Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``keys`` and ``values`` ``[T, kv_heads, head_dim]``."""

    @abstractmethod
    def write_layers(self, slots: slice | Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``keys`` and ``values`` ``[layers, T, kv_heads, head_dim]`` of all layers, which have one shape."""

    @abstractmethod
    def read(self, layer: int, slots: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V ``[n, kv_heads, head_dim]`` in the store's basis. They may be views: read them before the next write."""

    @abstractmethod
    def _tensors(self) -> list[tuple[Tensor, int]]:
        """Return all stored tensors, each with its slot dimension."""

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy every layer's stored K and V from slots ``source [n]`` to ``target [n]``; these may overlap."""
        for listener in self.on_move:
            listener(source, target)
        for cache, slots in self._tensors():
            cache.index_copy_(slots, target, cache.index_select(slots, source))

    @property
    def num_slots(self) -> int:
        cache, slots = self._tensors()[0]
        return cache.shape[slots]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor, _ in self._tensors())

    def rotate(self, layer: int, x: Tensor) -> Tensor:
        """Return vectors ``[..., head_dim]`` in the basis of :meth:`read`."""
        return x

    def unrotate(self, layer: int, x: Tensor) -> Tensor:
        """Return vectors ``[..., head_dim]`` in the model's basis, from the basis of :meth:`read`."""
        return x

    def extract(self, layer: int, table: BlockTable, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return contiguous K and V ``[end − start, kv_heads, head_dim]`` of positions ``[start, end)``, in the model's basis."""
        slots = table.slots(start, end)
        slots = slots.to(self._tensors()[0][0].device) if isinstance(slots, Tensor) else slots
        keys, values = (self.unrotate(layer, x) for x in self.read(layer, slots))
        return keys.contiguous(), values.contiguous()


class DenseKVStore(KVStore):
    """K and V in the model's dtype."""

    def __init__(
        self, shapes: Sequence[tuple[int, int]], num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        sizes = [(num_slots, *shape) for shape in shapes]
        self.keys, self.all_keys = _allocate(sizes, dtype, device)
        self.values, self.all_values = self.keys, self.all_keys
        self.are_one = all(isinstance(shape, LatentShape) for shape in shapes)
        """True if the values are the keys, and stored once."""
        if not self.are_one:
            self.values, self.all_values = _allocate(sizes, dtype, device)

    def write(self, layer: int, slots: slice | Tensor, keys: Tensor, values: Tensor) -> None:
        self.keys[layer][slots] = keys
        if not self.are_one:
            self.values[layer][slots] = values

    def write_layers(self, slots: slice | Tensor, keys: Tensor, values: Tensor) -> None:
        _stacked(self.all_keys)[:, slots] = keys
        _stacked(self.all_values)[:, slots] = values

    def read(self, layer: int, slots: slice | Tensor) -> tuple[Tensor, Tensor]:
        return _rows(self.keys[layer], slots), _rows(self.values[layer], slots)

    def _tensors(self) -> list[tuple[Tensor, int]]:
        keys = _whole(self.keys, self.all_keys)
        return keys if self.are_one else keys + _whole(self.values, self.all_values)


class QuantisedKVStore(KVStore):
    """Quantised K and V side by side ``[slots, 2, kv_heads, width]``, with their scales ``[slots, 2, kv_heads, 1]``."""

    def __init__(
        self,
        codec: type[Codec],
        shapes: Sequence[tuple[int, int]],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        by_size = {dim: codec(dim, dtype, device) for _, dim in shapes}
        self.codecs = [by_size[dim] for _, dim in shapes]
        sizes = [(num_slots, 2, heads, by_size[dim].width) for heads, dim in shapes]
        self.codes, self.all_codes = _allocate(sizes, codec.code_dtype, device)
        self.scales, self.all_scales = _allocate([(*size[:-1], 1) for size in sizes], SCALE_DTYPE, device)

    def write(self, layer: int, slots: slice | Tensor, keys: Tensor, values: Tensor) -> None:
        self.codes[layer][slots], self.scales[layer][slots] = self.codecs[layer].encode(torch.stack((keys, values), 1))

    def write_layers(self, slots: slice | Tensor, keys: Tensor, values: Tensor) -> None:
        codes, scales = _stacked(self.all_codes), _stacked(self.all_scales)
        codes[:, slots], scales[:, slots] = self.codecs[0].encode(torch.stack((keys, values), 2))

    def read(self, layer: int, slots: slice | Tensor) -> tuple[Tensor, Tensor]:
        both = self.codecs[layer].decode(_rows(self.codes[layer], slots), _rows(self.scales[layer], slots))
        return both[:, 0], both[:, 1]

    def rotate(self, layer: int, x: Tensor) -> Tensor:
        rotation = self.codecs[layer].rotation
        return x if rotation is None else (x.float() @ rotation).to(x.dtype)

    def unrotate(self, layer: int, x: Tensor) -> Tensor:
        rotation = self.codecs[layer].rotation
        return x if rotation is None else (x.float() @ rotation.T).to(x.dtype)

    def _tensors(self) -> list[tuple[Tensor, int]]:
        return _whole(self.codes, self.all_codes) + _whole(self.scales, self.all_scales)


def make_store(
    kv_dtype: KVDtype, shapes: Sequence[tuple[int, int]], num_slots: int, dtype: torch.dtype, device: torch.device
) -> KVStore:
    """Make a store of ``num_slots`` slots for layers of ``shapes`` (kv_heads, head_dim), read in ``dtype``."""
    if kv_dtype == "auto":
        return DenseKVStore(shapes, num_slots, dtype, device)
    if kv_dtype not in _CODECS:
        raise unknown_key("kind of K/V", kv_dtype, get_args(KVDtype))
    return QuantisedKVStore(_CODECS[kv_dtype], shapes, num_slots, dtype, device)


def bytes_per_token(kv_dtype: KVDtype, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> int:
    """Return the bytes of one slot of the store that :func:`make_store` makes."""
    return make_store(kv_dtype, shapes, 1, dtype, torch.device("cpu")).nbytes


def _allocate(
    sizes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], Tensor | None]:
    """Allocate a tensor for every layer. If all have one size, they are views of one tensor, the second result."""
    if len(set(sizes)) > 1:
        return [_zeros(size, dtype, device) for size in sizes], None
    stacked = _zeros((len(sizes), *sizes[0]), dtype, device)
    return list(stacked.unbind()), stacked


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On a CPU they use memory only once written; torch would write them all, and numpy asks for huge pages."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, prod(size) * dtype.itemsize, **_PRIVATE), dtype=dtype).view(size)


def _whole(layers: list[Tensor], stacked: Tensor | None) -> list[tuple[Tensor, int]]:
    """Return the stored tensors, each with its slot dimension: one for all layers if they are stacked, else one per layer."""
    return [(layer, 0) for layer in layers] if stacked is None else [(stacked, 1)]


def _stacked(every: Tensor | None) -> Tensor:
    assert every is not None, "layers of several shapes are written one by one"
    return every


def _rows(cache: Tensor, slots: slice | Tensor) -> Tensor:
    """Return rows ``slots`` of a tensor: a view for a slice, else ``index_select``, on a CPU seven times as fast as indexing."""
    return cache[slots] if isinstance(slots, slice) else cache.index_select(0, slots)
