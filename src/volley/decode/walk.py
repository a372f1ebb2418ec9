"""Draft tokens from a lattice: one choice for every (slot, token before) at once, then a walk along the choices made.

The walk's law is exact, ``q(d_i | d_<i)`` over the candidates and zero elsewhere, so speculative sampling with it is lossless.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from volley.decode.sampling import PositionNoise, Purpose, token_probs
from volley.types import Lattice, Proposal, SamplingParams


def walk_greedy(lattice: Lattice) -> Proposal:
    """The most likely candidate of every slot after the one chosen before it."""
    return Proposal(_tokens(lattice, _follow(lattice.scores.argmax(axis=-1))))


def walk_sampled(
    lattice: Lattice, params: SamplingParams, noise: PositionNoise, first: int, vocab_size: int
) -> Proposal:
    """Draw every slot from its law after the one drawn before it, for speculative sampling; positions from ``first``."""
    laws = conditional_laws(lattice, params)
    slots, count = lattice.tokens.shape
    race = noise.exponentials(Purpose.DRAFT, range(first, first + slots), count).numpy()
    chosen = _follow((laws / race[:, None]).argmax(axis=-1))
    drawn_from = laws[np.arange(slots), [0, *chosen[:-1]]]
    draft_probs = torch.zeros(slots, vocab_size).scatter_(
        1, torch.from_numpy(lattice.tokens), torch.from_numpy(drawn_from)
    )
    return Proposal(_tokens(lattice, chosen), draft_probs)


def walk_coupled(
    lattice: Lattice, params: SamplingParams, noise: PositionNoise, first: int, vocab_size: int
) -> Proposal:
    """Draw with the noise the target will use at each position, for sample-and-match only."""
    laws = conditional_laws(lattice, params)
    race = noise.exponentials(Purpose.TARGET, range(first, first + len(laws)), vocab_size).numpy()
    own = np.take_along_axis(race, lattice.tokens, axis=1)
    return Proposal(_tokens(lattice, _follow((laws / own[:, None]).argmax(axis=-1))))


def conditional_laws(lattice: Lattice, params: SamplingParams) -> NDArray[np.float32]:
    """``[k, C, C]``: the law of each slot's candidates after each candidate before, under the draft's parameters."""
    scores = torch.from_numpy(lattice.scores)
    temperature = params.temperature if params.draft_temperature is None else params.draft_temperature
    laws: Tensor = token_probs(scores.flatten(0, 1), params, temperature).view_as(scores)
    found: NDArray[np.float32] = laws.numpy()
    return found


def _follow(choice: NDArray[np.int64]) -> list[int]:
    """The candidates met by following ``choice [k, C]`` (of each slot, after each candidate before) from the anchor."""
    chosen, last = [], 0
    for row in choice.tolist():
        last = row[last]
        chosen.append(last)
    return chosen


def _tokens(lattice: Lattice, chosen: list[int]) -> list[int]:
    found: list[int] = lattice.tokens[np.arange(len(chosen)), chosen].tolist()
    return found
