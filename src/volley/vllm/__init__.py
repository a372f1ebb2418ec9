"""volley's drafters inside vLLM, through vLLM's ``custom_class`` proposers. Importing it does not import vLLM."""

from typing import TYPE_CHECKING, Any

from volley.vllm.options import PluginOptions, engine_args, register

if TYPE_CHECKING:
    from volley.vllm.proposer import Proposer
    from volley.vllm.recorder import Recorder

__all__ = ["PluginOptions", "Proposer", "Recorder", "engine_args", "register"]


def __getattr__(name: str) -> Any:
    """Load a proposer when vLLM asks for it: every process of vLLM imports this module for :func:`register`."""
    if name == "Proposer":
        from volley.vllm.proposer import Proposer

        return Proposer
    if name == "Recorder":
        from volley.vllm.recorder import Recorder

        return Recorder
    raise AttributeError(f"module 'volley.vllm' has no attribute {name!r}")
