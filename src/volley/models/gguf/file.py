"""A GGUF file opened: what it says of itself, and its tensors, decoded or block by block.

The package ``gguf`` reads the container and decodes every type; it is needed only here. Shapes are PyTorch's, ``[out, in]``.
"""

import re
from collections.abc import Callable, Container, Iterator, Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from volley.errors import CheckpointError, ConfigError, UnsupportedModelError

MAGIC = b"GGUF"
_TOKENS = "tokenizer.ggml.tokens"
_KINDS = "tokenizer.ggml.token_type"
CONTROL = 3
"""The type of tokens that end a text or a turn."""
_TOKENIZER_LISTS = (_TOKENS, "tokenizer.ggml.merges", "tokenizer.ggml.scores", _KINDS)
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
"""Keys that are read nowhere, and the values that change nothing."""
_READ = "F32, F16, BF16, Q8_0, Q4_0 or Q4_K_M"
_UNKNOWN_TYPE = re.compile(r"(\d+)\)? is not a valid GGMLQuantizationType")  # what the package's reader raises
_DECODED_AT_ONCE = 2**20  # numbers of a tensor

Rows = Callable[[NDArray[Any]], NDArray[Any]]
"""Puts the rows of a matrix in another order; columns may be numbers or the bytes of blocks."""


def is_gguf(path: str | Path) -> bool:
    """Whether ``path`` names a GGUF file: by its ending, or by its first bytes."""
    path = Path(path)
    if path.suffix == ".gguf":
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def gguf_package() -> Any:
    """The package ``gguf``, or an error that says how to install it."""
    try:
        import gguf
    except ImportError:
        raise ConfigError("GGUF files need the package gguf; install it with: pip install 'volley-llm[gguf]'") from None
    return gguf


class _Tensor(NamedTuple):
    """How a tensor is stored, and where in its file."""

    type: Any
    shape: tuple[int, ...]
    """PyTorch's way, ``[out, in]``."""
    offset: int
    dtype: np.dtype[Any]
    stored_shape: tuple[int, ...]
    """The last dimension counts the bytes of blocks where there are any."""


class _Header(NamedTuple):
    """What stands before the tensors of a file."""

    metadata: Mapping[str, Any]
    num_tokens: int
    control_tokens: Mapping[int, str]
    tensors: Mapping[str, _Tensor]


def _read_header(path: Path, *, whole: bool = False) -> _Header:
    try:
        reader = gguf_package().GGUFReader(path)
        fields = reader.fields
        metadata = {name: field.contents() for name, field in fields.items() if whole or name not in _TOKENIZER_LISTS}
        num_tokens = len(fields[_TOKENS].data) if _TOKENS in fields else 0
        kinds = fields[_KINDS].contents() if num_tokens and _KINDS in fields else []
        control = {token: str(fields[_TOKENS].contents(token)) for token, kind in enumerate(kinds) if kind == CONTROL}
    except Exception as error:  # the reader raises whatever numpy does for a file that ends too early
        unknown = _UNKNOWN_TYPE.search(str(error))
        if unknown is not None:
            raise UnsupportedModelError(
                f"{path} has a tensor of type {unknown[1]}, which the package gguf {_version()} does not know; "
                f"install a newer one (pip install -U gguf), or use a file of {_READ}"
            ) from None
        raise CheckpointError(
            f"{path} is truncated or damaged ({error or type(error).__name__}); fetch or convert it again"
        ) from None
    if reader.byte_order == "S":
        raise UnsupportedModelError(
            f"{path} is of the other byte order; convert it with gguf-convert-endian, or fetch another file"
        )
    parts = int(metadata.get("split.count", 1))
    if parts > 1:
        raise UnsupportedModelError(
            f"{path} is one of {parts} parts of a model; put them together with llama.cpp's "
            "llama-gguf-split --merge FIRST_PART WHOLE.gguf and give the whole file"
        )
    tensors = {
        one.name: _Tensor(
            one.tensor_type,
            tuple(int(size) for size in reversed(one.shape)),
            int(one.data_offset),
            one.data.dtype,
            one.data.shape,
        )
        for one in reader.tensors
    }
    return _Header(metadata, num_tokens, control, tensors)


@lru_cache(maxsize=2)
def _known_header(path: Path, _size: int, _changed: int) -> _Header:
    """The package reads a header in Python, which takes seconds where there are many tokens; a load asks for it often."""
    return _read_header(path)


