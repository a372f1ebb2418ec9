"""What is done before an engine serves: time passes, capture CUDA graphs, and log how much memory is in use."""

import logging
import time
from typing import TYPE_CHECKING

from volley.decode.lookup import MOST_FOUND
from volley.memory.graphs import MOST_SEGMENTS, StaticPasses
from volley.models.layers.accelerate import weight_bytes
from volley.policies.cost import MOST_TIMED

if TYPE_CHECKING:
    from volley.engine.engine import Engine

log = logging.getLogger("volley")
REACH = 4096
"""Tokens of the longest text whose passes are captured ahead. Longer texts have theirs captured when they come."""


def warm_up(engine: "Engine") -> tuple[int, float]:
    """Capture the CUDA graphs that ``engine`` will need, so that no step waits for it; returns their number and the seconds.

    Graphs serve as many requests as may run at once, texts of up to :data:`REACH` tokens, and drafts as the policy makes them.
    Then the passes that the policy weighs are timed, for which a step would have to wait as well.
    """
    started, policy = time.perf_counter(), engine.policy
    requests, drafted = engine.capacity.max_running, policy.block_size
    if policy.uses_costs:  # which are those of many requests, too
        requests, drafted = MOST_SEGMENTS, max(drafted, MOST_TIMED)
    reach = min(REACH, engine.target.context_length, engine.pool.num_pages * engine.pool.page_size)
    rows = max(policy.block_size, engine.config.tree_nodes or 1, 1 + MOST_FOUND if policy.uses_lookup else 1)
    if engine.runner.passes is not None:
        engine.runner.passes.warm_up(requests, rows, reach, causal=True)
    if engine.proposer is not None and engine.proposer.passes is not None and policy.block_size > 1:
        engine.proposer.passes.warm_up(requests, drafted, reach, causal=False)
    seconds = time.perf_counter() - started
    if policy.uses_costs:
        engine.pacing.costs.rehearse(engine.capacity.max_batch_tokens)
    return sum(passes.num_graphs for passes in _static(engine)), seconds


def memory_of(engine: "Engine") -> dict[str, int]:
    """Bytes in use, by part: weights of target and drafter, their K/V pools, and the CUDA graphs captured so far."""
    held, model = {"target": weight_bytes(engine.target.model), "kv": engine.runner.store.nbytes}, engine.draft_model
    if model is not None:
        held |= {"drafter": weight_bytes(model.drafter), "draft_kv": model.store.nbytes}
    if size := graph_bytes(engine):
        held["graphs"] = size
    return held


def graph_bytes(engine: "Engine") -> int:
    """Bytes of the CUDA graphs captured so far, and of their fixed memory."""
    return sum(passes.nbytes for passes in _static(engine))


def describe_memory(engine: "Engine") -> str:
    """:func:`memory_of` as a line of text."""
    parts = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in memory_of(engine).items())
    return f"memory of {engine.target.device}: {parts}"


def report_memory(engine: "Engine") -> None:
    """Log :func:`describe_memory`, unless the device is the CPU."""
    if engine.target.device.type != "cpu":
        log.info(describe_memory(engine))


def _static(engine: "Engine") -> list[StaticPasses]:
    owners = (engine.runner, engine.proposer)
    return [own.passes for own in owners if own is not None and own.passes is not None]
