"""Table of the families of block-diffusion language models by ``model_type``, which other packages extend.

A package registers its family in a function that its ``pyproject.toml`` names under the entry points ``volley.families``. All
commands then accept its checkpoints.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from volley.errors import ConfigError
from volley.models.targets.block_diffusion import BlockDiffusion
from volley.params import DiffusionParams

if TYPE_CHECKING:
    import torch

    from volley.models.targets.target import Target

Loader = Callable[[str | Path, "torch.dtype", "str | torch.device"], "Target"]
"""Load the target in a folder: ``load(path, dtype, device)``; it sets :attr:`Target.diffusion`."""

ENTRY_POINTS = "volley.families"

SDAR = BlockDiffusion(
    mask_token_id=151669,
    is_aligned=True,
    defaults=DiffusionParams(canvas_length=4, strategy="low_confidence_dynamic", threshold=0.9),
)
"""SDAR and its relatives (Efficient-DLM, a2d): mask tokens, row i of the logits is for token i, blocks are bidirectional."""
FAST_DLLM = BlockDiffusion(
    mask_token_id=151665,
    is_aligned=True,
    is_shifted=True,
    writes_causally=True,
    defaults=DiffusionParams(canvas_length=32, strategy="low_confidence_dynamic", threshold=0.9, sub_block=8),
)
"""Fast-dLLM v2: like SDAR, but row i of the logits predicts token i + 1, also in a causal pass, which is a block of one token."""
JOINT = BlockDiffusion(
    mask_token_id=0,
    has_causal_context=True,
    writes_causally=True,
    defaults=DiffusionParams(canvas_length=8, strategy="low_confidence_dynamic", threshold=0.9),
)
"""Causal LM that was also trained to fill masks (TiDAR, arXiv 2511.08923): committed text stays causal, and canvases begin
anywhere. Its config has ``block_diffusion`` with ``mask_token_id`` and the defaults of requests by their names."""


@dataclass(frozen=True, kw_only=True)
class DiffusionFamily:
    """Family of models: its rules, and the loader of its checkpoints."""

    rules: BlockDiffusion | None
    """Properties of the family; ``None``: ``load`` sets them."""
    architecture: str | None = None
    """``model_type`` of the transformers class for the weights; ``None``: the family's own, registered with ``AutoModel``."""
    load: Loader | None = None
    """Loader of a checkpoint that replaces transformers' ``AutoModelForCausalLM``."""
    undrafted: str | None = None
    """Reason why no drafter can serve the family; ``None`` if one can, in the mode ``autoregressive``."""


def _load_diffusion_gemma(path: str | Path, dtype: "torch.dtype", device: "str | torch.device") -> "Target":
    from volley.models.targets.diffusion_gemma import DiffusionGemma  # it loads many modules of transformers

    return DiffusionGemma.from_folder(path, dtype, device)


_IN_PLACE = "a row of its logits predicts its own token, not the next one"
_FAMILIES: dict[str, DiffusionFamily] = {
    "sdar": DiffusionFamily(rules=SDAR, architecture="qwen3", undrafted=_IN_PLACE),
    "sdar_moe": DiffusionFamily(rules=SDAR, architecture="qwen3_moe", undrafted=_IN_PLACE),
    "fast_dllm_qwen": DiffusionFamily(rules=FAST_DLLM, architecture="qwen2"),
    "diffusion_gemma": DiffusionFamily(
        rules=None,
        load=_load_diffusion_gemma,
        undrafted="its layers' states, which a drafter reads, are not taken out of it",
    ),
}


def register_family(
    model_type: str,
    rules: BlockDiffusion,
    *,
    architecture: str | None = None,
    load: Loader | None = None,
) -> None:
    """Register ``model_type``, so that every command and :class:`volley.Engine` take its checkpoints; canvases follow ``rules``.

    ``load(path, dtype, device)`` reads the weights. Without it transformers does, with the class of ``architecture`` or the class
    that ``AutoModelForCausalLM.register`` was given for the model type. Attention must go through transformers'
    ``AttentionInterface``. A model whose row i predicts token i takes no drafter (``writes_causally`` is false); it drafts for
    itself. Raise :class:`ConfigError` if the model type is one of volley's own.
    """
    kind = model_type.lower()
    if kind in _OWN:
        raise ConfigError(f"{model_type!r} is a family of volley's own; register yours under its own model_type")
    undrafted = None if rules.writes_causally else _IN_PLACE
    _FAMILIES[kind] = DiffusionFamily(rules=rules, architecture=architecture, load=load, undrafted=undrafted)


_OWN = frozenset(_FAMILIES)


def family_of(kind: str) -> DiffusionFamily | None:
    """Return the family of a ``model_type`` in lower case, or ``None`` for that of a causal LM."""
    if kind and kind not in _FAMILIES:
        _register_installed()
    return _FAMILIES.get(kind)


def family_names() -> list[str]:
    """Return the model types of all families."""
    _register_installed()
    return list(_FAMILIES)


@cache
def _register_installed() -> None:
    """Call the registering functions of installed packages, once."""
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()()
