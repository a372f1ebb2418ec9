"""Headers of GGUF files: what the package's reader finds, which is slow, and one clear error for whatever is damaged."""

from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from tests.models.gguf.converted import random_model
from tests.models.gguf.files import bpe_tokenizer, finish, write_model
from volley.errors import CheckpointError, VolleyError
from volley.models.gguf.file import GGUFFile
from volley.models.gguf.header import read_header

SCALARS = {
    "UINT8": 255, "INT8": -128, "UINT16": 65535, "INT16": -32768, "UINT32": 2**32 - 1, "INT32": -(2**31),
    "UINT64": 2**64 - 1, "INT64": -(2**63), "FLOAT32": 0.1, "FLOAT64": 0.1, "BOOL": True,
}  # fmt: skip


Value = tuple[Any, GGUFValueType, GGUFValueType | None]


def write(path: Path, values: dict[str, Value], tensors: dict[str, Any] | None = None, alignment: int = 32) -> Path:
    """The last of a value's three is the type of an array's elements."""
    writer = GGUFWriter(path, "qwen3")
    writer.add_custom_alignment(alignment)
    for name, (value, kind, inner) in values.items():
        writer.add_key_value(name, value, kind, inner)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    finish(writer)
    return path


def check_as_the_package_reads(path: Path) -> None:
    reader, file, header = GGUFReader(path), GGUFFile(path), read_header(path)
    own = {**file.metadata, **{key: file.strings(key) for key in file.string_keys}}
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert own == expected
    assert {name: type(value) for name, value in own.items()} == {name: type(expected[name]) for name in own}
    assert list(file) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        found = header.tensors[tensor.name]
        assert (found.type, found.shape) == (tensor.tensor_type, tuple(tensor.shape.tolist()[::-1]))
        assert (found.offset, found.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert (found.dtype, found.stored_shape) == (tensor.data.dtype, tensor.data.shape)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_0", "Q4_1", "Q4_K", "Q6_K", "IQ4_XS"])
def test_files_of_models_read_as_by_the_package(tmp_path: Path, kind: str) -> None:
    model = random_model("qwen3", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    check_as_the_package_reads(write_model(tmp_path / "a.gguf", model, "qwen3", kind, tokenizer=bpe_tokenizer()))


@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_values_of_every_type_read_as_by_the_package(tmp_path: Path, alignment: int) -> None:
    array = GGUFValueType.ARRAY
    values: dict[str, Value] = {name: (value, GGUFValueType[name], None) for name, value in SCALARS.items()}
    values |= {f"{name}s": ([value, value], array, GGUFValueType[name]) for name, value in SCALARS.items()}
    values |= {"text": ("日本 é\0", GGUFValueType.STRING, None), "nothing": ("", GGUFValueType.STRING, None)}
    values |= {"texts": (["", "é", "日本" * 99], array, GGUFValueType.STRING)}
    kinds: list[Any] = [np.int8, np.int16, np.int32, np.int64, np.float16, np.float32, np.float64]
    tensors = {np.dtype(kind).name: np.ones((3, 5), kind) for kind in kinds}
    check_as_the_package_reads(write(tmp_path / "a.gguf", values, tensors, alignment))


def test_version_2_is_read_and_version_1_is_not(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.gguf", random_model("qwen3", num_hidden_layers=1), "qwen3")
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + (2).to_bytes(4, "little") + whole[8:])
    check_as_the_package_reads(path)
    path.write_bytes(whole[:4] + (1).to_bytes(4, "little") + whole[8:])
    with pytest.raises(CheckpointError, match="its version is 1; 2 and 3 are read"):
        GGUFFile(path)


@cache
def small_file() -> tuple[bytes, int]:
    """A file with all that headers have, and where its last tensor ends."""
    text, array, number = GGUFValueType.STRING, GGUFValueType.ARRAY, GGUFValueType.UINT32
    values: dict[str, Value] = {
        "name": ("é", text, None),
        "kind": ("small", text, None),
        "texts": (["a", "日本", ""], array, text),
        "numbers": ([1, 2], array, number),
        "number": (7, number, None),
    }
    with TemporaryDirectory() as folder:
        tensors = {"a": np.ones((2, 3), np.float32), "b": np.ones(5, np.float16)}
        path = write(Path(folder) / "a.gguf", values, tensors)
        end = max(tensor.offset + tensor.nbytes for tensor in read_header(path).tensors.values())
        return path.read_bytes(), end


def open_bytes(data: bytes) -> None:
    """Open a file of ``data`` and read all of its header."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.gguf"
        path.write_bytes(data)
        file = GGUFFile(path)
        for key in file.string_keys:
            file.strings(key)


@given(st.data())
def test_a_file_that_ends_too_early_is_refused_wherever_it_ends(data: st.DataObject) -> None:
    whole, end = small_file()
    open_bytes(whole[:end])
    length = data.draw(st.integers(0, end - 1))
    with pytest.raises(CheckpointError, match=r"is (truncated or damaged|not a GGUF file).*fetch"):
        open_bytes(whole[:length])


@given(st.data())
def test_bytes_that_are_wrong_are_read_or_refused(data: st.DataObject) -> None:
    """Whatever they are: with another error than volley's a load would end in a traceback."""
    whole, end = small_file()
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    with suppress(VolleyError):
        open_bytes(bytes(changed))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (b"number" + (4).to_bytes(4, "little"), b"number" + (13).to_bytes(4, "little"), "13 is not a valid GGUFValue"),
        (b"texts" + (9).to_bytes(4, "little") + b"\x08", b"texts" + (9).to_bytes(4, "little") + b"\x09", "of arrays"),
        (b"\x01\0\0\0\0\0\0\0b", b"\x01\0\0\0\0\0\0\0a", "two tensors have one name"),
        (b"kind", b"name", "the key name is there twice"),
        ("é".encode(), b"\xff\xff", "invalid start byte"),
        ("日".encode(), b"\xff\xff\xff", "invalid start byte"),
        (b"alignment\x04\0\0\0\x20", b"alignment\x04\0\0\0\x21", "alignment is 33, which is no power of two"),
        (b"alignment\x04\0\0\0\x20", b"alignment\x04\0\0\0\0", "alignment is 0, which is no power of two"),
    ],
)
def test_what_is_damaged_is_named(before: bytes, after: bytes, message: str) -> None:
    whole, _ = small_file()
    assert whole.count(before) == 1
    with pytest.raises(CheckpointError, match=rf"is truncated or damaged \(.*{message}"):
        open_bytes(whole.replace(before, after))
