"""Tensors in safetensors files: written whole or not at all, read and checked with errors that name the file and the remedy."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from volley.errors import CheckpointError, ConfigError
from volley.files import replaced


def dtype_of(name: torch.dtype | str) -> torch.dtype:
    """Return a floating-point dtype given as itself or by its name, such as ``"bfloat16"``."""
    found = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else name
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ConfigError(f"dtype is {name!r}; it must be a floating-point type, such as torch.bfloat16 or 'bfloat16'")
    return found


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file atomically."""
    with replaced(path) as temporary:
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, temporary, dict(metadata or {}))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; a truncated one is a clear error.

    Tensors have memory of their own: mapped ones would change, or end the process, when another file is copied over this one.
    The file is mapped anew for each, so that memory never holds it beside them.
    """

    def read(name: str) -> Tensor:
        with safe_open(path, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor.clone()

    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
        return {name: read(name) for name in names}
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; give a folder that holds {path.name}") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is truncated or damaged ({error}); fetch or save the checkpoint again") from None


def check_finite(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that a training which went wrong has left."""
    if not all(bool(torch.isfinite(tensor).all()) for tensor in weights.values()):
        raise CheckpointError(f"{path} holds numbers that are not finite; train it again")


def check_weights(path: Path, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Refuse weights whose names or shapes are not exactly the model's."""
    missing = sorted(set(expected) - set(found))
    surplus = sorted(set(found) - set(expected))
    if missing or surplus:
        parts = [f"missing {', '.join(missing)}"] * bool(missing) + [f"unknown {', '.join(surplus)}"] * bool(surplus)
        raise CheckpointError(f"{path}: {'; '.join(parts)}; the weights and config.json do not belong together")
    for name, tensor in expected.items():
        if found[name].shape != tensor.shape:
            raise CheckpointError(
                f"{path}: {name} has shape {list(found[name].shape)}, config.json says {list(tensor.shape)}; "
                "the weights and config.json do not belong together"
            )
