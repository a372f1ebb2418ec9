"""Target model from a GGUF file: transformers' own class, whose weights are decoded on demand."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from volley.errors import CheckpointError, ConfigError
from volley.memory.device import free_bytes, memory_bytes
from volley.models.gguf.codes import EMBEDDING, HEAD, codes_for, describe, held_bytes, is_of_experts, plan
from volley.models.gguf.file import GGUFFile, Rows
from volley.models.gguf.target import (
    change_of,
    check_names,
    is_changed,
    read_config,
    row_order,
    scale_frequencies,
    weight_names,
)
from volley.models.gguf.tokens import stop_tokens
from volley.models.layers.empty_weights import empty_weights
from volley.models.layers.fingerprint import stride
from volley.models.layers.host_memory import MappedFiles
from volley.models.layers.products import StoredCodes
from volley.native import blocks, grids
from volley.native.codes import quantise_finely
from volley.native.packing import Codes, StoredBlocks, stacked
from volley.weights import BY_GRID, OF_FILES, PACK, Format, Weights

log = logging.getLogger("volley")

_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Keys below ``general.sampling`` that llama.cpp's converter writes, and transformers' names."""


class FileCodes:
    """Matrix of a file in codes, read some rows at a time: the file's own codes, or int8 ones like Q8_0's."""

    def __init__(
        self,
        file: GGUFFile,
        files: MappedFiles,
        name: str,
        of: Format,
        order: Rows | None = None,
        expert: int | None = None,
    ) -> None:
        """Read a matrix whose rows ``order`` reorders, or that of one ``expert``."""
        self.format = of
        self._file, self._files, self._name = file, files, name
        self.in_blocks = blocks.reads(file.type(name))
        self._blocks = file.blocks(name, order, expert)
        if order is not None:  # the blocks are a copy
            files.forget_bytes(*file.place(name))

    def rows(self, rows: slice) -> Codes | StoredBlocks:
        own = self._blocks[rows]
        if self.in_blocks:
            return StoredBlocks(self.format, own)
        if self.format in BY_GRID.values():
            return grids.take(self._file.type(self._name), own)
        return quantise_finely(self._file.decoded(self._name, own))

    def forget(self, rows: slice) -> None:
        own = self._blocks[rows]
        self._files.forget_bytes(int(own.ctypes.data), own.nbytes)


