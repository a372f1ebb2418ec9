"""Token rules: what a request makes of logits before they become choices or a distribution.

A rule may depend on every token before a position. A verification row is therefore processed with the draft tokens that lead to
it (its *path*): row by row it is what plain decoding would have seen there, which keeps verification lossless. Nothing has to be
rolled back, since a rule only ever takes tokens that are final.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from volley.types import Proposal, SamplingParams


class TokenRule(ABC):
    """One rule of one request."""

    @abstractmethod
    def apply(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Processed ``logits [R, V]`` (fp32): row r follows the tokens taken so far and then ``paths[r]``."""

    @abstractmethod
    def take(self, token_id: int) -> None:
        """One more token of the output is final."""


class Penalties(TokenRule):
    """Repetition penalty (of prompt and output), then frequency and presence penalties (of the output)."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self.params = params
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.in_prompt[torch.tensor(prompt, dtype=torch.long, device=device)] = True
        self.counts = torch.zeros(vocab_size, device=device)
        """How often the output has each token ``[V]``."""

    def take(self, token_id: int) -> None:
        self.counts[token_id] += 1

    def apply(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        params, counts = self.params, self.counts.expand_as(logits)
        rows = [row for row, path in enumerate(paths) for _ in path]
        if rows:
            tokens = [token for path in paths for token in path]
            where = torch.tensor([rows, tokens], dtype=torch.long, device=logits.device)
            one = torch.ones((), device=logits.device)
            counts = counts.clone().index_put_((where[0], where[1]), one, accumulate=True)
        if params.repetition_penalty != 1:
            factor = params.repetition_penalty
            repeated = torch.where(logits > 0, logits / factor, logits * factor)
            logits = torch.where(self.in_prompt | (counts > 0), repeated, logits)
        if params.frequency_penalty or params.presence_penalty:
            logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        return logits


class LogitBias(TokenRule):
    """Adds a constant to the logits of some tokens."""

    def __init__(self, bias: Sequence[tuple[int, float]], device: torch.device) -> None:
        tokens, values = zip(*bias, strict=True)
        self.tokens, self.values = torch.tensor(tokens, device=device), torch.tensor(values, device=device)

    def take(self, token_id: int) -> None:
        pass

    def apply(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        return logits.index_add(-1, self.tokens, self.values.expand(len(logits), -1))


def make_rules(
    params: SamplingParams, prompt: Sequence[int], vocab_size: int, device: torch.device
) -> tuple[TokenRule, ...]:
    """The rules of a request in the order in which they apply: penalties scale the model's own logits; own rules come last."""
    rules: list[TokenRule] = []
    if params.is_penalised:
        rules.append(Penalties(params, prompt, vocab_size, device))
    if params.logit_bias:
        rules.append(LogitBias(params.logit_bias, device))
    return (*rules, *(make(prompt, vocab_size, device) for make in params.rules))


def apply_rules(rules: Sequence[TokenRule], logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
    """``logits [R, V]`` after all ``rules``, in fp32."""
    logits = logits.float()
    for rule in rules:
        logits = rule.apply(logits, paths)
    return logits


def paths_of(proposal: Proposal) -> list[tuple[int, ...]]:
    """For the anchor's row and every draft token's: the draft tokens up to there, along the chain or the tree."""
    paths: list[tuple[int, ...]] = [()]
    for index, token in enumerate(proposal.token_ids):
        parent = index if proposal.parents is None else proposal.parents[index]
        paths.append((*paths[parent], token))
    return paths
