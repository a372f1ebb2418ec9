"""Drafters of volley inside vLLM, as ``custom_class`` proposers. Importing this module does not import vLLM."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from volley.vllm.activation import register
    from volley.vllm.options import PluginOptions, engine_args
    from volley.vllm.proposer import PluginProposer as Proposer

__all__ = ["PluginOptions", "Proposer", "engine_args", "register"]

_HOMES = {
    "Proposer": ("proposer", "PluginProposer"),
    "register": ("activation", "register"),
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use: every process of vLLM imports this module, and so does ``volley --help``."""
    if name not in __all__:
        raise AttributeError(f"module 'volley.vllm' has no attribute {name!r}")
    module, attribute = _HOMES.get(name, ("options", name))
    return getattr(import_module(f"volley.vllm.{module}"), attribute)
