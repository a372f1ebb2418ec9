"""Denoise by DiffusionGemma's rule: a canvas begins with random tokens, and every pass decides all of them again.

A pass accepts the candidates of lowest entropy and replaces the others with new random tokens. The result is the most likely
tokens of the last pass; for a draft, the tokens that its verifier would draw there. The rule follows transformers'
``generation_diffusion_gemma.py`` number for number; the idea is from arXiv 2505.24857.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from volley.decode.canvas import Canvas, CanvasOutput, CoupledNoise, Denoiser, read_together
from volley.decode.sampling import PositionNoise, draw, likeliest, token_probs
from volley.memory.device import most_together
from volley.memory.upload import upload
from volley.params import DiffusionParams, SamplingParams


@dataclass(frozen=True)
class Renoise(Denoiser):
    vocab_size: int

    def open(self, start: int, given: Sequence[int], params: DiffusionParams, noise: PositionNoise) -> Canvas:
        assert params.canvas_length is not None
        tokens = noise.tokens(start, 0, params.canvas_length, self.vocab_size)
        canvas = Canvas(start, tokens, torch.arange(len(tokens)) < len(given), len(given))
        canvas.tokens[: len(given)] = torch.tensor(given, dtype=torch.long)
        return canvas

    def step(self, output: CanvasOutput) -> Tensor:
        return self.step_together([output])[0]

    def step_together(self, outputs: Sequence[CanvasOutput]) -> list[Tensor]:
        """Process the rows of neighbouring canvases of equal length together; only the draws are per canvas.

        All slots get their tokens when the canvas is done, and none before.
        """
        decided = list[Tensor]()
        for length, alike in groupby(outputs, key=lambda output: len(output.canvas)):
            canvases = list(alike)
            self._step_alike(canvases)
            slots, none = torch.arange(length), torch.zeros(length, dtype=torch.bool)
            decided += [slots >= output.canvas.num_given if output.canvas.done else none for output in canvases]
        return decided

    def _step_alike(self, outputs: list[CanvasOutput]) -> None:
        """Apply a pass to canvases of one length L, whose rows are ``[N, L, V]``."""
        heat = upload(temperatures(outputs), outputs[0].logits.device)[:, None, None]
        logits = torch.stack([output.logits for output in outputs]).div_(heat)
        best = candidates = likeliest(logits.flatten(0, 1)).view(logits.shape[:-1])
        if any(output.sampling.temperature > 0 for output in outputs):
            candidates = _drawn(outputs, logits, best)
        entropy = torch.cat([_entropy(rows) for rows in _parts(logits.flatten(0, 1))]).view_as(best)
        best, candidates, entropy = read_together(best, candidates, entropy)
        random = torch.stack(
            [
                own.noise.tokens(own.canvas.start, own.canvas.step + 1, len(own.canvas), self.vocab_size)
                for own in outputs
            ]
        )
        renoised = torch.where(accept(entropy, [output.params for output in outputs]), candidates, random)
        sure = _are_sure(entropy, outputs)
        confidence = (-entropy).exp()  # the tokens are drawn from flat distributions
        rows = zip(outputs, sure, *(own.unbind() for own in (best, renoised, confidence, logits)), strict=True)
        for output, is_sure, own_best, own_new, own_confidence, own_logits in rows:
            canvas, params = output.canvas, output.params
            given, wanted = canvas.tokens[: canvas.num_given], params.stability_threshold or 0
            canvas.step += 1
            canvas.done = canvas.step == params.max_steps or (is_sure and is_stable(canvas.history, own_best, wanted))
            canvas.history = [*canvas.history, own_best][-max(1, wanted) :]
            canvas.tokens = _result(output, own_best) if canvas.done else own_new
            canvas.tokens[: canvas.num_given] = given
            canvas.confidence = own_confidence
            canvas.predicted = None if canvas.done else own_logits


def _result(output: CanvasOutput, best: Tensor) -> Tensor:
    """Return the most likely tokens ``[L]``; for a sampled draft, the tokens that its verifier would draw in the last pass."""
    if output.sampling.temperature == 0 or not isinstance(output.noise, CoupledNoise):
        return best.clone()
    probs = torch.cat([token_probs(rows, output.sampling) for rows in _parts(output.logits)])
    return output.noise.choose(probs, output.canvas.start, output.canvas.step).cpu()


def temperatures(outputs: Sequence[CanvasOutput]) -> NDArray[np.float32]:
    """Return the temperature of each pass, which falls from pass to pass; in fp32, as in transformers.

    A request's own temperature is a factor. At 0, where no candidate is drawn, the schedule is unchanged.
    """
    found = np.empty(len(outputs), dtype=np.float32)
    for row, (canvas, _, sampling, params, _) in enumerate(outputs):
        assert params.t_min is not None
        assert params.t_max is not None
        assert params.max_steps is not None
        left = np.float32(params.max_steps - canvas.step) / np.float32(params.max_steps)
        heat = np.float32(params.t_min) + np.float32(params.t_max - params.t_min) * left
        found[row] = heat * np.float32(sampling.temperature or 1.0)
    return found


def accept(entropy: Tensor, params: Sequence[DiffusionParams]) -> Tensor:
    """Return the accepted rows, boolean ``[N, L]``: those where the sum of all smaller entropies of the canvas is at most its
    bound."""
    bounds = torch.tensor([own.entropy_bound for own in params], dtype=entropy.dtype)[:, None]
    ordered, order = entropy.sort()
    before = ordered.cumsum(dim=-1) - ordered
    return torch.zeros_like(entropy, dtype=torch.bool).scatter(-1, order, before <= bounds)


def _are_sure(entropy: Tensor, outputs: Sequence[CanvasOutput]) -> list[bool]:
    """Return for each canvas whether its mean entropy is low enough to end it."""
    bounds = torch.tensor([output.params.confidence_threshold for output in outputs], dtype=entropy.dtype)
    sure: list[bool] = (entropy.mean(dim=-1) < bounds).tolist()
    return sure


def is_stable(history: Sequence[Tensor], best: Tensor, wanted: int) -> bool:
    """Return True if the most likely tokens were equal in the last ``wanted`` passes."""
    return len(history) >= wanted and all(torch.equal(best, past) for past in history[len(history) - wanted :])


def _drawn(outputs: Sequence[CanvasOutput], logits: Tensor, best: Tensor) -> Tensor:
    """Return the candidates ``[N, L]``: draws, or the most likely tokens at temperature 0."""
    probs, found = logits.softmax(dim=-1), best.clone()
    rows, uniforms = list[int](), list[NDArray[np.float64]]()
    for row, (canvas, _, sampling, _, noise) in enumerate(outputs):
        if sampling.temperature == 0:
            continue
        _filter(probs[row], sampling)
        own = noise.canvas_uniforms(canvas.start, canvas.step, len(canvas))
        if own is None:
            found[row] = noise.choose(probs[row], canvas.start, canvas.step)
        else:
            rows.append(row)
            uniforms.append(own)
    if rows:
        weights = probs if len(rows) == len(outputs) else probs[rows]
        found[rows] = draw(weights.flatten(0, 1), np.concatenate(uniforms)).view(len(rows), -1)
    return found


def _parts(logits: Tensor) -> tuple[Tensor, ...]:
    """Split the rows of ``logits [R, V]``, because intermediate results take more memory than they do."""
    return torch.split(logits, max(1, most_together(logits.device) // logits.shape[-1]))


def _entropy(logits: Tensor) -> Tensor:
    """Return the entropy of each row, bit-equal to torch's ``Categorical`` in transformers."""
    logs = logits - logits.logsumexp(dim=-1, keepdim=True)
    probs = logs.softmax(dim=-1)
    return logs.clamp_(min=torch.finfo(logs.dtype).min).mul_(probs).sum(dim=-1).neg_()


def _filter(probs: Tensor, sampling: SamplingParams) -> None:
    """Apply top-k, top-p and min-p, in place, to probabilities that include their temperature."""
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
        for rows in _parts(probs):
            rows.copy_(token_probs(rows.log(), sampling, temperature=1.0))
