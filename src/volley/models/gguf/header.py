"""Read the header of a GGUF file (versions 2 and 3).

The package ``gguf`` has a reader too, which makes an array of every string. With 150,000 tokens that takes twelve seconds, so it
is only the reference in the tests.
"""

import mmap
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from volley.errors import CheckpointError, ConfigError, UnsupportedModelError

MAGIC = b"GGUF"
READ_TYPES = "F32, F16, BF16, Q8_0, Q4_0 or Q4_K_M"
_VERSIONS = (2, 3)
_COUNT = struct.Struct("<Q")
_MANY = 4096  # numbers of an array that is kept packed, such as the scores of all tokens
_CODES = {
    "UINT8": "B", "INT8": "b", "UINT16": "H", "INT16": "h", "UINT32": "I", "INT32": "i", "UINT64": "Q", "INT64": "q",
    "FLOAT32": "f", "FLOAT64": "d", "BOOL": "?",
}  # fmt: skip
_DTYPES: dict[str, Any] = {
    "F16": np.float16, "F32": np.float32, "F64": np.float64,
    "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64,
}  # fmt: skip
_DAMAGE = (struct.error, ValueError, OverflowError)  # raised by reads past the end, and by invalid numbers


class StringArray(NamedTuple):
    """Position of an array of strings in the file; the strings, perhaps hundreds of thousands, are read on demand."""

    begin: int
    number: int


class TensorPlace(NamedTuple):
    """Type, shape and position of a stored tensor."""

    type: Any
    """A ``GGMLQuantizationType``."""
    shape: tuple[int, ...]
    """Shape in PyTorch's order, ``[out, in]``."""
    offset: int
    dtype: np.dtype[Any]
    stored_shape: tuple[int, ...]
    """Shape whose last dimension counts bytes if the tensor is quantised."""

    @property
    def nbytes(self) -> int:
        return prod(self.stored_shape) * self.dtype.itemsize


class Header(NamedTuple):
    """Metadata of a file, and the positions of its tensors."""

    metadata: Mapping[str, Any]
    """Metadata without arrays of strings."""
    strings: Mapping[str, StringArray]
    tensors: Mapping[str, TensorPlace]


def gguf_package() -> Any:
    """Return the package ``gguf``, or raise an error that says how to install it."""
    try:
        import gguf
    except ImportError:
        raise ConfigError("GGUF files need the package gguf; install it: pip install gguf") from None
    return gguf


