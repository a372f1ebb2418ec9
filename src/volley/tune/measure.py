"""τ and speed of a pair on prompts that nothing was learnt from, in turn with plain decoding."""

from collections.abc import Sequence
from typing import Any

from volley.bench.run import without_drafter
from volley.engine.capacity import beside_others
from volley.engine.engine import Engine
from volley.types import GenerationResult, SamplingParams

PROMPTS = 8
MAX_TOKENS = 64


def measure(engine: Engine, prompts: Sequence[Any], temperatures: Sequence[float]) -> dict[str, Any]:
    """Prompt by prompt, plain decoding first: a row for each temperature, with chains of the drafter's own block size.

    ``speedup`` is that of the default policy, one request at a time; ``tau`` that of fixed chains. Requests have no seed: with
    one, sampled chains are verified by another rule.
    """
    chosen, plain = prompts[:PROMPTS], without_drafter(engine)
    assert engine.drafter is not None
    block = engine.drafter.config.block_size
    sizes = beside_others(engine.target.device)
    chains = Engine(engine.target, engine.drafter, capacity=sizes, policy=f"fixed:{block}")
    rows = []
    for temperature in sorted(set(temperatures)):
        params = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS)
        seconds, tokens, lengths = [0.0, 0.0], [0, 0], list[int]()
        for index, prompt in enumerate([chosen[0], *chosen]):  # the first once more: it pays for what happens once
            *results, chain = (_answer(each, prompt, params) for each in (plain, engine, chains))
            if index:
                seconds = [sum(pair) for pair in zip(seconds, map(_decode_seconds, results), strict=True)]
                tokens = [sum(pair) for pair in zip(tokens, (len(r.token_ids) - 1 for r in results), strict=True)]
                lengths += chain.stats.accepted_lengths
        shares = [sum(n > k for n in lengths) / max(1, len(lengths)) for k in range(1, block)]
        rows.append(
            {
                "temperature": temperature,
                "tau": sum(lengths) / max(1, len(lengths)),
                "speedup": tokens[1] / seconds[1] * seconds[0] / tokens[0] if seconds[1] and tokens[0] else 0.0,
                "acceptance": [round(share, 4) for share in shares],
            }
        )
    return {"rows": rows, "block_size": block, "prompts": len(chosen)}


def _answer(engine: Engine, prompt: Any, params: SamplingParams) -> GenerationResult:
    engine.reset_prefix_cache()
    (result,) = engine.generate([prompt], params)
    return result


def _decode_seconds(result: GenerationResult) -> float:
    return result.stats.total_seconds - result.stats.time_to_first_token
