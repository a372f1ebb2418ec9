"""Draft tokens one after the other, each from its law given the one before: what a sequential head makes of a block.

A greedy walk follows a lattice: few candidates, one choice for every (slot, token before) at once. A sampled walk takes each
law whole, over the vocabulary, because the tail that candidates leave out is where a sampled target often goes. Its law is exact,
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
"""``after(rows, tokens)``: the logits ``[n, V]`` of n slots, each after its token; slots of all blocks are numbered through."""


@dataclass(frozen=True, slots=True)
class Block:
    """The slots of one request, to be walked from its anchor."""

    slots: int
    anchor: int
    noise: PositionNoise
    first: int
    """Position of the first slot."""


def walk_greedy(lattice: Lattice) -> Proposal:
    """The most likely candidate of every slot after the one chosen before it, and how sure the drafter is of each."""
    tokens, before, last = [], [], 0
    for candidates, row in zip(lattice.tokens.tolist(), lattice.scores.argmax(axis=-1).tolist(), strict=True):
        before.append(last)
        last = row[last]
        tokens.append(candidates[last])
    followed = lattice.scores[np.arange(len(before)), before]
    odds = np.exp(followed - followed.max(axis=-1, keepdims=True))
    return Proposal(tokens, confidence=(1 / odds.sum(axis=-1)).tolist())


def walk_sampled(after: Transitions, blocks: Sequence[Block], params: SamplingParams) -> list[Proposal]:
    """Draw every slot from its law after the token drawn before it, for speculative sampling; all blocks side by side."""
    uniforms = [u for block in blocks for u in block.noise.uniforms(Purpose.DRAFT, block.first, block.slots)]
    drawn: list[Tensor] = []  # the law of every slot of all blocks, once the first ones say of what size it is

    def choose(laws: Tensor, rows: list[int], _: list[Block], __: int) -> Tensor:
        if not drawn:
            drawn.append(laws.new_empty(len(uniforms), laws.shape[-1]))
        drawn[0][rows] = laws
        return draw(laws, [uniforms[row] for row in rows])

    tokens = _walk(after, blocks, params, choose)
    parts = torch.split(drawn[0], [block.slots for block in blocks])
    return [Proposal(own, laws) for own, laws in zip(tokens, parts, strict=True)]


def walk_coupled(after: Transitions, blocks: Sequence[Block], params: SamplingParams) -> list[Proposal]:
    """Draw with the noise the target will use at each position, for sample-and-match only."""

    def choose(law: Tensor, rows: list[int], members: list[Block], slot: int) -> Tensor:
        size = law.shape[-1]
        return race(law, torch.cat([block.noise.exponentials([block.first + slot], size) for block in members]))

    return [Proposal(own) for own in _walk(after, blocks, params, choose)]


def _walk(
    after: Transitions,
    blocks: Sequence[Block],
    params: SamplingParams,
    choose: Callable[[Tensor, list[int], list[Block], int], Tensor],
) -> list[list[int]]:
    """The tokens of every block; ``choose`` takes the laws ``[n, V]`` of one slot of n blocks, and which rows these are."""
    tokens = [[block.anchor] for block in blocks]
    starts = np.cumsum([0, *(block.slots for block in blocks)]).tolist()
    temperature = draft_temperature(params)
    for slot in range(max(block.slots for block in blocks)):
        walking = [index for index, block in enumerate(blocks) if block.slots > slot]
        rows = [starts[index] + slot for index in walking]
        laws = token_probs(after(rows, [tokens[index][-1] for index in walking]), params, temperature)
        chosen = choose(laws, rows, [blocks[index] for index in walking], slot).tolist()
        for index, token in zip(walking, chosen, strict=True):
            tokens[index].append(token)
    return [own[1:] for own in tokens]