def read_header(path: Path) -> Header:
    """Read the header of a GGUF file; CheckpointError if it is damaged, or if its tensors do not fit the file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Reader(path, data).header()
        except _DAMAGE as error:
            raise _damaged(path, error) from None


def read_strings(path: Path, data: Any, strings: StringArray) -> list[str]:
    """Read the strings of an array from the bytes ``data`` of the file ``path``."""
    try:
        found = [*_parts(data, strings)]
        texts = str(b"\0".join(found), "utf-8").split("\0")  # one call is faster than one for each
        return texts if len(texts) == len(found) else [str(one, "utf-8") for one in found]
    except _DAMAGE as error:
        raise _damaged(path, error) from None


def find_strings(path: Path, data: Any, strings: StringArray, texts: Iterable[str]) -> dict[int, str]:
    """Return those of ``texts`` that are in an array, by their indices."""
    wanted = {text.encode(): text for text in texts}
    try:
        return {place: wanted[one] for place, one in enumerate(_parts(data, strings)) if one in wanted}
    except _DAMAGE as error:
        raise _damaged(path, error) from None


def _parts(data: Any, strings: StringArray) -> Iterator[bytes]:
    place, count = strings.begin, _COUNT.unpack_from
    for _ in range(strings.number):
        begin = place + 8
        place = begin + count(data, place)[0]
        yield bytes(data[begin:place])


def _damaged(path: Path, error: Exception) -> CheckpointError:
    told = "it ends within its header" if isinstance(error, struct.error) else error
    return CheckpointError(f"{path} is truncated or damaged ({told}); fetch or convert it again")


class _Reader:
    """Reader of a header, from beginning to end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._place = path, data, len(MAGIC)
        self._package = gguf_package()

    def header(self) -> Header:
        self._check_version()
        num_tensors, num_keys = self._take("QQ")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            name, kind = self._string(), self._package.GGUFValueType(self._take("I")[0])
            if name in metadata:
                raise ValueError(f"the key {name} is there twice")
            metadata[name] = self._value(kind)
        infos = [(self._string(), self._take(f"{self._take('I')[0]}Q"), *self._take("IQ")) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", self._package.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r}, which is no power of two")
        begin = -(-self._place // alignment) * alignment
        tensors = {name: self._tensor(name, sizes, kind, begin + offset) for name, sizes, kind, offset in infos}
        if len(tensors) < num_tensors:
            raise ValueError("two tensors have one name")
        strings = {name: value for name, value in metadata.items() if isinstance(value, StringArray)}
        return Header({name: value for name, value in metadata.items() if name not in strings}, strings, tensors)

    def _check_version(self) -> None:
        (number,) = self._take("I")
        if number & 0xFFFF == 0:
            raise UnsupportedModelError(
                f"{self._path} is of the other byte order; convert it with gguf-convert-endian, or fetch another file"
            )
        if number not in _VERSIONS:
            raise ValueError(f"its version is {number}; 2 and 3 are read")

    def _value(self, kind: Any) -> Any:
        if kind.name == "STRING":
            return self._string()
        if kind.name != "ARRAY":
            return self._take(_CODES[kind.name])[0]
        number, count = self._take("IQ")
        inner = self._package.GGUFValueType(number)
        if inner.name == "STRING":
            return self._skip_strings(count)
        if inner.name == "ARRAY":
            raise ValueError("it has an array of arrays")
        code = _CODES[inner.name]
        if count < _MANY or code == "?":
            return list(self._take(f"{count}{code}"))
        begin, self._place = self._place, self._place + count * struct.calcsize(f"<{code}")
        numbers = array(code)
        numbers.frombytes(self._data[begin : self._place])
        if len(numbers) < count:
            raise ValueError("it ends within an array")
        return numbers

    def _take(self, codes: str) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{codes}")
        begin, self._place = self._place, self._place + layout.size
        return layout.unpack_from(self._data, begin)

    def _string(self) -> str:
        return str(self._take(f"{self._take('Q')[0]}s")[0], "utf-8")

    def _skip_strings(self, count: int) -> StringArray:
        begin = place = self._place
        data, size = self._data, _COUNT.unpack_from
        for _ in range(count):
            place += 8 + size(data, place)[0]
        if place > len(data):
            raise ValueError("it ends within its strings")
        self._place = place
        return StringArray(begin, count)

    def _tensor(self, name: str, sizes: tuple[int, ...], number: int, offset: int) -> TensorPlace:
        try:
            kind = self._package.GGMLQuantizationType(number)
        except ValueError:
            raise UnsupportedModelError(
                f"{self._path} has a tensor of type {number}, which the package gguf {version('gguf')} does not know; "
                f"install a newer one (pip install -U gguf), or use a file of {READ_TYPES}"
            ) from None
        shape = stored = sizes[::-1]
        if kind.name not in _DTYPES:
            per_block, size = self._package.GGML_QUANT_SIZES[kind]
            if not shape or shape[-1] % per_block:
                raise ValueError(f"rows of {name} are no whole number of blocks of {kind.name}")
            stored = (*shape[:-1], shape[-1] // per_block * size)
        found = TensorPlace(kind, shape, offset, np.dtype(_DTYPES.get(kind.name, np.uint8)), stored)
        if offset + found.nbytes > len(self._data):
            raise ValueError(f"{name} ends {offset + found.nbytes - len(self._data)} bytes behind the file")
        return found
