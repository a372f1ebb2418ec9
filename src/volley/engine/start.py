"""Warm up an engine before it serves: capture CUDA graphs and time passes."""

import time

from volley.cores import shared_cores
from volley.decode.lookup import MOST_LOOKUP_TOKENS
from volley.engine.engine import Engine
from volley.engine.memory import static_passes_of
from volley.memory.graphs import MOST_ROWS, MOST_SEGMENTS
from volley.policies.cost import MOST_TIMED

REACH = 4096
"""Longest text, in tokens, whose passes are captured in advance. Passes of longer texts are captured when they come."""

MOST_BESIDE = 8
"""Most requests in a pass that is captured in advance for prompts."""


@shared_cores()
def warm_up(engine: Engine) -> tuple[int, float]:
    """Capture the CUDA graphs that ``engine`` will need, so that no step waits for it. Return their number and the seconds.

    Graphs cover as many requests as may run at once, texts of up to :data:`REACH` tokens, and the policy's draft lengths. Then
    the passes that the policy compares are timed, so that no step waits for that either.
    """
    started, policy = time.perf_counter(), engine.policy
    requests, drafted = engine.capacity.max_running, policy.block_size
    if policy.uses_costs:  # the policy also compares passes of many requests
        requests, drafted = MOST_SEGMENTS, max(drafted, MOST_TIMED)
    reach = min(REACH, engine.target.context_length, engine.core.pool.num_pages * engine.core.pool.page_size)
    rows = max(policy.block_size, engine.config.tree_nodes or 1, 1 + MOST_LOOKUP_TOKENS if policy.uses_lookup else 1)
    if engine.core.runner.passes is not None:
        engine.core.runner.passes.warm_up(requests, rows, reach, causal=True)
        most = min(requests, MOST_BESIDE)
        engine.core.runner.passes.warm_up(most, MOST_ROWS, reach, causal=True, least=rows + 1)  # prompts
        family = engine.target.diffusion
        if family is not None and (length := family.settings.canvas_length) is not None:
            # A pass that commits a canvas also holds the next canvas.
            has_feedback = engine.target.takes_feedback
            least = -(-length // 2)  # a bucket for four requests has fewer rows for each of three
            engine.core.runner.passes.warm_up(
                requests, 2 * length, reach, causal=False, least=least, has_feedback=has_feedback
            )
    if engine.core.proposer is not None and engine.core.proposer.passes is not None and policy.block_size > 1:
        engine.core.proposer.passes.warm_up(requests, drafted, reach, causal=False)
    seconds = time.perf_counter() - started
    if policy.uses_costs:
        engine.core.pacing.costs.rehearse(engine.capacity.max_batch_tokens)
    return sum(passes.num_graphs for passes in static_passes_of(engine.core)), seconds
