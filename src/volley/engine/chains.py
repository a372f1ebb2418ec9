"""Measure how many drafts an engine accepts in chains of its drafter's own block size."""

from collections.abc import Sequence
from typing import Any

from volley.engine.engine import Engine
from volley.params import SamplingParams


def accepted_lengths(
    engine: Engine, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams]
) -> list[int]:
    """Return the tokens gained by each cycle of decoding ``prompts``. The engine's settings are restored afterwards."""
    before = engine.config
    engine.block_size = engine.core.proposer.block_size if engine.core.proposer else 1
    try:
        results = list(engine.generate(list(prompts), params))
    finally:
        engine.reconfigure(before)
    return [length for result in results for length in result.stats.accepted_lengths]


def mean_length(lengths: Sequence[int]) -> float:
    """Return τ, the mean tokens gained by a cycle; 0 without cycles."""
    return sum(lengths) / max(1, len(lengths))


def shares(lengths: Sequence[int], block_size: int) -> list[float]:
    """Return the share of cycles that accept at least k drafts, k = 1 … B − 1."""
    at_least = (sum(length > kept for length in lengths) for kept in range(1, block_size))
    return [round(count / max(1, len(lengths)), 4) for count in at_least]
