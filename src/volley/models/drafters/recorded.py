"""Recorded features for training: a file for each prompt, named by a digest of its token ids."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from safetensors import SafetensorError, safe_open
from torch import Tensor

from volley.errors import CheckpointError
from volley.tensors import save_tensors


class Recorded(NamedTuple):
    """Features of a prompt of n tokens in bf16: ``taps [n, taps · H]`` are the outputs of ``layer_ids``. ``final [n, H]`` are the
    normed states that the head reads, if they were recorded."""

    layer_ids: tuple[int, ...]
    taps: Tensor
    final: Tensor | None


def recorded_path(directory: Path, token_ids: ArrayLike) -> Path:
    """Return the file of the features of the prompt ``token_ids [n]``."""
    digest = hashlib.sha256(np.asarray(token_ids, dtype="<i4").tobytes()).hexdigest()
    return directory / f"{digest[:32]}.safetensors"


def save_recorded(path: Path, recorded: Recorded) -> None:
    tensors = {"taps": recorded.taps} | ({} if recorded.final is None else {"final": recorded.final})
    save_tensors(path, tensors, {"layer_ids": ",".join(map(str, recorded.layer_ids))})


def load_recorded(path: Path) -> Recorded:
    try:
        with safe_open(path, "pt") as file:
            layer_ids = tuple(int(part) for part in file.metadata()["layer_ids"].split(","))
            final = file.get_tensor("final") if "final" in file.keys() else None  # noqa: SIM118
            return Recorded(layer_ids, file.get_tensor("taps"), final)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a file of recorded features ({error}); remove it") from None
