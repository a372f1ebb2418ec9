"""Opened GGUF file: its metadata, and its tensors, decoded or block by block.

The package ``gguf`` decodes every type. volley's library, if it was built, decodes the usual ones much faster. Shapes are
PyTorch's, ``[out, in]``. Only what makes tensors imports PyTorch.
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from volley.errors import CheckpointError, UnsupportedModelError
from volley.models.gguf.header import (
    MAGIC,
    READ_TYPES,
    Header,
    TensorPlace,
    find_strings,
    gguf_package,
    read_header,
    read_strings,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_TOKENS = "tokenizer.ggml.tokens"
_INTEGERS = {"I8", "I16", "I32", "I64"}
_PLAIN = {"F32", "F16", "BF16", *_INTEGERS}
YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}
"""Keys below ``rope.scaling``, by transformers' names."""
UNREAD_SCALING: dict[str, tuple[float, ...]] = {
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.alpha": (0.0, 1.0),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Keys that volley does not read, with their neutral values."""
_DECODED_AT_ONCE = 2**20  # numbers of a tensor

Rows = Callable[[NDArray[Any]], NDArray[Any]]
"""Put the rows of a matrix in another order; columns may be numbers or the bytes of blocks."""


def is_gguf(path: str | Path) -> bool:
    """Return whether ``path`` names a GGUF file: by its ending, or by its first bytes."""
    path = Path(path)
    if path.suffix == ".gguf":
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@lru_cache(maxsize=8)
def _known_header(path: Path, _size: int, _changed: int) -> Header:
    """Cache a file's header, because a load opens its file several times."""
    return read_header(path)


def _header(path: Path) -> Header:
    _check_magic(path)
    stat = path.stat()
    return _known_header(path.absolute(), stat.st_size, stat.st_mtime_ns)


def _parts(path: Path) -> list[Path]:
    """Return the files of the model that ``path`` belongs to, in order; llama.cpp splits a model into several."""
    number = int(_header(path).metadata.get("split.count", 1))
    if number < 2:
        return [path]
    named = _PART.fullmatch(path.name)
    if named is None or int(named[3]) != number:
        raise CheckpointError(
            f"{path} is one of {number} parts of a model, which are found by their names; give it back the name that ends in "
            f"-00001-of-{number:05}.gguf, as llama.cpp writes it"
        )
    parts = [path.with_name(f"{named[1]}-{part:05}-of-{number:05}.gguf") for part in range(1, number + 1)]
    if missing := [part.name for part in parts if not part.exists()]:
        raise CheckpointError(
            f"{path} is one of {number} parts of a model, and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
            "beside it; fetch every part into one folder"
        )
    return parts


class GGUFFile:
    """Model in one file, or in several parts; tensors are read from disk on demand."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._package = gguf_package()
        parts = _parts(self.path)
        headers = [_header(part) for part in parts]
        self.metadata, self._strings = headers[0].metadata, headers[0].strings
        """``metadata`` has no arrays of strings (:meth:`strings`)."""
        self._mapped = [np.memmap(part, np.uint8, "r") for part in parts]
        self._first = parts[0]
        self._tensors = {name: one for header in headers for name, one in header.tensors.items()}
        self._part_of = {name: part for part, header in enumerate(headers) for name in header.tensors}
        if len(self._tensors) < sum(len(header.tensors) for header in headers):
            raise CheckpointError(f"{self.path}: two parts hold the same tensor; fetch or convert them again")
        self._read = set[str]()

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "not named"))

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def of_layer(self, layer: int) -> list[str]:
        """Names of a layer's tensors."""
        return [name for name in self._tensors if name.startswith(f"blk.{layer}.")]

    @property
    def num_tokens(self) -> int:
        return self._strings[_TOKENS].number if _TOKENS in self._strings else 0

    def strings(self, key: str) -> list[str]:
        """Read the strings of an array; they are not cached."""
        return read_strings(self._first, self._mapped[0].data, self._strings[key])

    def find_strings(self, key: str, texts: Iterable[str]) -> dict[int, str]:
        """Return those of ``texts`` that are in an array, by their indices."""
        return find_strings(self._first, self._mapped[0].data, self._strings[key], texts)

    @property
    def string_keys(self) -> list[str]:
        """Keys that :meth:`strings` accepts."""
        return list(self._strings)

    @property
    def has_tokenizer(self) -> bool:
        return self.num_tokens > 0 and "tokenizer.ggml.model" in self.metadata

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of ``{architecture}.{key}``."""
        self._read.add(key)
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: int | None = None) -> int:
        """Number under a key; if the file gives one for each layer, all must be equal."""
        value = self.require(key) if default is None else self.get(key, default)
        values = {*value} if isinstance(value, list) else {value}
        if len(values) != 1:
            raise UnsupportedModelError(
                f"{self.path}: {key} differs between layers ({value}), which is not supported. "
                "Give the model's Hugging Face folder instead"
            )
        return int(values.pop())

    def unread_keys(self) -> list[str]:
        """Keys of the architecture that :meth:`get` has not read."""
        start = f"{self.architecture}."
        keys = [key.removeprefix(start) for key in self.metadata if key.startswith(start)]
        return [key for key in keys if key not in self._read]

    def require(self, key: str) -> Any:
        """Return the value of ``{architecture}.{key}``. Raise an error if there is none."""
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.path} has no key {self.architecture}.{key}; fetch or convert it again")
        return value

    def refuse_unless_neutral(self, keys: Mapping[str, Container[Any]], remedy: str) -> None:
        """Refuse a file in which one of ``keys`` has a value that is not neutral."""
        for key, neutral in keys.items():
            value = self.get(key)
            if value is not None and value not in neutral:
                raise UnsupportedModelError(f"{self.path}: {key} is {value!r}, which is not supported. {remedy}")

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in PyTorch's order."""
        return self._tensor(name).shape

    def type(self, name: str) -> str:
        """GGUF's name of a tensor's type, such as ``Q8_0``."""
        return str(self._tensor(name).type.name)

    def quantised_types(self) -> list[str]:
        """Types of the quantised tensors."""
        return sorted({self.type(name) for name in self._tensors} - _PLAIN)

    def plain_types(self) -> list[str]:
        """Types of the unquantised matrices."""
        return sorted({self.type(name) for name, one in self._tensors.items() if len(one.shape) > 1} & _PLAIN)

    def dense(self, name: str, rows: Rows | None = None) -> "Tensor":
        """Decode a tensor: BF16 as it is stored, all others to fp32; ``rows`` reorders its rows."""
        return self.decoded(name, self._data(name, rows))

    def dense_in(self, dtype: "torch.dtype", name: str, rows: Rows | None = None) -> "Tensor":
        """Decode a tensor to ``dtype``, some rows at a time: a whole fp32 copy of a large matrix would set the memory peak."""
        import torch

        from volley.native import blocks

        data, shape = self._data(name, rows), self.shape(name)
        if blocks.reads(self.type(name)) and dtype in blocks.DTYPES:
            return blocks.decode(self.type(name), data, dtype)
        whole = torch.empty(shape, dtype=dtype)
        step = max(_DECODED_AT_ONCE * shape[0] // whole.numel(), 1)
        for first in range(0, shape[0], step):
            whole[first : first + step] = self.decoded(name, data[first : first + step])
        return whole

    def numbers(
        self, name: str, rows: NDArray[np.int64], columns: NDArray[np.int64], order: Rows | None = None
    ) -> "Tensor":
        """Decode some numbers of a tensor whose matrices are stacked, by rows and columns after ``order`` reordered its rows."""
        import torch

        from volley.native import blocks

        *height, width = self.shape(name)
        data = self._data(name, None)
        at = rows if order is None else order(np.arange(prod(height)))[rows]
        found = data.reshape(-1, data.shape[-1])[at]
        if blocks.reads(self.type(name)):  # of each row one block
            found = found.reshape(len(rows), -1, blocks.BYTES[self.type(name)])
            size = width // found.shape[1]
            found, columns = found[np.arange(len(rows)), columns // size], columns % size
        return self.decoded(name, found)[torch.arange(len(rows)), torch.from_numpy(columns)]

    def blocks(self, name: str, rows: Rows | None = None, expert: int | None = None) -> NDArray[np.uint8]:
        """Bytes ``[out, n]`` of a matrix in blocks, or of that of one ``expert``."""
        data = self._data(name, rows)
        return data if expert is None else data[expert]

    def decoded(self, name: str, data: NDArray[Any]) -> "Tensor":
        """Decode stored rows of a tensor."""
        import torch

        from volley.native import blocks

        stored = self._tensors[name].type
        if stored.name == "BF16":
            return torch.from_numpy(np.array(data)).view(torch.bfloat16)
        if stored.name in _INTEGERS:
            return torch.from_numpy(np.array(data))
        if blocks.reads(stored.name):
            return blocks.decode(stored.name, data, torch.float32)
        try:
            values = self._package.dequantize(data, stored)
        except NotImplementedError:
            raise UnsupportedModelError(
                f"{self.path}: {name} is of type {stored.name}, which the package gguf "
                f"{version('gguf')} cannot decode; use a file of {READ_TYPES}"
            ) from None
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def place(self, name: str) -> tuple[int, int]:
        """Address and number of bytes of a tensor in the mapped file."""
        data = self._data(name, None)
        return int(data.ctypes.data), data.nbytes

    def _tensor(self, name: str) -> TensorPlace:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path} has no tensor {name}; fetch or convert it again")
        return self._tensors[name]

    def _data(self, name: str, rows: Rows | None) -> NDArray[Any]:
        one = self._tensor(name)
        mapped = self._mapped[self._part_of[name]][one.offset : one.offset + one.nbytes]
        data = np.asarray(mapped).view(one.dtype).reshape(one.stored_shape)
        return data if rows is None else rows(data)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            found = file.read(len(MAGIC))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); give a GGUF file") from None
    if found != MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}; fetch it again")
