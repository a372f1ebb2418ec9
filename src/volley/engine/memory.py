"""Measure how much memory an engine uses: its models, their K/V pools and its CUDA graphs."""

import logging

from volley.engine.core import EngineCore
from volley.memory.graphs import StaticPasses
from volley.models.layers.accelerate import weight_bytes

log = logging.getLogger("volley")


def memory_of(core: EngineCore) -> dict[str, int]:
    """Return the bytes in use by part: weights of target and drafter, their K/V pools, and the CUDA graphs captured so far."""
    held, model = {"target": weight_bytes(core.target.model), "kv": core.runner.store.nbytes}, core.draft_model
    if model is not None:
        held |= {"drafter": weight_bytes(model.drafter), "draft_kv": model.store.nbytes}
    if size := graph_bytes(core):
        held["graphs"] = size
    return held


def graph_bytes(core: EngineCore) -> int:
    """Return the bytes of the CUDA graphs captured so far, with their static buffers."""
    return sum(passes.nbytes for passes in static_passes_of(core))


def describe_memory(core: EngineCore) -> str:
    """Return :func:`memory_of` as a line of text."""
    parts = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in memory_of(core).items())
    return f"memory of {core.target.device}: {parts}"


def report_memory(core: EngineCore) -> None:
    """Log :func:`describe_memory`, unless the device is the CPU."""
    if core.target.device.type != "cpu":
        log.info(describe_memory(core))


def static_passes_of(core: EngineCore) -> list[StaticPasses]:
    """Return the static passes of the target and of the drafter."""
    owners = (core.runner, core.proposer)
    return [own.passes for own in owners if own is not None and own.passes is not None]
