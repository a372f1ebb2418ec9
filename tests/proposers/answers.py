"""What proposers of one token at a time are tested with: prompts, their answers by transformers, and a run of an engine."""

import functools

from tests.tiny import greedy, make_pair, random_prompts
from volley import Engine, GenerationResult, SamplingParams

PROMPTS = random_prompts(5, longest=30, seed=4)
COUNT = 24
PARAMS = SamplingParams(max_tokens=COUNT)


@functools.cache
def expected() -> list[list[int]]:
    hf = make_pair().hf
    return [greedy(hf, prompt, COUNT) for prompt in PROMPTS]


def run(engine: Engine, params: SamplingParams = PARAMS) -> list[GenerationResult]:
    results = list(engine.generate(PROMPTS, params))
    engine.check_integrity()
    return results
