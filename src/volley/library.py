"""Loader of the library of kernels (``native/*.c``), which is built when the package is installed, if there is a C compiler.

PyTorch is not imported here, so that commands that compute nothing can ask what the kernels support.
"""

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_uint64, c_void_p
from importlib.util import find_spec
from pathlib import Path
from sysconfig import get_config_var
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class ProductStruct(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("kind", "inputs", "outputs", "stride")),
        *((name, c_void_p) for name in ("codes", "scales", "bias", "next")),
    )


class TurnsStruct(Structure):
    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("width", c_int64), ("rounds", c_int64))


class HeadsStruct(Structure):
    _fields_ = (*((name, c_int64) for name in ("queries", "keys", "dim", "whole", "rounds")), ("eps", c_float))


class ActivationStruct(Structure):
    _fields_ = (("kind", c_int64), ("alpha", c_float), ("limit", c_float))


_SIGNATURES: dict[str, list[object]] = {
    "rms_norm": [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_float, c_int64],
    "rms_norm_floats": [*[c_void_p] * 3, c_int64, c_int64, c_float],
    "gated_gelu_floats": [c_void_p, c_void_p, c_int64, c_int64],
    "norm_and_turn": [c_void_p, c_int64, *[c_void_p] * 3, c_int64, c_void_p],
    "gated": [c_void_p, c_void_p, c_int64, c_int64, c_void_p],
    "cap": [c_void_p, c_int64, c_int64, c_float],
    "put_codes": [c_int64, c_void_p, c_int64, c_int64, c_void_p],
    "read_rows": [POINTER(ProductStruct), c_void_p, c_int64, c_void_p],
    "decode_blocks": [c_int64, c_void_p, c_int64, c_void_p, c_void_p],
    "lay_out_blocks": [c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p],
    "widen_blocks": [POINTER(ProductStruct), c_void_p],
    "round_weight": [c_int64, c_void_p, *[c_int64] * 3, c_void_p, c_void_p],
    "linear": [POINTER(ProductStruct), c_void_p, c_int64, *[c_void_p] * 4, c_int64],
    "exponentials": [c_uint64, c_uint64, c_uint64, c_void_p, c_int64],
    "likeliest": [c_void_p, c_int64, c_int64, c_int64, c_void_p],
    "forbid": [c_void_p, c_void_p, c_int64],
    "allowed_softmax": [c_void_p, c_void_p, c_void_p, c_int64, c_float],
    "allowed_best": [
        *(c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64),
        *(c_void_p, POINTER(c_int64), POINTER(c_float)),
    ],
    "follow": [
        *(c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64),
        *(c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p),
    ],
    "draw_after": [*[c_void_p] * 3, c_int64, c_int64, c_float, c_double, c_void_p, POINTER(c_int64)],
    "move_states": [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64],
    "take_token": [c_void_p],
    "paged_attention": [c_void_p, c_void_p],
    "mix_experts": [*[c_void_p] * 3, c_int64, c_void_p, c_void_p],
    "mix_chosen_experts": [*[c_void_p] * 3, c_int64, c_void_p, c_void_p],
    "run_layers": [c_void_p, c_int64, *[c_void_p] * 6, c_int64, c_void_p],
}


def load(folder: Path) -> ctypes.CDLL | None:
    """Load the library in ``folder``; ``None`` if there is none, or if it was built from older sources or for another machine.

    Masks, recurrent states, noise and fp32 rows run on any CPU. ``library.usable(most)`` chooses the instructions for everything
    else, ``most`` or less: 3 with AMX tiles, 2 with AVX512's dot products, 1 with AVX2, 0 for an unsupported CPU.
    """
    _load_openmp()
    own = str(get_config_var("EXT_SUFFIX"))  # a library for another version of Python may be built from older sources
    for path in sorted(folder.glob("_kernels*.so"), key=lambda path: not path.name.endswith(own)):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        if not all(hasattr(library, name) for name in ("usable", *_SIGNATURES)):
            continue
        library.usable.argtypes, library.usable.restype = [c_int64], c_int64
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        return library
    return None


def _load_openmp() -> None:
    """Load PyTorch's OpenMP runtime, which then serves the kernels too: two runtimes would have threads of their own each."""
    package = find_spec("torch")
    for folder in (package and package.submodule_search_locations) or ():
        for path in Path(folder, "lib").glob("libgomp*"):
            ctypes.CDLL(str(path))


_library = load(Path(__file__).parent / "native")
is_built = _library is not None
"""True if the library was built from these sources; masks, recurrent states, noise and fp32 rows need no more."""
_usable = 0 if _library is None else _library.usable(3)
available = _usable > 0
"""True if it was built and its matmuls run on this CPU."""
has_dot_products = _usable > 1
"""True if the matmuls use AVX512's dot products for bf16 and for integers (VNNI)."""


def functions() -> ctypes.CDLL:
    """Return the library, which must have been built."""
    assert _library is not None, "ask native.available or native.is_built first"
    return _library


def pointer(tensor: "Tensor | None") -> int | None:
    return None if tensor is None else tensor.data_ptr()
