"""What a request's penalties and biases make of logits, before they become choices or a law.

Penalties depend on every token before a position, so a verification row is processed with the tokens that precede it in the
draft counted in: row by row it is what plain decoding would have seen there, which keeps verification lossless.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from volley.types import Proposal, SamplingParams


class TokenCounts:
    """Which tokens a request's prompt has, ``[V]`` boolean, and how often its output has each, ``[V]``."""

    def __init__(self, prompt: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.in_prompt[torch.tensor(prompt, dtype=torch.long, device=device)] = True
        self.in_output = torch.zeros(vocab_size, device=device)

    def add(self, token_id: int) -> None:
        """Count one more token of the output."""
        self.in_output[token_id] += 1


def preceding(proposal: Proposal) -> list[tuple[int, ...]]:
    """For the anchor's row and every draft token's: the draft tokens up to there, along the chain or the tree."""
    paths: list[tuple[int, ...]] = [()]
    for index, token in enumerate(proposal.token_ids):
        parent = index if proposal.parents is None else proposal.parents[index]
        paths.append((*paths[parent], token))
    return paths


def process(
    logits: Tensor, params: SamplingParams, counts: TokenCounts, paths: Sequence[Sequence[int]] | None = None
) -> Tensor:
    """``logits [R, V]`` after penalties and bias, in fp32.

    ``paths[r]`` are the draft tokens between the output counted and row r (see :func:`preceding`); ``None`` where there
    are none. The repetition penalty (of prompt and output) comes first, as it scales the
    model's own logits, then the frequency and presence penalties (of the output), then the bias.
    """
    logits = logits.float()
    output = counts.in_output.expand_as(logits)
    if paths is not None:
        rows = [row for row, path in enumerate(paths) for _ in path]
        tokens = [token for path in paths for token in path]
        where = torch.tensor([rows, tokens], dtype=torch.long, device=logits.device)
        one = torch.ones((), device=logits.device)
        output = output.clone().index_put_((where[0], where[1]), one, accumulate=True)
    if params.repetition_penalty != 1:
        factor = params.repetition_penalty
        repeated = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where(counts.in_prompt | (output > 0), repeated, logits)
    if params.frequency_penalty or params.presence_penalty:
        logits = logits - params.frequency_penalty * output - params.presence_penalty * (output > 0)
    if params.logit_bias:
        biased, bias = zip(*params.logit_bias, strict=True)
        logits = logits.index_add(
            -1,
            torch.tensor(biased, device=logits.device),
            torch.tensor(bias, device=logits.device).expand(len(logits), -1),
        )
    return logits
