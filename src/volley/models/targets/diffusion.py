"""Block-diffusion language models: the settings of their families, and the loaders of their checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from volley.errors import CheckpointError, ConfigError, UnsupportedModelError
from volley.files import find_target
from volley.memory.device import usable_device
from volley.models.layers.accelerate import accelerate
from volley.models.quantised.scheme import load_model
from volley.models.targets.block_diffusion import BlockDiffusion
from volley.models.targets.canvases import check_causal, read_kind
from volley.models.targets.families import JOINT, DiffusionFamily, family_of
from volley.models.targets.folders import check_files
from volley.models.targets.loading import (
    announce_download,
    bar_of_a_long_load,
    keep_codes,
    load_config,
    reading,
    straight_to,
)
from volley.models.targets.target import TARGET_FILES, Target, load_tokenizer
from volley.native import TargetWeights
from volley.params import DiffusionParams, Strategy
from volley.tensors import dtype_of

SELF_STRATEGY: Strategy = "low_confidence_static"
"""Strategy of self-speculation, which drafts whole canvases."""

_LENGTH_KEYS = ("block_size", "block_length", "bd_size")
_MASKED = ("threshold", "sub_block")
_RENOISED = ("t_min", "t_max", "stability_threshold", "confidence_threshold")
"""Settings that only models with mask tokens read, and settings that only models with random tokens read."""


def load_target(
    path: str | Path | Target,
    dtype: torch.dtype | str,
    device: str | torch.device,
    weights: TargetWeights = "auto",
    *,
    tensor_parallel: bool = False,
    drafted: bool = False,
) -> Target:
    """Load a target from a folder or the hub: a causal LM or a diffusion language model, by the ``model_type`` of its config.

    A loaded target is returned as it is; ``weights`` and ``tensor_parallel`` then raise ConfigError. A causal LM whose config has
    ``block_diffusion`` decodes both ways. ``reference-diffusion`` is the bundled diffusion model. ``tensor_parallel`` divides a
    causal LM over the processes of torchrun (:mod:`volley.models.targets.sharded`). With ``drafted``, a target that no drafter
    can serve is refused before its weights are read.
    """
    dtype = dtype_of(dtype)
    if isinstance(path, Target):
        if weights != "auto" or tensor_parallel:
            raise ConfigError(
                "weights and tensor_parallel say how a target is loaded; give its folder, or load it with them"
            )
        return path
    if tensor_parallel:
        from volley.models.targets.sharded import (
            ShardedTarget,
        )  # imported here, because it loads torch's distributed tensors

        _check_divisible(find_target(path))
        return ShardedTarget.from_pretrained(path, dtype, device, weights)
    path = find_target(path)
    values, kind = read_kind(path)
    if drafted:
        check_causal(path, kind)
    announce_download(path)
    remedy, family = f"give a hub name or a folder with {TARGET_FILES}", family_of(kind)
    if weights not in ("auto", "bf16") and family is not None:
        raise ConfigError(f"weights={weights!r} is for autoregressive targets; load this one with weights='bf16'")
    if family is not None:
        check_files(path)
        with reading(path, "the diffusion model", remedy), bar_of_a_long_load():
            target = _load_denoised(path, values, family, dtype, device)
    else:
        target = Target.from_pretrained(path, dtype, device, weights)
    if (own := values.get("block_diffusion")) is not None:
        target.diffusion = _as_told(path, own, target)
    return target


def _check_divisible(path: str | Path) -> None:
    """Refuse to divide a diffusion language model."""
    _, kind = read_kind(path)
    if family_of(kind) is not None:
        raise UnsupportedModelError(
            f"{path} is a {kind} model, which tensor_parallel does not support; leave tensor_parallel out"
        )


def _as_told(path: str | Path, own: Any, target: Target) -> BlockDiffusion:
    """Return the family with the settings of a config's ``block_diffusion``: the mask token of a joint model, and defaults."""
    family, is_joint = target.diffusion or JOINT, target.diffusion is None
    masked = "with the mask_token_id, a token of the model, and" if is_joint else "without a mask, with"
    remedy = f'{path}: "block_diffusion" in config.json must be an object {masked} defaults of requests'
    said = dict(own) if isinstance(own, dict) else {}
    mask, symmetric = said.pop("mask_token_id", None), said.pop("symmetric_window", family.symmetric_window)
    if type(symmetric) is not bool or (symmetric and family.mask_token_id is not None):
        raise CheckpointError(
            f"{path}: symmetric_window is {symmetric!r} in block_diffusion of config.json; it is true or false, and true for "
            "DiffusionGemma alone, whose canvases have windows"
        )
    is_token = type(mask) is int and mask in range(target.vocab_size)
    if not isinstance(own, dict) or (not is_token if is_joint else mask is not None):
        raise CheckpointError(f"{remedy}; it is {own!r}")
    try:
        settings = DiffusionParams.from_mapping(said)
        refuse_unread(settings, family)
    except ConfigError as error:
        raise CheckpointError(f"{remedy}: {error}") from None
    mask = mask if is_joint else family.mask_token_id
    return replace(family, mask_token_id=mask, symmetric_window=symmetric, own=settings)


def refuse_unread(settings: DiffusionParams, family: BlockDiffusion) -> None:
    """Refuse with ConfigError settings that a model with this kind of noise does not read."""
    renoises = family.mask_token_id is None
    begins = f"its canvases begin with {'random' if renoises else 'mask'} tokens"
    if settings.strategy is not None and (settings.strategy == "entropy_renoise") != renoises:
        why = "canvases of random tokens have one rule" if renoises else begins
        told = f"strategy {settings.strategy!r} is not for this model: {why}; leave it out, or give another"
        raise ConfigError(told, field="diffusion.strategy")
    unread, read = (_MASKED, _RENOISED) if renoises else (_RENOISED, _MASKED)
    for name in unread:
        if getattr(settings, name) is not None:
            told = f"{name} is not for this model: {begins}; leave it out, or set one of {', '.join(read)}"
            raise ConfigError(told, field=f"diffusion.{name}")


def _load_denoised(
    path: str | Path, values: dict[str, Any], family: DiffusionFamily, dtype: torch.dtype, device: str | torch.device
) -> Target:
    if family.load is not None:
        return family.load(path, dtype, device)
    assert family.rules is not None, "a family without a loader has rules"
    where = usable_device(device)
    model = load_model(AutoModelForCausalLM, path, load_config(path), dtype, **straight_to(where)).to(where).eval()
    keep_codes(model, path)
    accelerate(model, release=True)
    tokenizer = load_tokenizer(path)
    return Target(model, tokenizer, _as_saved(family.rules, values, tokenizer))


def _as_saved(family: BlockDiffusion, values: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> BlockDiffusion:
    """Return the family with the mask token and the block length of the checkpoint."""
    mask = values.get("mask_token_id")
    mask = tokenizer.mask_token_id if mask is None else mask
    lengths = [values[key] for key in _LENGTH_KEYS if isinstance(values.get(key), int)]
    defaults = replace(family.defaults, canvas_length=lengths[0]) if lengths else family.defaults
    return replace(family, mask_token_id=family.mask_token_id if mask is None else mask, defaults=defaults)
