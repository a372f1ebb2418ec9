"""Draft tokens one after the other, each given the one before: what a sequential head makes of a block.

A greedy walk follows a lattice: a few candidates, one choice for every pair of position and token before. A sampled walk needs
each distribution over the whole vocabulary, since a sampled target often goes where no candidate is. It is exact,
``q(d_i | d_<i)``, so speculative sampling with it is lossless.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from volley.decode.propose import draft_temperature
from volley.decode.sampling import PositionNoise, Purpose, draw, race, token_probs
from volley.types import Lattice, Proposal, SamplingParams

Transitions = Callable[[list[int], list[int]], Tensor]
"""``after(rows, tokens)``: the logits ``[n, V]`` of n positions, numbered over all blocks, each after its token."""


@dataclass(frozen=True, slots=True)
class Block:
    """The positions of one request, to be walked from its anchor."""

    positions: int
    anchor: int
    noise: PositionNoise
    first: int
    """Position of the first position."""


def walk_greedy(lattice: Lattice) -> Proposal:
    """The most likely candidate of every position after the one chosen before it, and how sure the drafter is of each."""
    tokens, before, last = [], [], 0
    for candidates, row in zip(lattice.tokens.tolist(), lattice.scores.argmax(axis=-1).tolist(), strict=True):
        before.append(last)
        last = row[last]
        tokens.append(candidates[last])
    followed = lattice.scores[np.arange(len(before)), before]
    odds = np.exp(followed - followed.max(axis=-1, keepdims=True))
    return Proposal(tokens, confidence=(1 / odds.sum(axis=-1)).tolist())


def walk_sampled(after: Transitions, blocks: Sequence[Block], params: SamplingParams) -> list[Proposal]:
    """Draw every position given the token drawn before it, for speculative sampling; all blocks side by side."""
    uniforms = [u for block in blocks for u in block.noise.uniforms(Purpose.DRAFT, block.first, block.positions)]
    drawn: list[Tensor] = []  # the distributions of all positions, once the first ones tell their size

    def choose(distributions: Tensor, rows: list[int], _: list[Block], __: int) -> Tensor:
        if not drawn:
            drawn.append(distributions.new_empty(len(uniforms), distributions.shape[-1]))
        drawn[0][rows] = distributions
        return draw(distributions, [uniforms[row] for row in rows])

    tokens = _walk(after, blocks, params, choose)
    parts = torch.split(drawn[0], [block.positions for block in blocks])
    return [Proposal(own, distributions) for own, distributions in zip(tokens, parts, strict=True)]


def walk_coupled(after: Transitions, blocks: Sequence[Block], params: SamplingParams) -> list[Proposal]:
    """Draw with the noise the target will use at each position, for sample-and-match only."""

    def choose(distribution: Tensor, rows: list[int], members: list[Block], position: int) -> Tensor:
        size = distribution.shape[-1]
        return race(
            distribution, torch.cat([block.noise.exponentials([block.first + position], size) for block in members])
        )

    return [Proposal(own) for own in _walk(after, blocks, params, choose)]


def _walk(
    after: Transitions,
    blocks: Sequence[Block],
    params: SamplingParams,
    choose: Callable[[Tensor, list[int], list[Block], int], Tensor],
) -> list[list[int]]:
    """The tokens of every block; ``choose`` takes the distributions ``[n, V]`` of one position of n blocks, and their rows."""
    tokens = [[block.anchor] for block in blocks]
    starts = np.cumsum([0, *(block.positions for block in blocks)]).tolist()
    temperature = draft_temperature(params)
    for position in range(max(block.positions for block in blocks)):
        walking = [index for index, block in enumerate(blocks) if block.positions > position]
        rows = [starts[index] + position for index in walking]
        distributions = token_probs(after(rows, [tokens[index][-1] for index in walking]), params, temperature)
        chosen = choose(distributions, rows, [blocks[index] for index in walking], position).tolist()
        for index, token in zip(walking, chosen, strict=True):
            tokens[index].append(token)
    return [own[1:] for own in tokens]
