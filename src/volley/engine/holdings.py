"""Measure how much memory an engine uses: its models, their K/V pools and its CUDA graphs."""

import logging
from typing import Protocol

from volley.engine.runner import Runner
from volley.memory.graphs import StaticPasses
from volley.models.drafters.draft_model import DraftModel
from volley.models.layers.accelerate import weight_bytes
from volley.models.targets.target import Target
from volley.proposers.base import Proposer

log = logging.getLogger("volley")


class Holder(Protocol):
    """Parts of an engine that use memory."""

    target: Target
    runner: Runner
    draft_model: DraftModel | None
    proposer: Proposer | None


def memory_of(engine: Holder) -> dict[str, int]:
    """Return the bytes in use by part: weights of target and drafter, their K/V pools, and the CUDA graphs captured so far."""
    held, model = {"target": weight_bytes(engine.target.model), "kv": engine.runner.store.nbytes}, engine.draft_model
    if model is not None:
        held |= {"drafter": weight_bytes(model.drafter), "draft_kv": model.store.nbytes}
    if size := graph_bytes(engine):
        held["graphs"] = size
    return held


def graph_bytes(engine: Holder) -> int:
    """Return the bytes of the CUDA graphs captured so far, with their static buffers."""
    return sum(passes.nbytes for passes in static_passes_of(engine))


def describe_memory(engine: Holder) -> str:
    """Return :func:`memory_of` as a line of text."""
    parts = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in memory_of(engine).items())
    return f"memory of {engine.target.device}: {parts}"


def report_memory(engine: Holder) -> None:
    """Log :func:`describe_memory`, unless the device is the CPU."""
    if engine.target.device.type != "cpu":
        log.info(describe_memory(engine))


def static_passes_of(engine: Holder) -> list[StaticPasses]:
    """Return the static passes of the target and of the drafter."""
    owners = (engine.runner, engine.proposer)
    return [own.passes for own in owners if own is not None and own.passes is not None]
