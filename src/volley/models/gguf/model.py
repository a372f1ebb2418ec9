"""Target model from a GGUF file: transformers' own class, whose weights are decoded on demand."""

import logging
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from volley.errors import CheckpointError
from volley.models.gguf.codes import EMBEDDING, HEAD, FileCodes, describe, plan
from volley.models.gguf.file import GGUFFile, Rows
from volley.models.gguf.target import (
    change_of,
    check_names,
    read_config,
    row_order,
    scale_frequencies,
    weight_names,
)
from volley.models.gguf.tokens import stop_tokens
from volley.models.layers.fingerprint import stride
from volley.models.layers.residency import MappedFiles
from volley.models.layers.unfilled import unfilled
from volley.native import Weights
from volley.native.formats import STORED

log = logging.getLogger("volley")

_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Keys below ``general.sampling`` that llama.cpp's converter writes, and transformers' names."""


class UnreadWeights:
    """Weights of a model on the meta device; the weights of a module are decoded when it is filled.

    Linear layers that compute with ``weights`` get a reader of their stored codes (``stored_codes``). So does an embedding whose
    type the kernels read.
    """

    def __init__(self, model: PreTrainedModel, file: GGUFFile, weights: Weights) -> None:
        self._file, self._config, self._dtype, self._files = file, model.config, model.dtype, MappedFiles()
        stored, parameters = weight_names(file), dict(model.named_parameters())
        for own in [name for name in model.state_dict() if name not in parameters and name in stored]:
            self._set_buffer(model, own, *stored.pop(own))
        check_names(file, parameters.keys() - stored.keys(), stored.keys() - parameters.keys())
        self._unread = {weight: stored[own] for own, weight in parameters.items()}
        changes = {weight: change_of(file.architecture, own) for own, weight in parameters.items()}
        self._changes = {weight: change for weight, change in changes.items() if change is not None}
        for weight in parameters.values():
            self._check_shape(weight)
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                self._places.setdefault(weight, []).append((module, name))
        self._coded = set[nn.Parameter]()
        if weights != "bf16":
            self._tell_codes(weights)

    def _set_buffer(self, model: PreTrainedModel, own: str, name: str) -> None:
        """Set a buffer in fp32, as transformers keeps the router's."""
        owner, _, key = own.rpartition(".")
        setattr(model.get_submodule(owner), key, self._file.dense(name))

    def _check_shape(self, weight: nn.Parameter) -> None:
        names = self._unread[weight]
        shapes = [self._file.shape(name) for name in names]
        # Arithmetic on the meta device imports PyTorch's compiler, for two seconds and 100 MiB; it is done on vectors alone.
        devices = ["cpu" if len(shape) < 2 else "meta" for shape in shapes]
        parts = [torch.empty(shape, device=device) for shape, device in zip(shapes, devices, strict=True)]
        try:
            found = tuple(self._made(parts, weight).shape)
        except RuntimeError:  # the change function rejects these shapes
            found = ()
        if found != tuple(weight.shape):
            stored = " and ".join(f"{name} has shape {shape}" for name, shape in zip(names, shapes, strict=True))
            raise CheckpointError(
                f"{self._file.path}: {stored}, where the model has {tuple(weight.shape)}; fetch or convert it again"
            )

    def _tell_codes(self, weights: Weights) -> None:
        kinds = plan(self._file, weights)
        for weight, (name, *_) in self._unread.items():
            modules = [module for module, _ in self._places[weight]]
            is_embedding = all(isinstance(module, nn.Embedding) for module in modules)  # without a tied head
            kind = STORED.get(self._file.type(name)) if is_embedding else kinds.get(name)
            for module in modules:
                if kind is not None and weight not in self._changes and (is_embedding or type(module) is nn.Linear):
                    codes = partial(FileCodes, self._file, self._files, name, kind, self._order(name))
                    module.stored_codes = codes  # type: ignore[assignment]
                    self._coded.add(weight)
            if weight in self._coded or name in (HEAD, EMBEDDING):  # perhaps only its codes will be read
                places = np.arange(0, weight.numel(), stride(weight.numel()))
                found = self._file.numbers(name, places, self._order(name))
                weight.sample = found.to(self._dtype).bfloat16()

    def _order(self, name: str) -> Rows | None:
        return row_order(self._file.architecture, name, self._config)

    def fill(self, module: nn.Module, *, coded: bool = True) -> None:
        """Decode the weights of ``module`` that are not decoded yet, for all modules that share them.

        Without ``coded``, weights that have stored codes stay on the meta device.
        """
        for weight in list(module.parameters()):
            if not coded and weight in self._coded:
                continue
            names = self._unread.pop(weight, ())
            if not names:
                continue
            dense = nn.Parameter(self._decoded(names, weight), requires_grad=False)
            for owner, own in self._places.pop(weight):
                setattr(owner, own, dense)

    def _decoded(self, names: tuple[str, ...], weight: nn.Parameter) -> Tensor:
        parts = []
        for name in names:
            is_changed_vector = weight in self._changes and len(self._file.shape(name)) == 1
            dtype = torch.float32 if is_changed_vector else self._dtype  # self._dtype is less exact
            parts.append(self._file.dense_in(dtype, name, self._order(name)))
            self._files.forget_bytes(*self._file.place(name))
        return self._made(parts, weight).to(self._dtype).contiguous()

    def _made(self, parts: list[Tensor], weight: nn.Parameter) -> Tensor:
        change = self._changes.get(weight)
        if change is not None:
            return change(parts, self._config)
        (found,) = parts
        return found


