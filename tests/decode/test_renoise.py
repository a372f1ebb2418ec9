"""DiffusionGemma's rule against transformers' sampler and stopping criterion, on made-up logits."""

import pytest
import torch
from torch import Tensor
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
    LinearTemperatureScheduleLogitsProcessor,
    StableAndConfidentStoppingCriteria,
)

from tests.diffusion_gemma import TorchNoise
from volley.decode.canvas import Canvas
from volley.decode.renoise import Renoise
from volley.decode.sampling import PositionNoise
from volley.types import DiffusionParams, SamplingParams

LENGTH, VOCAB, STEPS = 6, 11, 7
PARAMS = DiffusionParams(
    canvas_length=LENGTH,
    max_steps=STEPS,
    entropy_bound=1.5,
    t_min=0.4,
    t_max=0.8,
    stability_threshold=1,
    confidence_threshold=1.2,
)


def made_up_passes(seed: int) -> list[Tensor]:
    """Logits of each pass: little changes from some passes to the next, and they grow sharper."""
    torch.manual_seed(seed)
    logits, passes = torch.randn(LENGTH, VOCAB), []
    for step in range(STEPS):
        logits = logits + torch.randn(LENGTH, VOCAB) * float(torch.randint(0, 2, ())) * 0.5
        passes.append(logits * (1 + step))
    return passes


def by_transformers(passes: list[Tensor], stability: int) -> tuple[list[list[int]], list[int]]:
    """What each pass reads, and the best tokens of the last."""
    sampler = EntropyBoundSampler(EntropyBoundSamplerConfig(entropy_bound=1.5), LENGTH, VOCAB, STEPS)
    heat = LinearTemperatureScheduleLogitsProcessor(0.4, 0.8, STEPS)
    settled = StableAndConfidentStoppingCriteria(stability, 1.2)
    canvas = sampler.initialize_canvas(1, torch.device("cpu"))
    read = []
    for left, raw in zip(range(STEPS, 0, -1), passes, strict=True):
        read.append(canvas[0].tolist())
        logits = heat(canvas, raw[None], torch.tensor(left, dtype=torch.int32))
        candidates = torch.multinomial(logits[0].softmax(-1), 1)[:, 0][None]
        canvas = sampler.renoise_canvas(sampler.accept_canvas(canvas, candidates, logits, left), left)
        best = logits.argmax(-1)
        if bool(settled(best, logits)):
            break
    return read, best[0].tolist()


@pytest.mark.parametrize("stability", [0, 1, 2])
def test_canvases_and_ends_are_those_of_transformers(stability: int) -> None:
    params, sampling, ends = DiffusionParams(stability_threshold=stability).over(PARAMS), SamplingParams(), set()
    sampling = SamplingParams(temperature=1.0)
    for seed in range(40):
        passes = made_up_passes(seed)
        torch.manual_seed(seed)
        read, best = by_transformers(passes, stability)
        torch.manual_seed(seed)
        rule, noise = Renoise(VOCAB), TorchNoise()
        canvas = rule.open(0, [], params, noise)
        mine = []
        while not canvas.done:
            mine.append(canvas.tokens.tolist())
            rule.step(canvas, passes[canvas.step], sampling, params, noise)
        assert (mine, canvas.tokens.tolist()) == (read, best)
        ends.add(len(read))
    assert len(ends) > 1, "canvases settle after different numbers of passes"


def stepped(sampling: SamplingParams, given: list[int] | None = None) -> Canvas:
    rule, noise = Renoise(VOCAB), PositionNoise(sampling.seed or 0)
    canvas = rule.open(4, given or [], PARAMS, noise)
    for logits in made_up_passes(3)[:1]:
        rule.step(canvas, logits, sampling, PARAMS, noise)
    return canvas


def test_a_seed_repeats_the_canvas() -> None:
    one, other, again = (stepped(SamplingParams(temperature=1.0, seed=seed)).tokens for seed in (1, 2, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_given_tokens_stay() -> None:
    assert stepped(SamplingParams(temperature=1.0, seed=1), [7, 7, 7]).tokens[:3].tolist() == [7, 7, 7]


def test_greedy_candidates_are_the_best_tokens() -> None:
    canvas = stepped(SamplingParams(temperature=0.0, seed=1))
    taken = canvas.tokens == canvas.history[-1]
    assert int(taken.sum()) >= 1
    torch.testing.assert_close(stepped(SamplingParams(top_k=1, temperature=1.0, seed=1)).tokens, canvas.tokens)
