"""Recognise by ``config.json`` checkpoints that denoise canvases, and those that a drafter can serve."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from volley.errors import UnsupportedModelError
from volley.files import find_target
from volley.models.gguf.file import is_gguf
from volley.models.targets.families import family_names, family_of

_REFUSED = {
    "llada": "every token sees every other, so no K/V can be kept",
    "dream": "every token sees every other, so no K/V can be kept",
    "llada2_moe": "transformers has no such architecture, and volley runs no code of a checkpoint. Register a class for it and "
    "its rules (docs/extending.md, A family of diffusion models)",
}


def config_values(path: str | Path) -> dict[str, Any]:
    """Return the values of ``config.json``; none for a GGUF file or an unreadable config, which the causal LM loader reports."""
    path = find_target(path)
    if is_gguf(path):
        return {}
    try:
        values, _ = PretrainedConfig.get_config_dict(path)
    except Exception:
        return {}
    found: dict[str, Any] = values
    return found


def kind_of(values: Mapping[str, Any]) -> str:
    """Return the ``model_type`` in lower case."""
    return str(values.get("model_type", "")).lower()


def canvases(values: Mapping[str, Any]) -> str | None:
    """Describe the canvases that a model denoises, by its ``config.json``; ``None`` if it is no diffusion language model."""
    kind = kind_of(values)
    if family_of(kind) is not None or kind in _REFUSED:
        return f"those of {kind}"
    return "by block_diffusion in its config, beside causal text" if "block_diffusion" in values else None


def read_kind(path: str | Path) -> tuple[dict[str, Any], str]:
    """Return :func:`config_values` and their model type. Refuse a diffusion language model that volley cannot load."""
    values = config_values(path)
    kind = kind_of(values)
    if kind in _REFUSED and family_of(kind) is None:
        raise UnsupportedModelError(
            f"{path} is a {kind} model: {_REFUSED[kind]}. Use a block-diffusion model that volley loads "
            f"({', '.join(family_names())})"
        )
    return values, kind


def check_causal(path: str | Path, kind: str) -> None:
    """Refuse a diffusion language model, unless a drafter can serve it in one of its modes."""
    family = family_of(kind)
    if family is not None and family.undrafted is not None:
        raise UnsupportedModelError(
            f"{path} is a {kind} model, which no drafter serves: {family.undrafted}. It drafts for itself, untrained and "
            "lossless: `volley serve`, `generate` and Engine.from_pretrained take it as it is, with mode 'self' among the "
            "diffusion settings (docs/diffusion.md). Or give a causal LM as the target"
        )
