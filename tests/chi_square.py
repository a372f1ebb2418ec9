"""Pearson's chi-square test of counts against a distribution."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from volley import SamplingParams
from volley.decode.sampling import token_probs


def chi_square_p(counts: Tensor, distribution: Tensor) -> float:
    """The probability of counts at least as far from ``distribution`` as these, if they were drawn from it.

    Cells expected to hold fewer than 8 draws are pooled, rarest first.
    """
    counts, distribution = counts.double().flatten(), distribution.double().flatten()
    assert torch.isclose(distribution.sum(), torch.tensor(1.0, dtype=torch.double), atol=1e-5)
    if bool((counts[distribution == 0] > 0).any()):
        return 0.0
    expected, order = (distribution * counts.sum()).sort()
    observed = counts[order]
    rare = int((expected < 8).sum())
    while 0 < rare < len(expected) and expected[:rare].sum() < 8:
        rare += 1
    if rare:
        expected = torch.cat([expected[:rare].sum()[None], expected[rare:]])
        observed = torch.cat([observed[:rare].sum()[None], observed[rare:]])
    assert len(expected) > 2, "too few draws to say anything"
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.double)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def joint_counts(sequences: Tensor, vocab: int) -> Tensor:
    """How often each sequence occurs: ``[N, L]`` tokens → ``[vocab ** L]``."""
    length = sequences.shape[1]
    place = vocab ** torch.arange(length - 1, -1, -1)
    return torch.bincount((sequences * place).sum(dim=1), minlength=vocab**length)


@torch.inference_mode()
def joint_law(logits_behind: Callable[[Tensor], Tensor], prompt: Sequence[int], params: SamplingParams) -> Tensor:
    """The distribution of all tokens behind a prompt ``[vocab ** max_tokens]``, from the logits behind every text."""
    law, texts = torch.ones(1, dtype=torch.double), torch.tensor([list(prompt)])
    for _ in range(params.max_tokens):
        probs = token_probs(logits_behind(texts), params).double()
        law = (law[:, None] * (probs / probs.sum(dim=-1, keepdim=True))).flatten()
        vocab = probs.shape[-1]
        nexts = torch.arange(vocab).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(vocab, dim=0), nexts], dim=1)
    return law
