"""Reference implementation of sampling parameters, slow and independent of the engine's, by which output is judged."""

from collections.abc import Sequence

import torch
from torch import Tensor

from volley.params import SamplingParams


def penalised(logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """Return ``logits [V]`` (fp64) of the token after ``output``, with penalties and biases applied."""
    logits = logits.double().clone()
    for token in set(prompt) | set(output):
        value = float(logits[token])
        logits[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token in set(output):
        logits[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
    for token, bias in params.logit_bias:
        logits[token] += bias
    return logits


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the distribution ``[V]`` (fp64) of processed logits: temperature, then top-k, then top-p, then min-p."""
    probs = (logits.double() / params.temperature).softmax(-1)
    order = probs.argsort(descending=True, stable=True)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if params.top_k:
        keep[order[params.top_k :]] = False
    if params.top_p < 1:
        kept = probs * keep / (probs * keep).sum()
        before = kept[order].cumsum(0) - kept[order]
        keep[order[before >= params.top_p]] = False
    if params.min_p:
        keep &= probs >= params.min_p * probs.max()
    return probs * keep / (probs * keep).sum()
