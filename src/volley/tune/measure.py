"""Measure τ and speed of a pair on held-out prompts, in turn with plain decoding."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from volley.bench.run import without_drafter
from volley.certify.options import CertifyConfig
from volley.certify.reference import distribution
from volley.certify.sampled import AT_ONCE, ways
from volley.engine.chains import accepted_lengths, mean_length, shares
from volley.engine.engine import Engine
from volley.params import SamplingParams
from volley.results import GenerationResult
from volley.tune.data import ANSWER_TOKENS

PROMPTS = 8
GREEDY = 20
"""Approximate number of rounds of greedy answers for a certificate."""
JUDGED = 10
"""Number of tokens that are judged to measure the time of one."""


def measure_seconds(engine: Engine, prompts: Sequence[Any], temperatures: Sequence[float]) -> float:
    """Estimate the most seconds of :func:`measure` by timing passes, as if no draft token were accepted."""
    plain, chosen = without_drafter(engine), prompts[:PROMPTS]
    answer = plain.cycle_seconds(_mean_length(chosen), 1) + ANSWER_TOKENS * plain.cycle_seconds(1, 1)
    return 3 * (1 + len(chosen)) * len(set(temperatures)) * answer


def certify_seconds(engine: Engine, prompts: Sequence[Sequence[int]], config: CertifyConfig) -> float:
    """Estimate the seconds of certifying: sampled answers decoded together, as if no draft token were accepted, then read one by
    one and judged, and greedy answers."""
    assert engine.drafter is not None
    plain, todo = without_drafter(engine), len(ways(engine, config.max_tokens))
    step = engine.cycle_seconds(engine.drafter.config.block_size, AT_ONCE)
    reading = plain.cycle_seconds(_mean_length(prompts) + config.max_tokens, 1)
    tokens = todo * config.sample_size(4 * todo)
    each = step / AT_ONCE + reading / config.max_tokens + _judging_seconds(engine.target.vocab_size)
    return tokens * each + GREEDY * config.max_tokens * step


def _judging_seconds(vocab_size: int) -> float:
    """Measure the seconds to judge one sampled token."""
    row, params = torch.randn(vocab_size), SamplingParams(temperature=0.6, top_p=0.9, top_k=20)
    started = time.perf_counter()
    for _ in range(JUDGED):
        distribution(row, params)
    return (time.perf_counter() - started) / JUDGED


def _mean_length(prompts: Sequence[Sequence[int]]) -> int:
    return max(1, sum(map(len, prompts)) // max(1, len(prompts)))


def measure(engine: Engine, prompts: Sequence[Any], temperatures: Sequence[float]) -> dict[str, Any]:
    """Decode each prompt plainly and then speculatively. Return a row for each temperature.

    ``speedup`` is that of the default policy with one request at a time. ``tau`` is that of chains of the drafter's own block
    size. Requests have no seed, because seeded sampled chains are verified by another rule.
    """
    chosen, plain = prompts[:PROMPTS], without_drafter(engine)
    assert engine.drafter is not None
    block = engine.drafter.config.block_size
    rows = []
    for temperature in sorted(set(temperatures)):
        params = SamplingParams(temperature=temperature, max_tokens=ANSWER_TOKENS)
        seconds, tokens = [0.0, 0.0], [0, 0]
        for index, prompt in enumerate([chosen[0], *chosen]):  # the first prompt is decoded twice, to warm up
            results = [_answer(each, prompt, params) for each in (plain, engine)]
            if index:
                seconds = [sum(pair) for pair in zip(seconds, map(_decode_seconds, results), strict=True)]
                tokens = [sum(pair) for pair in zip(tokens, (len(r.token_ids) - 1 for r in results), strict=True)]
        lengths = accepted_lengths(engine, chosen, params)
        rows.append(
            {
                "temperature": temperature,
                "tau": mean_length(lengths),
                "speedup": tokens[1] / seconds[1] * seconds[0] / tokens[0] if seconds[1] and tokens[0] else 0.0,
                "acceptance": shares(lengths, block),
            }
        )
    return {"rows": rows, "block_size": block, "prompts": len(chosen)}


def _answer(engine: Engine, prompt: Any, params: SamplingParams) -> GenerationResult:
    engine.reset_prefix_cache()
    (result,) = engine.generate([prompt], params)
    return result


def _decode_seconds(result: GenerationResult) -> float:
    return result.stats.total_seconds - result.stats.time_to_first_token
