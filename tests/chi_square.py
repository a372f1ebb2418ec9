"""Pearson's chi-square test of counts against a distribution."""

import torch
from torch import Tensor


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
