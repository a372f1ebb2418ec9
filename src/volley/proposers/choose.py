"""Choose chains or trees from the output of a drafter's pass, with or without a sequential head."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from volley.decode.on_device import draft_tokens, proposals_on_device
from volley.decode.propose import WALKS, Start, propose_coupled, propose_sampled, walk_sampled
from volley.decode.sampling import (
    PositionNoise,
    Purpose,
    confidences,
    draft_temperature,
    likeliest,
    moved_uniforms,
    uniforms_of,
)
from volley.decode.tree import expand, position_lattices
from volley.decode.work import DeviceDraft, Proposal, Rule, Shape, Work, Works, group_by
from volley.memory.upload import upload, upload_indices
from volley.models.drafters.domino import BoundRecurrent
from volley.models.drafters.draft_model import DraftModel
from volley.models.drafters.heads import BoundHead

Head = BoundHead | BoundRecurrent | None


def choose_drafts(works: Works, head: Head, hidden: Tensor, logits: Tensor, start: Start | None = None) -> None:
    """Fill in the proposals of ``works`` from the final states ``hidden [Σ k, H]`` and ``logits [Σ k, V]`` of their positions.

    Without a ``head`` the positions are independent. Chains stay on the device, except greedy ones of a head. Chains of one
    size can also follow a ``start`` that only the device knows.
    """

    def method(work: Work[Any]) -> tuple[Any, ...]:
        is_greedy = work.spec.rule is Rule.GREEDY
        if work.spec.shape is Shape.TREE:
            return (_grow_trees,)
        if is_greedy and isinstance(head, BoundHead):
            return (_walk_greedily,)
        if is_greedy and head is None:
            return _choose_independently, Rule.GREEDY
        choose = _choose_independently if head is None else _walk
        return choose, work.spec.rule, work.request.params.distribution

    groups, parts = group_by(works, method), [torch.split(rows, sizes_of(works)) for rows in (hidden, logits)]
    for (choose, *_), members in groups.items():
        given: tuple[Any, ...] = (hidden, logits, start)
        if len(groups) > 1:
            given = *(torch.cat([own[i] for i in members]) for own in parts), start and start.only(members)
        choose([works[i] for i in members], head, *given)


def sizes_of(works: Works) -> list[int]:
    return [work.spec.positions for work in works]


def places_of(cycles: Sequence[tuple[PositionNoise, int]], sizes: Sequence[int]) -> list[tuple[PositionNoise, int]]:
    """Return the noise and the position of each draft position of cycles, each given by its noise and first position."""
    return [(noise, first + i) for (noise, first), size in zip(cycles, sizes, strict=True) for i in range(size)]


def _grow_trees(works: Works, head: BoundHead | None, hidden: Tensor, logits: Tensor, _: Start | None) -> None:
    if head is None:
        lattices = position_lattices(logits, sizes_of(works))
    else:
        lattices = head.lattices(hidden, logits, [work.request.anchor for work in works], sizes_of(works))
    for work, lattice in zip(works, lattices, strict=True):
        work.proposal = expand(lattice, work.spec.size, draft_temperature(work.request.params))


def _choose_independently(works: Works, _: None, __: Tensor, logits: Tensor, start: Start | None) -> None:
    """Choose chains of independent positions, with one rule and, unless that is greedy, equal sampling parameters."""
    sizes, rule, params = sizes_of(works), works[0].spec.rule, works[0].request.params
    cycles = [(work.request.noise, work.request.length + (start is not None)) for work in works]
    probs = None
    if rule is Rule.GREEDY:
        tokens = likeliest(logits)
    elif rule is Rule.COUPLED:
        moved = None if start is None else start.moved.repeat_interleave(sizes[0])
        tokens = propose_coupled(logits, params, places_of(cycles, sizes), moved)
    elif start is None:
        numbers = upload(uniforms_of(cycles, sizes, Purpose.DRAFT), logits.device)
        tokens, probs = propose_sampled(logits, params, numbers)
    else:
        tokens, probs = propose_sampled(logits, params, moved_uniforms(cycles, sizes[0], Purpose.DRAFT, start.moved))
    _fill_in(works, proposals_on_device(works, tokens, probs))


def _walk_greedily(works: Works, head: BoundHead, hidden: Tensor, logits: Tensor, start: Start | None) -> None:
    sizes, anchors = sizes_of(works), [work.request.anchor for work in works]
    if start is not None:
        drafted, chances = head.chains_unread(hidden, logits, start.anchors, sizes[0])
        for work, proposal, own in zip(works, proposals_on_device(works, drafted), chances, strict=True):
            assert proposal.on_device is not None
            proposal.on_device.confidence, work.proposal = own, proposal
        return
    tokens, sure = head.chains(hidden, logits, anchors, sizes)
    for work, size, end in zip(works, sizes, accumulate(sizes), strict=True):
        work.proposal = Proposal(tokens[end - size : end], confidence=sure[end - size : end])


def _walk(works: Works, head: BoundHead | BoundRecurrent, hidden: Tensor, logits: Tensor, start: Start | None) -> None:
    """Draft chains token by token, of requests with one rule and equal sampling parameters."""
    rule, drafted = works[0].spec.rule, None
    if rule is Rule.REJECTION and isinstance(head, BoundHead):
        if len(works) == 1 and start is None and (proposal := _drawn(works[0], head, hidden, logits)) is not None:
            works[0].proposal = proposal
            return
        after, drafted = head.drafted_transitions(hidden, logits)
    else:
        after = head.transitions(hidden, logits, sizes_of(works))
    walk = WALKS[rule] if drafted is None else partial(walk_sampled, drafted=drafted)
    _fill_in(works, walk(after, works, start=start))


def _fill_in(works: Works, proposals: Sequence[Proposal]) -> None:
    for work, proposal in zip(works, proposals, strict=True):
        work.proposal = proposal


def _drawn(work: Work[Any], head: BoundHead, hidden: Tensor, logits: Tensor) -> Proposal | None:
    """Draw a chain in C, if only a temperature shapes its distributions; return ``None`` otherwise.

    Several requests are faster together, because they share what they read. A seeded request must draw the same tokens in any
    batch, so it always takes the batched path.
    """
    params, request = work.request.params, work.request
    temperature = draft_temperature(params)
    if temperature == 0 or not params.is_whole or params.seed is not None:
        return None
    uniforms = request.noise.uniforms(Purpose.DRAFT, request.length, work.spec.positions)
    found = head.drawn(hidden, logits, request.anchor, uniforms, temperature)
    if found is None:
        return None
    tokens, probs, drafted = found
    return Proposal(tokens, probs, drafted=drafted)


def rate_chains(model: DraftModel, works: Works, hidden: Tensor, anchors: Tensor | None = None) -> None:
    """Take the confidences of chains with ``hidden [Σ k, H]`` from the confidence head. The drafts are then on the device.

    ``anchors [n]`` are the last tokens of all ``works`` if only the device knows them. A rate depends only on the tokens
    before its position, so cutting by it is lossless.
    """
    each = zip(works, torch.split(hidden, sizes_of(works)), strict=True)
    parts = [(work, states) for work, states in each if work.spec.shape is not Shape.TREE]
    if not parts:
        return
    chains = [work for work, _ in parts]
    sizes = np.array(sizes_of(chains))
    if anchors is None:
        anchors = upload_indices([work.request.anchor for work in chains], hidden.device)
    tokens, firsts = draft_tokens(chains, hidden.device), upload(sizes.cumsum() - sizes, hidden.device)
    before = tokens.roll(1).index_copy_(0, firsts, anchors)
    rates = model.accept_rates(torch.cat([states for _, states in parts]), before).double()
    for work, own, sure in zip(chains, *(torch.split(part, sizes.tolist()) for part in (tokens, rates)), strict=True):
        work.proposal.on_device, work.proposal.confidence = DeviceDraft(own, sure), []  # a greedy walk has left its own


def note_confidence(works: Works, logits: Tensor) -> None:
    """Record the drafter's confidence at each position, before a token was drawn and without noise.

    The confidence is the largest probability of the distribution that the token was drawn from, or of the first pass if that
    distribution is not known. Trees, greedy walks and confidence heads have recorded theirs already.
    """
    parts = zip((work.proposal for work in works), torch.split(logits, sizes_of(works)), strict=True)
    left = [(own, rows) for own, rows in parts if not own.has_confidence]
    unknown = [rows for own, rows in left if own.draft_probs is None]
    if unknown:
        together = logits if len(unknown) == len(works) else torch.cat(unknown)
        found = iter(torch.split(confidences(together), list(map(len, unknown))))
    for own, _ in left:
        sure = next(found) if own.draft_probs is None else own.draft_probs.amax(dim=-1).double()
        if own.on_device is not None:
            own.on_device.confidence = sure
        else:
            own.confidence = sure.tolist()
