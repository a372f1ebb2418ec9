"""Turn the drafter's logits into draft tokens, and into the distributions they were drawn from, if these are known.

The positions of one draft pass are independent given the context. With a sequential head each position depends on the token
before it, so positions are *walked* in order: greedily over the best candidates, or by draws from whole distributions, because
a sampled target often chooses a token outside the candidates. Tokens are drawn from exactly ``q(d_i | d_<i)``, so rejection
sampling is lossless.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from volley.decode.on_device import proposals_on_device
from volley.decode.sampling import (
    Numbers,
    PositionNoise,
    Purpose,
    draft_probs,
    draw,
    exponentials,
    moved_uniforms,
    race,
    uniforms_of,
)
from volley.decode.work import Proposal, Rule, Works
from volley.memory.upload import upload, upload_indices
from volley.params import SamplingParams

Transitions = Callable[[list[int], list[int] | Tensor], Tensor]
"""Call ``after(rows, tokens)`` for the logits ``[n, V]`` of n positions, numbered over all blocks, each after its token.
Tokens are on the host, or on the device of the logits."""


def propose_sampled(logits: Tensor, params: SamplingParams, uniforms: Numbers | Tensor) -> tuple[Tensor, Tensor]:
    """Draw every position from its own distribution, for rejection sampling. Return tokens ``[R]`` and distributions ``[R,
    V]``.

    ``logits [R, V]`` may belong to several requests with equal sampling parameters; each row has one of ``uniforms [R]``.
    """
    probs = draft_probs(logits, params)
    return draw(probs, uniforms), probs


def propose_coupled(
    logits: Tensor, params: SamplingParams, places: Sequence[tuple[PositionNoise, int]], moved: Tensor | None = None
) -> Tensor:
    """Draw every position with the noise that the target will use there, for coupled sampling only. Return tokens ``[R]``.

    ``places`` holds the noise and the position of each row of ``logits [R, V]``. If only the device knows the positions,
    ``moved [R]`` is added to them there.
    """
    return race(draft_probs(logits, params), exponentials(places, logits.shape[-1], logits.device, moved))


class Start(NamedTuple):
    """Start of chains of one size that only the device knows: each text is ``moved [n]`` tokens and ``anchors [n]`` longer."""

    anchors: Tensor
    moved: Tensor

    def only(self, members: Sequence[int]) -> "Start":
        """Return the start of some of the chains."""
        indices = upload_indices(members, self.moved.device)
        return Start(self.anchors.index_select(0, indices), self.moved.index_select(0, indices))


def walk_best(after: Transitions, works: Works, *, start: Start | None = None) -> list[Proposal]:
    """Draft the most likely token of every position, given the tokens before it."""
    return proposals_on_device(
        works, _walk(after, works, lambda distributions, *_: distributions.argmax(dim=-1), start)
    )


def walk_sampled(
    after: Transitions, works: Works, drafted: Tensor | None = None, *, start: Start | None = None
) -> list[Proposal]:
    """Draw every position given the token drawn before it, for rejection sampling.

    ``after`` may return logits of the tokens ``drafted [n]`` only.
    """
    cycles = [(work.request.noise, work.request.length + (start is not None)) for work in works]
    sizes = [work.spec.positions for work in works]
    drawn: list[Tensor] = []  # uniforms and distributions of all positions, made once device and size are known

    def choose(distributions: Tensor, rows: Tensor, _: Works, __: int) -> Tensor:
        if not drawn:
            if start is None:
                drawn.append(upload(uniforms_of(cycles, sizes, Purpose.DRAFT), distributions.device))
            else:
                drawn.append(moved_uniforms(cycles, sizes[0], Purpose.DRAFT, start.moved))
            drawn.append(distributions.new_empty(sum(sizes), distributions.shape[-1]))
        drawn[1].index_copy_(0, rows, distributions)
        found = draw(distributions, drawn[0].index_select(0, rows))
        return found if drafted is None else drafted.index_select(0, found)

    tokens = _walk(after, works, choose, start)
    return proposals_on_device(works, tokens, drawn[1], drafted)


def walk_coupled(after: Transitions, works: Works, *, start: Start | None = None) -> list[Proposal]:
    """Draw with the noise that the target will use at each position, for coupled sampling only."""
    moved = None if start is None else start.moved

    def choose(distributions: Tensor, _: Tensor, works: Works, position: int) -> Tensor:
        first = position + (start is not None)
        places = [(work.request.noise, work.request.length + first) for work in works]
        return race(distributions, exponentials(places, distributions.shape[-1], distributions.device, moved))

    return proposals_on_device(works, _walk(after, works, choose, start))


WALKS = {Rule.GREEDY: walk_best, Rule.COUPLED: walk_coupled, Rule.REJECTION: walk_sampled}
"""Functions that draft chains token by token, by verification rule. Their works must have equal sampling parameters."""


def _walk(
    after: Transitions, works: Works, choose: Callable[[Tensor, Tensor, Works, int], Tensor], start: Start | None
) -> Tensor:
    """Draft the tokens ``[Σ k]`` of all blocks, on the device of the logits; the host reads none.

    ``choose`` takes the distributions ``[n, V]`` of one position of n blocks, and their rows.
    """
    sizes, params = [work.spec.positions for work in works], works[0].request.params
    starts, walking = np.cumsum([0, *sizes]).tolist(), list(range(len(works)))
    tokens: list[int] | Tensor = [work.request.anchor for work in works] if start is None else start.anchors
    found: list[Tensor] = []
    for position in range(max(sizes)):
        left = [place for place, index in enumerate(walking) if sizes[index] > position]
        if isinstance(tokens, Tensor) and len(left) < len(walking):
            walking = [walking[place] for place in left]
            tokens = tokens.index_select(0, upload_indices(left, tokens.device))
        places = [starts[index] + position for index in walking]
        distributions = draft_probs(after(places, tokens), params)
        rows = upload_indices(places, distributions.device)
        tokens = choose(distributions, rows, [works[index] for index in walking], position)
        found = found or [tokens.new_empty(sum(sizes))]
        found[0].index_copy_(0, rows, tokens)
    return found[0]
