"""From the drafter's position logits to draft tokens, and to the distribution they were drawn from where one is known."""

from torch import Tensor

from volley.decode.sampling import PositionNoise, Purpose, draw, race, token_probs
from volley.types import Proposal, SamplingParams


def propose_sampled(logits: Tensor, params: SamplingParams, noise: PositionNoise, first: int) -> Proposal:
    """Draw every position from its own distribution for speculative sampling; ``logits [k, V]`` of positions from ``first``.

    The positions of a single-pass draft are independent given the context. So each row is the distribution of its token given
    the tokens before it, which speculative sampling needs.
    """
    probs = token_probs(logits, params, draft_temperature(params))
    return Proposal(draw(probs, noise.uniforms(Purpose.DRAFT, first, len(logits))).tolist(), probs)


def propose_coupled(logits: Tensor, params: SamplingParams, noise: PositionNoise, first: int) -> Tensor:
    """Draw every position with the noise the target will use at that position; tokens ``[k]``, for sample-and-match only."""
    probs = token_probs(logits, params, draft_temperature(params))
    positions = range(first, first + len(logits))
    return race(probs, noise.exponentials(positions, logits.shape[-1]))


def draft_temperature(params: SamplingParams) -> float:
    """The draft's temperature: its own if one was given, else the target's."""
    return params.temperature if params.draft_temperature is None else params.draft_temperature