class UnreadWeights:
    """Weights of a model on the meta device; the weights of a module are decoded when it is filled.

    Linear layers that compute with ``weights`` get a reader of their stored codes (``stored_codes``). So does an embedding whose
    type the kernels read. Experts get readers of all their codes (``stored_experts``).
    """

    def __init__(self, model: PreTrainedModel, file: GGUFFile, weights: Weights) -> None:
        self._file, self._config, self._dtype, self._files = file, model.config, model.dtype, MappedFiles()
        stored, parameters = weight_names(file), dict(model.named_parameters())
        for own in [name for name in model.state_dict() if name not in parameters and name in stored]:
            self._set_buffer(model, own, *stored.pop(own))
        check_names(file, parameters.keys() - stored.keys(), stored.keys() - parameters.keys())
        self._unread = {weight: stored[own] for own, weight in parameters.items()}
        changes = {weight: change_of(file.architecture, own) for own, weight in parameters.items()}
        changed = {weight for weight, names in self._unread.items() if is_changed(file, names[0])}
        self._changes = {
            weight: change for weight, change in changes.items() if change is not None and weight in changed
        }
        for weight in parameters.values():
            self._check_shape(weight)
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                self._places.setdefault(weight, []).append((module, name))
        self._coded = set[nn.Parameter]()
        if weights != "bf16":
            self._attach_codes(weights)

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

    def _attach_codes(self, weights: Weights) -> None:
        kinds = plan(self._file, weights)
        for weight, names in self._unread.items():
            if is_of_experts(names[0]):
                self._attach_experts(weight, names, [kinds.get(name) for name in names])
                continue
            name, modules = names[0], [module for module, _ in self._places[weight]]
            is_embedding = all(isinstance(module, nn.Embedding) for module in modules)  # without a tied head
            kind = OF_FILES.get(self._file.type(name)) if is_embedding else kinds.get(name)
            for module in modules:
                if is_embedding or (type(module) is nn.Linear and module.weight is weight):
                    self._attach(module, weight, name, kind, is_planned=is_embedding or name in kinds)
            if weight in self._coded or name in (HEAD, EMBEDDING):  # perhaps only its codes will be read
                rows, columns = np.divmod(_sampled(weight), weight.shape[1])
                found = self._file.numbers(name, rows, columns, self._order(name))
                weight.sample = found.to(self._dtype).bfloat16()

    def _attach(
        self, module: nn.Module, weight: nn.Parameter, name: str, kind: Format | None, *, is_planned: bool
    ) -> None:
        """Give a module a reader of its codes, of ``kind``; a layer that is not planned to have some stays bf16."""
        if not is_planned:
            module.stays_bf16 = True  # type: ignore[assignment]
        elif kind is not None and weight in self._changes:
            module.stored_codes = partial(_rounded, module)  # type: ignore[assignment]
        elif kind is not None:
            module.stored_codes = partial(FileCodes, self._file, self._files, name, kind, self._order(name))  # type: ignore[assignment]
            self._coded.add(weight)

    def _attach_experts(self, weight: nn.Parameter, names: tuple[str, ...], kinds: Sequence[Format | None]) -> None:
        """Give experts readers of the codes of one of their weights, which is stored in one tensor, or in gate and up."""
        ((module, own),) = self._places[weight]
        readers = vars(module).setdefault("stored_experts", {})
        formats = [kind for kind in kinds if kind is not None]
        if len(formats) < len(names):
            return
        readers[own] = partial(self._codes_of_experts, tuple(zip(names, formats, strict=True)))
        self._coded.add(weight)
        experts, rows, columns = np.unravel_index(_sampled(weight), weight.shape)
        if module.is_transposed:
            rows, columns = columns, rows
        parts, size = np.zeros_like(rows), self._file.shape(names[0])[1]
        if len(names) > 1:
            parts, rows = (rows // size, rows % size) if module.is_concatenated else (rows % 2, rows // 2)
        sampled = torch.empty(len(rows))
        for part, name in enumerate(names):
            of_part = parts == part
            if of_part.any():
                at = (experts * size + rows)[of_part]
                sampled[torch.from_numpy(of_part)] = self._file.numbers(name, at, columns[of_part]).float()
        weight.sample = sampled.to(self._dtype).bfloat16()  # type: ignore[attr-defined]

    def _codes_of_experts(self, tensors: Sequence[tuple[str, Format]]) -> StoredCodes:
        """Return the codes of all experts, stacked, with the parts of each in turns."""
        count, size, _ = self._file.shape(tensors[0][0])
        return stacked(
            (FileCodes(self._file, self._files, name, of, expert=expert), size)
            for expert in range(count)
            for name, of in tensors
        )

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


def _rounded(layer: nn.Module) -> Codes | None:
    """Round the decoded weight of a linear layer to int8 codes; ``None`` if its inputs are no whole groups."""
    weight = layer.get_parameter("weight")
    return quantise_finely(weight) if weight.shape[1] % PACK == 0 else None


def _sampled(weight: nn.Parameter) -> NDArray[np.int64]:
    """Return the indices of the numbers that stand for a weight in fingerprints."""
    return np.arange(0, weight.numel(), stride(weight.numel()))


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
    _check_memory(file, dtype, weights)
    with empty_weights():
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


def _check_memory(file: GGUFFile, dtype: torch.dtype, weights: Weights) -> None:
    """Refuse a file whose weights exceed the memory of this machine; warn about one whose weights exceed the free memory."""
    needed, have, free = held_bytes(file, weights, dtype.itemsize), memory_bytes(torch.device("cpu")), free_bytes()
    codes = codes_for(file)
    how = f"decoded to {str(dtype).removeprefix('torch.')}" if weights == "bf16" else f"with {weights} codes"
    said = f"{file.path}: its weights, {how}, need {needed / 2**30:.1f} GiB of memory"
    if needed > have:
        kept = held_bytes(file, codes) if weights == "bf16" != codes else needed
        keep = f"; in codes, as volley's kernels take them (--weights auto, in bf16 on a CPU), they need {kept / 2**30:.1f}"
        raise ConfigError(
            f"{said}, and this machine has {have / 2**30:.1f}{keep if kept < needed else ''}; use a file of fewer bits a "
            "weight, or a machine with more memory"
        )
    if free is not None and needed > free:
        log.warning("%s, of which %.1f are free now: the system may end this process", said, free / 2**30)


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
