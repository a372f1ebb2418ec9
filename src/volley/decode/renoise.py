"""DiffusionGemma's rule: a canvas begins with random tokens, and all of them are decided anew in every pass.

A pass accepts the candidates of least entropy and replaces all others by new random tokens. The result are the best tokens of the
last pass. After transformers' ``generation_diffusion_gemma.py``, number for number; arXiv 2505.24857 has the idea.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import Categorical

from volley.decode.canvas import Canvas, CanvasNoise, Denoiser, read_together
from volley.decode.sampling import token_probs
from volley.types import DiffusionParams, SamplingParams

_PART = 2**20
"""Logits that are processed together: 4 MiB."""


class Renoise(Denoiser):
    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def open(self, start: int, given: Sequence[int], params: DiffusionParams, noise: CanvasNoise) -> Canvas:
        assert params.canvas_length is not None
        tokens = noise.tokens(start, 0, params.canvas_length, self.vocab_size)
        canvas = Canvas(start, tokens, torch.arange(len(tokens)) < len(given), len(given))
        canvas.tokens[: len(given)] = torch.tensor(given, dtype=torch.long)
        return canvas

    def step(
        self, canvas: Canvas, logits: Tensor, sampling: SamplingParams, params: DiffusionParams, noise: CanvasNoise
    ) -> Tensor:
        assert params.max_steps is not None
        given, left = canvas.tokens[: canvas.num_given], params.max_steps - canvas.step
        logits = logits / temperature(params, left, sampling.temperature)
        best = candidates = logits.argmax(dim=-1)
        if sampling.temperature > 0:
            candidates = noise.choose(_filtered(logits.softmax(dim=-1), sampling), canvas.start, canvas.step)
        entropy = torch.cat([_entropy(logits[rows]) for rows in _parts(logits)])
        best, candidates, entropy = read_together(best, candidates, entropy)
        accepted = accept(entropy, params)
        random = noise.tokens(canvas.start, canvas.step + 1, len(canvas), self.vocab_size)
        canvas.done = is_settled(canvas.history, best, entropy, params) or left == 1
        canvas.history = [*canvas.history, best][-max(1, params.stability_threshold or 0) :]
        canvas.tokens = best.clone() if canvas.done else torch.where(accepted, candidates, random)
        canvas.tokens[: canvas.num_given] = given
        canvas.predicted = None if canvas.done else logits
        canvas.step += 1
        return torch.arange(len(canvas)) >= canvas.num_given


def temperature(params: DiffusionParams, left: int, factor: float) -> Tensor:
    """The temperature of a pass with ``left`` passes to go, itself included; it falls. In fp32, as transformers computes it.

    ``factor`` is the request's own temperature. At 0, where no candidate is drawn, the schedule stays as it is.
    """
    assert params.t_min is not None
    assert params.t_max is not None
    steps = torch.tensor(left, dtype=torch.int32) / params.max_steps  # type: ignore[operator]
    return (params.t_min + (params.t_max - params.t_min) * steps) * (factor or 1.0)


def accept(entropy: Tensor, params: DiffusionParams) -> Tensor:
    """The accepted rows, boolean ``[L]``: those where the sum of all smaller entropies is at most the bound."""
    assert params.entropy_bound is not None
    ordered, order = entropy.sort()
    before = ordered.cumsum(dim=-1) - ordered
    return torch.zeros(len(entropy), dtype=torch.bool).scatter(-1, order, before <= params.entropy_bound)


def is_settled(history: Sequence[Tensor], best: Tensor, entropy: Tensor, params: DiffusionParams) -> bool:
    """Whether the best tokens were the same in the last passes, and the mean entropy is low enough."""
    assert params.confidence_threshold is not None
    wanted = params.stability_threshold or 0
    is_stable = wanted == 0 or (len(history) >= wanted and all(torch.equal(best, past) for past in history[-wanted:]))
    return is_stable and bool(entropy.mean() < params.confidence_threshold)


def _parts(logits: Tensor) -> list[slice]:
    """Rows of ``logits [L, V]``, a few at a time: intermediate results take more memory than they do."""
    size = max(1, _PART // logits.shape[-1])
    return [slice(start, start + size) for start in range(0, len(logits), size)]


def _entropy(logits: Tensor) -> Tensor:
    found: Tensor = Categorical(logits=logits, validate_args=False).entropy()  # type: ignore[no-untyped-call]
    return found


def _filtered(probs: Tensor, sampling: SamplingParams) -> Tensor:
    """Top-k, top-p and min-p, in place, of probabilities that have their temperature already."""
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
        for rows in _parts(probs):
            probs[rows] = token_probs(probs[rows].log(), sampling, temperature=1.0)
    return probs