def _read_sampling(file: GGUFFile, config: GenerationConfig) -> None:
    """Set the sampling defaults of a GGUF file. Its numbers are fp32, so 0.6 is rounded back."""
    for key, name in _SAMPLING.items():
        if (value := file.metadata.get(f"general.sampling.{key}")) is not None:
            setattr(config, name, float(f"{value:.6g}") if isinstance(value, float) else value)


def open_model(
    path: str | Path, dtype: torch.dtype, weights: Weights = "bf16", attention: str | None = None
) -> tuple[PreTrainedModel, UnreadWeights]:
    """Open the model in ``path`` without its weights; the second result fills them in. A notice says how they are loaded."""
    file = GGUFFile(path)
    config = read_config(file)
    with unfilled():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.tie_weights()
    scale_frequencies(file, model)
    model.generation_config.eos_token_id = stop_tokens(file) or None
    _read_sampling(file, model.generation_config)
    unread = UnreadWeights(model, file, weights)
    said = _decoding(file, dtype) if weights == "bf16" else describe(file, weights)
    if said:
        log.warning("%s: %s", path, said)
    return model.eval(), unread


def load_model(path: str | Path, dtype: torch.dtype, attention: str | None = None) -> PreTrainedModel:
    """Load the model in ``path`` in ``dtype`` with quantised weights decoded; a notice says so."""
    model, unread = open_model(path, dtype, attention=attention)
    unread.fill(model)
    return model


def _decoding(file: GGUFFile, dtype: torch.dtype) -> str:
    """Describe how the matrices of a file are decoded: ``weights of type Q6_K are decoded to bfloat16``."""
    name = str(dtype).removeprefix("torch.")
    rounded = [kind for kind in file.plain_types() if kind not in _HELD.get(dtype, ())]
    parts = [f"{', '.join(file.quantised_types())} are decoded to {name}"] * bool(file.quantised_types())
    parts += [f"{', '.join(rounded)} are rounded to {name}"] * bool(rounded)
    return f"weights of type {'; of type '.join(parts)}" if parts else ""


_HELD = {torch.float32: {"F32", "F16", "BF16"}, torch.bfloat16: {"BF16"}, torch.float16: {"F16"}}
"""Types of matrices that a dtype represents exactly."""
