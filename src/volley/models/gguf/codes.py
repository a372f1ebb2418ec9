"""A target from a quantised GGUF file for kernels that compute with codes: its weights are decoded when they are asked for.

Codes of the kernels have other scales than GGUF's blocks of 32, so weights are decoded and rounded again, layer by layer.
"""

import logging
from collections import Counter
from math import prod
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from volley.errors import CheckpointError
from volley.models.gguf.file import GGUFFile
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
from volley.native import GROUP, Weights

log = logging.getLogger("volley")
_CODES: dict[str, Weights] = {"Q8_0": "int8", "Q4_0": "int4", "Q4_K": "int4"}
_SCALES = {"int8": "a scale for each output", "int4": f"groups of {GROUP}"}


def codes_for(file: GGUFFile) -> Weights:
    """The codes that most weights of the layers become; bf16 where they are of another type, or experts."""
    counts: Counter[str] = Counter()
    for name in file:
        if name.startswith("blk.") and len(file.shape(name)) > 1:
            counts[file.type(name)] += prod(file.shape(name))
    if not counts or any("_exps." in name for name in file):
        return "bf16"
    return _CODES.get(counts.most_common(1)[0][0], "bf16")


def describe(file: GGUFFile, weights: Weights) -> str:
    """What becomes of a file's weights: ``Q4_0 requantised to int4, groups of 64``."""
    types = " and ".join(file.quantised_types()) or "weights"
    return f"{types} requantised to {weights}, {_SCALES[weights]}"


class UnreadWeights:
    """Weights of a model on the meta device; those of a module are decoded when it is filled."""

    def __init__(self, model: PreTrainedModel, file: GGUFFile) -> None:
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
    unread = UnreadWeights(model, file)
    log.warning("%s: %s", path, describe(file, weights))
    return model.eval(), unread
