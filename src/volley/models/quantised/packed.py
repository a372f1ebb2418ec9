"""GPTQ and AWQ: matrices of few bits packed into int32, read from a checkpoint's files and decoded without their libraries.

Both store ``W = scales · (codes − zeros)`` of the transposed weight, with a scale and a zero for each group of inputs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor

from volley.errors import CheckpointError, UnsupportedModelError
from volley.files import weight_files

_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # AWQ's order of eight neighbouring outputs
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
Stored = Mapping[str, Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class PackedFormat:
    """Packed format: ``check`` refuses unsupported settings, ``decode`` makes a matrix ``[out, in]`` (fp32) from its parts."""

    check: Callable[[Mapping[str, Any]], None]
    decode: Callable[[Stored, Mapping[str, Any]], Tensor]


def folder_of(path: str | Path) -> Path:
    """Return the folder with the weights of a folder or hub name."""
    return Path(path) if Path(path).is_dir() else Path(snapshot_download(str(path), allow_patterns=["*.safetensors*"]))


def files_of_tensors(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor in a folder, by the tensor's name."""
    found: dict[str, Path] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            found |= dict.fromkeys(opened.keys(), file)
    return found


def decode_layer(file: Path, layer: str, decode: Callable[[Stored], T]) -> T:
    """Read the parts of a layer in a file, and return what ``decode`` makes of them, by the last parts of their names."""
    with safe_open(file, framework="pt") as opened:
        names = [name for name in opened.keys() if name.rpartition(".")[0] == layer]  # noqa: SIM118
        return decode({name.rpartition(".")[2]: opened.get_tensor(name) for name in names})


def open_tensors(path: str | Path) -> dict[str, Any]:
    """Open the files of a folder or hub name; return them by the names of their tensors."""
    where: dict[str, Any] = {}
    try:
        for file in weight_files(folder_of(path)):
            opened = safe_open(file, framework="pt")
            where |= dict.fromkeys(opened.keys(), opened)  # type: ignore[no-untyped-call]
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); fetch the checkpoint again") from error
    return where


def dense_tensors(
    path: str | Path, form: PackedFormat, settings: Mapping[str, Any], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a folder or hub name with its name: packed ones decoded to ``dtype``, the others as they are."""
    where = open_tensors(path)
    for name in where:
        stem, _, part = name.rpartition(".")
        if part not in _PARTS or f"{stem}.qweight" not in where:
            yield name, where[name].get_tensor(name)
        elif part == "qweight":
            absent = [f"{stem}.{other}" for other in ("qzeros", "scales") if f"{stem}.{other}" not in where]
            if absent:
                raise CheckpointError(f"{path} has {name} and lacks {', '.join(absent)}; fetch it again")
            names = {part: f"{stem}.{part}" for part in _PARTS if f"{stem}.{part}" in where}
            parts = {part: where[full].get_tensor(full) for part, full in names.items()}
            yield f"{stem}.weight", form.decode(parts, settings).to(dtype)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack codes ``[rows, columns · 32 / bits]`` from int32 ``[rows, columns]``, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes: Tensor = (packed[..., None] >> shifts) & (2**bits - 1)
    return codes.flatten(-2)


def gptq_parts(stored: Stored, settings: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes ``[out, in]`` and zeros ``[groups, out]`` of a matrix, and each input's group ``[in]`` in default order."""
    codes = unpack(stored["qweight"].T.contiguous(), settings["bits"])
    first = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1  # the older format stores zeros minus one
    zeros = unpack(stored["qzeros"], settings["bits"]) + first
    return codes, zeros, torch.arange(codes.shape[1]) // (codes.shape[1] // len(stored["scales"]))


def _decode_gptq(stored: Stored, settings: Mapping[str, Any]) -> Tensor:
    codes, zeros, in_order = gptq_parts(stored, settings)
    groups = stored.get("g_idx", in_order).long()
    return (codes - zeros.T[:, groups]) * stored["scales"].float().T[:, groups]


def _decode_awq(stored: Stored, _: Mapping[str, Any]) -> Tensor:
    def outputs(packed: Tensor) -> Tensor:
        return unpack(packed, 4).view(len(packed), -1, 8)[..., _ORDER].flatten(1)

    codes, zeros, scales = outputs(stored["qweight"]), outputs(stored["qzeros"]), stored["scales"].float()
    size = len(codes) // len(scales)
    return ((codes - zeros.repeat_interleave(size, 0)) * scales.repeat_interleave(size, 0)).T.contiguous()


def _check_gptq(settings: Mapping[str, Any]) -> None:
    form = settings.get("checkpoint_format") or "gptq"
    others = [name for name, own in (settings.get("dynamic") or {}).items() if own and not name.startswith("-:")]
    if (
        settings.get("bits") not in (2, 4, 8) or form not in ("gptq", "gptq_v2") or others
    ):  # "-:" marks unquantised modules
        raise UnsupportedModelError(
            f"GPTQ weights of {settings.get('bits')} bits in the format {form!r}"
            f"{', other modules having other ones' if others else ''}, are not read; volley reads 2, 4 and "
            "8 bits in the formats gptq and gptq_v2, the same for all modules: export the model so"
        )


def _check_awq(settings: Mapping[str, Any]) -> None:
    form = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if settings.get("bits", 4) != 4 or form != "gemm" or not settings.get("zero_point", True):
        raise UnsupportedModelError(
            f"AWQ weights of {settings.get('bits')} bits in the format {form!r} are not read; volley reads 4 bits in the "
            "format gemm, with zero points: export the model so"
        )


FORMATS: Mapping[str, PackedFormat] = {
    "gptq": PackedFormat(_check_gptq, _decode_gptq),
    "awq": PackedFormat(_check_awq, _decode_awq),
}
"""Packed formats by ``quant_method``."""
