"""Options for the models of a command, and the engine that they describe."""

import atexit
import os
import re
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

import typer

from volley.config import CapacityConfig, DecodingConfig
from volley.errors import ConfigError
from volley.files import BUNDLED_TARGETS, REFERENCE
from volley.imports import import_transformers, quick_imports
from volley.options import Without, on_command_line

if TYPE_CHECKING:
    from volley.engine.engine import Engine


_REACHED_WITHIN = 5.0  # seconds
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")

Capacity = Annotated[CapacityConfig, Without("cuda_graphs", "num_pages", "num_states", "page_size")]
"""Capacity on the command line, where ``kv_mib`` sets the size of the K/V."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options for the models and the device that runs them."""

    target: str | None = None
    """Target: folder, hub name or GGUF file; by default the bundled one. reference-diffusion is the bundled diffusion model."""
    drafter: str | None = None
    """Drafter: folder or GGUF file, or 'none' to draft by prompt lookup alone; by default the bundled one of the target, if
    there is one: reference (also -dflash and -markov), and smollm2-135m and qwen2.5-coder-0.5b for these models and
    their fine-tunes."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Data type of both models."""
    device: str = "auto"
    """Torch device, such as cpu or cuda; auto is the GPU if there is one."""
    weights: Literal["auto", "bf16", "int8", "int4"] = "auto"
    """Format of the target's weights on a CPU: bf16, or quantised to int8 or int4, which changes what the target computes;
    auto is bf16, or quantised for a quantised GGUF file."""
    long_context: bool = False
    """Let a longrope target (Phi-3, Phi-4-mini) use its long factors at every position, beyond its original context."""
    draft_weights: Literal["auto", "bf16", "int8", "int4"] = "auto"
    """Format of the drafter's weights and head: int8 and int4 are for a CPU. It changes acceptance, never the
    output. auto is the target's quantisation, or int8 beside bf16 on a CPU with AVX512's dot products."""
    threads: int | None = None
    """Maximum number of CPU threads, by default torch's choice; fewer are used while other processes keep cores busy."""
    tensor_parallel: bool = False
    """Shard a target that fits no single device over the processes of torchrun; the first one answers."""


ModelArgument = Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Target, as --target gives it.")]


def names_model(word: str) -> bool:
    """Return whether ``word`` is a file, a folder, a bundled target, or has the form of a hub name."""
    return names_file(word) or ("/" in word and _HUB_NAME.fullmatch(word) is not None)


def names_file(word: str) -> bool:
    """Return whether ``word``, perhaps a long prompt, is a file, a folder or a bundled target."""
    return os.path.exists(word) or word in BUNDLED_TARGETS  # Path.exists raises for long names


def with_target(models: ModelOptions, model: str | None) -> ModelOptions:
    """Return the options with the target that was given as an argument, if one was."""
    if model is None:
        return models
    if on_command_line("target"):
        raise ConfigError(f"two targets are given, {model} and {models.target}; give one of them")
    return replace(models, target=model)


def _go_offline(name: str) -> None:
    """Set huggingface_hub's offline mode if ``name`` is on the hub and the hub is not reached; it would try for a minute.

    A model that was fetched before then loads at once. Nothing is tried behind a proxy, or if the mode is set already.
    """
    proxies = {"HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"}
    if names_file(name) or not _HUB_NAME.fullmatch(name) or "HF_HUB_OFFLINE" in os.environ or proxies & set(os.environ):
        return
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), _REACHED_WITHIN).close()
    except OSError:
        typer.echo(f"{hub.hostname} is not reached: only models that were fetched before are found", err=True)
        os.environ["HF_HUB_OFFLINE"] = "1"


def load_engine(
    models: ModelOptions, decoding: DecodingConfig | None = None, capacity: CapacityConfig | None = None
) -> "Engine":
    """Return the engine that the options describe. For speed, part of transformers is not imported unless it already was."""
    if models.target is not None:
        _go_offline(models.target)
    with quick_imports():
        import torch

        if not models.tensor_parallel and (models.device == "cpu" or not torch.cuda.is_available()):
            import_transformers()
        from volley.engine.engine import Engine
        from volley.models.layers.host_memory import forget_libraries
        from volley.models.targets.diffusion import load_target

    atexit.register(forget_libraries)  # the end of the process reads pages of libraries that it has not used
    if models.threads is not None:
        if models.threads < 1:
            raise ConfigError(f"threads is {models.threads}; it must be at least 1")
        torch.set_num_threads(models.threads)
    named = ("device", "weights", "draft_weights", "tensor_parallel")
    options: dict[str, Any] = {name: getattr(models, name) for name in named}
    if models.drafter is not None:
        options["drafter"] = models.drafter
    dtype = getattr(torch, models.dtype)
    target: Any = models.target
    if models.long_context and models.tensor_parallel:
        raise ConfigError("long_context is for a target in one process; leave it or tensor_parallel out")
    if models.long_context:
        target = load_target(models.target or REFERENCE / "target", dtype, models.device, models.weights)
        target.use_long_factors()
        options["weights"] = "auto"
    return Engine.from_pretrained(target, dtype=dtype, config=decoding, capacity=capacity, **options)
