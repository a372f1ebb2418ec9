"""Draft tokens one after the other, each from its law given the one before: what a sequential head makes of a block.

A greedy walk follows a lattice: few candidates, one choice for every (slot, token before) at once. A sampled walk takes each
law whole, over the vocabulary, because the tail that candidates leave out is where a sampled target often goes. Its law is exact,
``q(d_i | d_<i)``, so speculative sampling with it is lossless.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from volley.decode.propose import draft_temperature
from volley.decode.sampling import PositionNoise, Purpose, race, token_probs
from volley.types import Lattice, Proposal, SamplingParams

Transitions = Callable[[int, int], Tensor]
"""``after(slot, token)``: the logits ``[1, V]`` of a slot after ``token``."""


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


def walk_sampled(
    after: Transitions, slots: int, anchor: int, params: SamplingParams, noise: PositionNoise, first: int
) -> Proposal:
    """Draw every slot from its law after the token drawn before it, for speculative sampling; positions from ``first``."""
    tokens, laws = _walk(after, slots, anchor, params, noise, Purpose.DRAFT, first)
    return Proposal(tokens, laws)


def walk_coupled(
    after: Transitions, slots: int, anchor: int, params: SamplingParams, noise: PositionNoise, first: int
) -> Proposal:
    """Draw with the noise the target will use at each position, for sample-and-match only."""
    return Proposal(_walk(after, slots, anchor, params, noise, Purpose.TARGET, first)[0])


def _walk(
    after: Transitions,
    slots: int,
    token: int,
    params: SamplingParams,
    noise: PositionNoise,
    purpose: Purpose,
    first: int,
) -> tuple[list[int], Tensor]:
    tokens, laws = [], []
    temperature = draft_temperature(params)
    for slot in range(slots):
        laws.append(token_probs(after(slot, token), params, temperature))
        exponentials = noise.exponentials(purpose, [first + slot], laws[-1].shape[-1])
        token = int(race(laws[-1], exponentials))
        tokens.append(token)
    return tokens, torch.cat(laws)
