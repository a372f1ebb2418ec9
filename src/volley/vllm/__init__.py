"""volley's drafters inside vLLM, through vLLM's ``custom_class`` proposers. Importing it does not import vLLM."""

from typing import TYPE_CHECKING, Any

from volley.vllm.options import PluginOptions, engine_args, register

if TYPE_CHECKING:
    from volley.vllm.proposer import Proposer

__all__ = ["PluginOptions", "Proposer", "engine_args", "register"]


def __getattr__(name: str) -> Any:
    """Load the proposer when vLLM asks for it: every process of vLLM imports this module for :func:`register`."""
    if name != "Proposer":
        raise AttributeError(f"module 'volley.vllm' has no attribute {name!r}")
    from volley.vllm.proposer import Proposer

    return Proposer