class GGUFFile:
    """One file; tensors stay on the disk until they are asked for."""

    def __init__(self, path: str | Path, *, whole: bool = False) -> None:
        """``whole`` keeps the lists of a tokenizer, which are large, among the metadata."""
        self.path = Path(path)
        self._package = gguf_package()
        _check_magic(self.path)
        stat, absolute = self.path.stat(), self.path.absolute()
        header = (
            _read_header(self.path, whole=True) if whole else _known_header(absolute, stat.st_size, stat.st_mtime_ns)
        )
        self.metadata, self.num_tokens, self.control_tokens, self._tensors = header
        """``control_tokens`` are found in text as they are spelled and have a meaning, by their numbers."""
        self._bytes = np.memmap(self.path, np.uint8, "r")

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "not named"))

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    @property
    def has_tokenizer(self) -> bool:
        return self.num_tokens > 0 and "tokenizer.ggml.model" in self.metadata

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``{architecture}.{key}``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def require(self, key: str) -> Any:
        """The value of ``{architecture}.{key}``; an error if there is none."""
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.path} has no key {self.architecture}.{key}; fetch or convert it again")
        return value

    def refuse_unless_neutral(self, keys: Mapping[str, Container[Any]], remedy: str) -> None:
        """Refuse a file in which one of ``keys`` has another value than those that change nothing."""
        for key, neutral in keys.items():
            value = self.get(key)
            if value is not None and value not in neutral:
                raise UnsupportedModelError(f"{self.path}: {key} is {value!r}, which is not supported. {remedy}")

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, PyTorch's way."""
        return self._tensors[name].shape

    def type(self, name: str) -> str:
        """GGUF's name of a tensor's type, such as ``Q8_0``."""
        return str(self._tensors[name].type.name)

    def quantised_types(self) -> list[str]:
        """The types of tensors that are not plain numbers."""
        return sorted({self.type(name) for name in self._tensors} - _PLAIN)

    def plain_types(self) -> list[str]:
        """The types of matrices that are plain numbers."""
        return sorted({self.type(name) for name, one in self._tensors.items() if len(one.shape) > 1} & _PLAIN)

    def dense(self, name: str, rows: Rows | None = None) -> Tensor:
        """A tensor decoded: BF16 as it is stored, all others in fp32; ``rows`` reorders its rows."""
        return self._decode(name, self._data(name, rows))

    def dense_in(self, dtype: torch.dtype, name: str, rows: Rows | None = None) -> Tensor:
        """A tensor decoded to ``dtype``, some rows after others: all of a large matrix in fp32 would be the peak of memory."""
        data, shape = self._data(name, rows), self.shape(name)
        whole = torch.empty(shape, dtype=dtype)
        step = max(_DECODED_AT_ONCE * shape[0] // whole.numel(), 1)
        for first in range(0, shape[0], step):
            whole[first : first + step] = self._decode(name, data[first : first + step])
        return whole

    def blocks(self, name: str, rows: Rows | None = None) -> NDArray[np.uint8]:
        """Bytes ``[out, n]`` of a matrix in blocks."""
        return self._data(name, rows)

    def decoded(self, name: str, blocks: NDArray[Any]) -> Tensor:
        """Some of these rows in numbers."""
        return self._decode(name, blocks)

    def place(self, name: str) -> tuple[int, int]:
        """Address and bytes of a tensor in the mapped file."""
        data = self._data(name, None)
        return int(data.ctypes.data), data.nbytes

    def _data(self, name: str, rows: Rows | None) -> NDArray[Any]:
        one = self._tensors[name]
        size = prod(one.stored_shape) * one.dtype.itemsize
        data = np.asarray(self._bytes[one.offset : one.offset + size]).view(one.dtype).reshape(one.stored_shape)
        return data if rows is None else rows(data)

    def _decode(self, name: str, data: NDArray[Any]) -> Tensor:
        stored = self._tensors[name].type
        if stored.name == "BF16":
            return torch.from_numpy(np.array(data)).view(torch.bfloat16)
        if stored.name in _INTEGERS:
            return torch.from_numpy(np.array(data))
        try:
            values = self._package.dequantize(data, stored)
        except NotImplementedError:
            raise UnsupportedModelError(
                f"{self.path}: {name} is of type {stored.name}, which the package gguf "
                f"{_version()} cannot decode; use a file of {_READ}"
            ) from None
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)


def _version() -> str:
    from importlib.metadata import version

    return version("gguf")


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            found = file.read(len(MAGIC))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); give a GGUF file") from None
    if found != MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}; fetch it again")
