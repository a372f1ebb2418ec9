"""Which checkpoints denoise canvases, by their ``config.json``, and which of them a drafter can serve."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from volley.errors import UnsupportedModelError
from volley.files import find_target
from volley.models.gguf.file import is_gguf

NATIVE = {"sdar": "qwen3", "sdar_moe": "qwen3_moe", "fast_dllm_qwen": "qwen2"}
"""Families whose weights are those of an architecture that transformers has: that, by ``model_type`` in lower case."""
DENOISED = (*NATIVE, "diffusion_gemma")
_REFUSED = {
    "llada": "every token sees every other, so no K/V can be kept",
    "dream": "every token sees every other, so no K/V can be kept",
    "llada2_moe": "transformers has no such architecture, and volley runs no code of a checkpoint",
}
_IN_PLACE = "a row of its logits predicts its own token, not the next one"
_NOT_DRAFTED = {
    "sdar": _IN_PLACE,
    "sdar_moe": _IN_PLACE,
    "diffusion_gemma": "its layers' states, which a drafter reads, are not taken out of it",
}


def config_values(path: str | Path) -> dict[str, Any]:
    """What ``config.json`` says; nothing for a GGUF file, or if it cannot be read, as the loader of causal LMs says why."""
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
    """The ``model_type`` in lower case."""
    return str(values.get("model_type", "")).lower()


def canvases(values: Mapping[str, Any]) -> str | None:
    """Whose canvases a model denoises, by its ``config.json``; ``None`` if it is no diffusion language model."""
    kind = kind_of(values)
    if kind in DENOISED or kind in _REFUSED:
        return f"those of {kind}"
    return "by block_diffusion in its config, beside causal text" if "block_diffusion" in values else None


def read_kind(path: str | Path) -> tuple[dict[str, Any], str]:
    """:func:`config_values`, and the kind that they name. Refuses a diffusion language model that volley cannot load."""
    values = config_values(path)
    kind = kind_of(values)
    if kind in _REFUSED:
        raise UnsupportedModelError(
            f"{path} is a {kind} model: {_REFUSED[kind]}. Use a block-diffusion model that volley loads "
            f"({', '.join(DENOISED)})"
            + ("; or load this one yourself and give Target(model, tokenizer, LLADA2)" if kind == "llada2_moe" else "")
        )
    return values, kind


def check_causal(path: str | Path, kind: str) -> None:
    """Refuse what is no causal LM: a diffusion language model with a mode in which a drafter serves it passes."""
    if kind in _NOT_DRAFTED:
        raise UnsupportedModelError(
            f"{path} is a {kind} model, which no drafter serves: {_NOT_DRAFTED[kind]}. It drafts for itself, untrained and "
            "lossless: `volley serve`, `generate` and Engine.from_pretrained take it as it is, with mode 'self' among the "
            "diffusion settings (docs/diffusion.md). Or give a causal LM as the target"
        )
