"""A target from a quantised GGUF file for kernels that compute with codes: its weights are decoded when they are asked for.

The kernels have codes with an fp16 scale for 32 inputs, as GGUF's symmetric blocks have them: these are taken as they are.
Weights of other types are rounded again, layer by layer.
"""

import logging
from collections import Counter
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from volley.errors import CheckpointError
from volley.models.gguf.file import GGUFFile, Rows
from volley.models.gguf.target import (
    ROPE_FACTORS,
    check_names,
    own_name,
    read_config,
    row_order,
    scale_frequencies,
    stop_tokens,
)
from volley.models.layers.residency import MappedFiles
from volley.native import GROUP, Codes, Weights
from volley.native.codes import FINE, quantise_finely

log = logging.getLogger("volley")
_CODES: dict[str, Weights] = {"Q8_0": "int8", "Q5_0": "int8", "Q4_0": "int4", "Q4_K": "int4"}
_EXACT: dict[str, Weights] = {"Q8_0": "int8", "Q5_0": "int8", "Q4_0": "int4"}
"""Types of 32 codes with one fp16 scale, which stands before them, and the kernels that have such codes."""
_LAYOUTS = {"int8": "a scale for each output", "int4": f"groups of {GROUP}"}
_JOINED = (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"))
_HEAD, _EMBEDDING = "output.weight", "token_embd.weight"


def codes_for(file: GGUFFile) -> Weights:
    """The codes that most weights of the layers become; bf16 where they are of another type, or experts."""
    most = _most(file)
    return _CODES.get(most, "bf16") if not any("_exps." in name for name in file) else "bf16"


def _most(file: GGUFFile) -> str:
    """The type of most weights of the layers."""
    counts = Counter({"": 0})
    for name in file:
        if name.startswith("blk.") and len(file.shape(name)) > 1:
            counts[file.type(name)] += prod(file.shape(name))
    return counts.most_common(1)[0][0]


def plan(file: GGUFFile, weights: Weights) -> dict[str, Weights | None]:
    """For each matrix of a linear layer the codes in groups of 32 that it is taken over in; ``None``: rounded to ``weights``.

    Where these are the file's own, codes of 8 bits stay, and other types are rounded to int8 in groups of 32; but not in files
    of Q4_K, most of whose weights are rounded to int4. Layers that are one product have codes of one kind.
    """
    own, most = weights == codes_for(file), _most(file)

    def of_type(kind: str) -> Weights | None:
        exact = _EXACT.get(kind)
        if exact == "int4":
            return weights
        if exact is None:
            return "int8" if own and most in _EXACT else None
        return "int8" if own or weights == "int8" else None

    embeds = _HEAD in file.names
    found = {
        name: of_type(file.type(name))
        for name in file
        if len(file.shape(name)) > 1 and not (embeds and name == _EMBEDDING)
    }
    for name in list(found):
        for parts in _JOINED:
            if f".{parts[0]}." in name:
                together = [name.replace(parts[0], part) for part in parts]
                kinds = {found[one] for one in together if one in found}
                if len(kinds) > 1:
                    found |= dict.fromkeys(together, None if None in kinds else "int8")
    return found


def describe(file: GGUFFile, weights: Weights) -> str:
    """What becomes of a file's weights: ``Q4_0 exact in int4, Q6_K rounded again to int8, in groups of 32``."""
    kinds: dict[str, set[Weights | None]] = {}
    for name, kind in plan(file, weights).items():
        kinds.setdefault(file.type(name), set()).add(kind)
    exact: list[str] = []
    fine: list[str] = []
    rest: list[str] = []
    for stored in sorted(kinds):
        codes = " and ".join(sorted(kind for kind in kinds[stored] if kind is not None))
        if codes:
            (exact if stored in _EXACT else fine).append(
                f"{stored} {'exact in' if stored in _EXACT else 'rounded again to'} {codes}"
            )
        if None in kinds[stored]:
            rest.append(stored)
    parts = [f"{', '.join(exact + fine)}, groups of {FINE}"] if exact + fine else []
    parts += [f"{' and '.join(rest)} rounded again to {weights}, {_LAYOUTS[weights]}"] if rest else []
    return "; ".join(parts)


class FileCodes:
    """A matrix of a file in codes in groups of 32, read some rows after others: its own, or rounded to int8 as Q8_0 is."""

    def __init__(self, file: GGUFFile, files: MappedFiles, name: str, kind: Weights, order: Rows | None) -> None:
        self.kind, self.group = kind, FINE
        self._file, self._files, self._name = file, files, name
        self._blocks = file.blocks(name, order)

    def rows(self, rows: slice) -> Codes:
        own, stored = self._blocks[rows], self._file.type(self._name)
        if stored in _EXACT:
            blocks = own.reshape(len(own), -1, _BYTES[stored])
            scales = torch.from_numpy(blocks[..., :2].copy().view(np.float16)[..., 0])
            codes = torch.from_numpy(_whole_numbers(stored, blocks[..., 2:])).flatten(1)
            found = Codes(self.kind, codes, scales)
        else:
            found = quantise_finely(self._file.decoded(self._name, own))
        self._files.forget_bytes(int(own.ctypes.data), own.nbytes)
        return found


_BYTES = {"Q8_0": 34, "Q5_0": 22, "Q4_0": 18}
"""Of a block."""


def _whole_numbers(stored: str, data: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Codes ``[..., 32]`` of what stands behind the scale."""
    if stored == "Q8_0":
        return data.copy().view(np.int8)
    halves = data[..., -16:]
    codes = np.concatenate((halves & 15, halves >> 4), axis=-1)  # the first 16 are the low halves
    if stored == "Q4_0":
        return (codes - 8).view(np.int8)
    fifth = np.unpackbits(data[..., :4], axis=-1, bitorder="little")
    return (codes + 16 * fifth - 16).astype(np.uint8).view(np.int8)


class UnreadWeights:
    """Weights of a model on the meta device; those of a module are decoded when it is filled. Linear layers know their codes."""

    def __init__(self, model: PreTrainedModel, file: GGUFFile, weights: Weights) -> None:
        self._file, self._config, self._dtype, self._files = file, model.config, model.dtype, MappedFiles()
        stored = {own_name(file, name): name for name in file if name != ROPE_FACTORS}
        parameters = dict(model.named_parameters())
        check_names(file, parameters.keys() - stored.keys(), stored.keys() - parameters.keys())
        for own, weight in parameters.items():
            if file.shape(stored[own]) != weight.shape:
                raise CheckpointError(
                    f"{file.path}: {stored[own]} has shape {file.shape(stored[own])}, where the model has "
                    f"{tuple(weight.shape)}; fetch or convert it again"
                )
        self._unread = {weight: stored[own] for own, weight in parameters.items()}
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                self._places.setdefault(weight, []).append((module, name))
        kinds = plan(file, weights)
        for weight, name in self._unread.items():
            kind = kinds.get(name)
            for module, _ in self._places[weight]:
                if kind is not None and type(module) is nn.Linear:
                    order = row_order(file.architecture, name, self._config)
                    module.stored_codes = partial(FileCodes, file, self._files, name, kind, order)  # type: ignore[assignment]

    def fill(self, module: nn.Module) -> None:
        """Decode the weights of ``module`` that were not decoded before, for all modules that share them."""
        for weight in list(module.parameters()):
            name = self._unread.pop(weight, None)
            if name is None:
                continue
            order = row_order(self._file.architecture, name, self._config)
            dense = nn.Parameter(self._file.dense_in(self._dtype, name, order), requires_grad=False)
            self._files.forget_bytes(*self._file.place(name))
            for owner, own in self._places.pop(weight):
                setattr(owner, own, dense)


def open_model(path: str | Path, dtype: torch.dtype, weights: Weights) -> tuple[PreTrainedModel, UnreadWeights]:
    """The model in ``path`` without its weights, and what fills them in; a notice says that they become codes."""
    file = GGUFFile(path)
    config = read_config(file)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.tie_weights()
    base = model.get_decoder()
    base.rotary_emb = type(base.rotary_emb)(config)  # its frequencies are in no file
    scale_frequencies(file, model)
    model.generation_config.eos_token_id = stop_tokens(file) or None
    unread = UnreadWeights(model, file, weights)
    log.warning("%s: %s", path, describe(file, weights))
    return model.eval(), unread
