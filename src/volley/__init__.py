"""Lossless block-diffusion speculative decoding."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from volley.config import CapacityConfig, DecodingConfig
    from volley.engine.engine import Engine
    from volley.grammar import Grammar
    from volley.models.drafters.drafter import Drafter
    from volley.models.targets.families import register_family
    from volley.models.targets.target import Target
    from volley.params import DiffusionParams, SamplingParams
    from volley.policies.base import Policy
    from volley.proposers.base import Proposer
    from volley.results import GenerationResult, GenerationStats, TextChunk

__all__ = [
    "CapacityConfig",
    "DecodingConfig",
    "DiffusionParams",
    "Drafter",
    "Engine",
    "GenerationResult",
    "GenerationStats",
    "Grammar",
    "Policy",
    "Proposer",
    "SamplingParams",
    "Target",
    "TextChunk",
    "register_family",
]
__version__ = "0.1.0"

_HOMES = {
    "CapacityConfig": "volley.config",
    "DecodingConfig": "volley.config",
    "Drafter": "volley.models.drafters.drafter",
    "DiffusionParams": "volley.params",
    "Engine": "volley.engine.engine",
    "GenerationResult": "volley.results",
    "GenerationStats": "volley.results",
    "Grammar": "volley.grammar",
    "Policy": "volley.policies.base",
    "Proposer": "volley.proposers.base",
    "SamplingParams": "volley.params",
    "Target": "volley.models.targets.target",
    "TextChunk": "volley.results",
    "register_family": "volley.models.targets.families",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that ``volley --help`` does not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'volley' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
