"""τ and speed of a pair on prompts that nothing was learnt from, in turn with plain decoding."""

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
from volley.tune.data import ROOM

PROMPTS = 8
GREEDY = 20
"""Rounds of greedy answers that a certificate asks for, about."""
JUDGED = 10
"""Tokens that are judged to know how long one takes."""


def measure_seconds(engine: Engine, prompts: Sequence[Any], temperatures: Sequence[float]) -> float:
    """Return the maximum seconds of :func:`measure`, from passes that are timed here, as if no draft were accepted."""
    plain, chosen = without_drafter(engine), prompts[:PROMPTS]
    answer = plain.cycle_seconds(_mean_length(chosen), 1) + ROOM * plain.cycle_seconds(1, 1)
    return 3 * (1 + len(chosen)) * len(set(temperatures)) * answer


def certify_seconds(engine: Engine, prompts: Sequence[Sequence[int]], config: CertifyConfig) -> float:
    """About what certifying takes: answers drawn together, as if no draft were kept, read one by one and judged, and greedy
    ones."""
    assert engine.drafter is not None
    plain, todo = without_drafter(engine), len(ways(engine, config.max_tokens))
    step = engine.cycle_seconds(engine.drafter.config.block_size, AT_ONCE)
    reading = plain.cycle_seconds(_mean_length(prompts) + config.max_tokens, 1)
    tokens = todo * config.sample_size(4 * todo)
    each = step / AT_ONCE + reading / config.max_tokens + _judging_seconds(engine.target.vocab_size)
    return tokens * each + GREEDY * config.max_tokens * step


def _judging_seconds(vocab_size: int) -> float:
    """Return the seconds to judge one sampled token."""
    row, params = torch.randn(vocab_size), SamplingParams(temperature=0.6, top_p=0.9, top_k=20)
    started = time.perf_counter()
    for _ in range(JUDGED):
        distribution(row, params)
    return (time.perf_counter() - started) / JUDGED


def _mean_length(prompts: Sequence[Sequence[int]]) -> int:
    return max(1, sum(map(len, prompts)) // max(1, len(prompts)))


def measure(engine: Engine, prompts: Sequence[Any], temperatures: Sequence[float]) -> dict[str, Any]:
    """Prompt by prompt, plain decoding first: a row for each temperature, with chains of the drafter's own block size.

    ``speedup`` is that of the default policy, one request at a time; ``tau`` that of fixed chains. Requests have no seed: with
    one, sampled chains are verified by another rule.
    """
    chosen, plain = prompts[:PROMPTS], without_drafter(engine)
    assert engine.drafter is not None
    block = engine.drafter.config.block_size
    rows = []
    for temperature in sorted(set(temperatures)):
        params = SamplingParams(temperature=temperature, max_tokens=ROOM)
        seconds, tokens = [0.0, 0.0], [0, 0]
        for index, prompt in enumerate([chosen[0], *chosen]):  # the first once more: it pays for what happens once
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
