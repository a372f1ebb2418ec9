"""Draft with a block drafter: one pass over an anchor and masks, then chains or trees of the most likely tokens.

Without a sequential head every draft position is predicted independently. With one, each token is chosen given the token
before it (``decode/propose.py``). With several denoising steps the most confident positions are revealed first
(``decode/denoise.py``).
"""

import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from volley.config import DraftingConfig
from volley.decode.constrained import Following, columns, grow_constrained, walk_constrained
from volley.decode.denoise import denoise
from volley.decode.late import Reading, draft_tokens, late_proposals, read_drafts
from volley.decode.propose import WALKS, Start, propose_coupled, propose_sampled, walk_sampled
from volley.decode.rules import Constraint, apply_rules, constraints
from volley.decode.sampling import (
    PositionNoise,
    Purpose,
    best_tokens,
    confidences,
    draft_temperature,
    likeliest,
    moved_uniforms,
    uniforms_of,
)
from volley.decode.tree import coupled_logits, expand, position_lattices
from volley.decode.work import Drafted, Rule, Shape, Work, group_by
from volley.errors import ConfigError
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.graphs import static_passes
from volley.memory.upload import upload, upload_indices, upload_together
from volley.models.drafters.domino import BoundRecurrent
from volley.models.drafters.draft_model import DraftModel
from volley.models.drafters.heads import BoundHead
from volley.models.drafters.pilot import largest_block
from volley.models.layers.residency import trimmed
from volley.models.targets.rehearsal import context_of, fastest, made_up, spread
from volley.proposers.base import Proposer, Works
from volley.types import Proposal


class BlockProposer(Proposer):
    def __init__(self, model: DraftModel, config: DraftingConfig) -> None:
        self.model = model
        self.can_grow_trees = model.bound_head is None or model.bound_head.pairwise
        self.configure(config)
        drafter = model.drafter
        self.block_size = largest_block(config, drafter.config.block_size, drafter.folder)
        self.drafts_late = model.device.type != "cpu" and drafter.head is None and drafter.confidence_head is None

    def use_fixed_memory(self, page_size: int) -> None:
        """Run small passes in static buffers, if possible. The last page of the model's store must belong to no request."""
        model = self.model

        def forward(batch: RaggedBatch, rows: Tensor) -> list[Tensor]:
            states = model.block_states(batch, model.store)[rows]
            return [model.logits(states), states]

        self.passes = None
        if model.is_regular:
            self.passes = static_passes(forward, model.store, page_size, model.device, self.block_size)

    def see(self, token_ids: Sequence[int]) -> None:
        self.model.see(token_ids)

    def configure(self, config: DraftingConfig) -> None:
        if config.denoising_steps > 1 and self.model.drafter.config.sample_from_anchor:
            raise ConfigError(
                f"denoising_steps is {config.denoising_steps}, and this drafter predicts from the anchor's slot: it has "
                "no slot to reveal a token in; use denoising_steps 1"
            )
        self.config = config

    def propose(self, works: Works, *, with_confidence: bool) -> float:
        walking = 0.0
        self.model.see([work.request.anchor for work in works])
        bound = [work for work in works if constraints(work.request.rules)]
        if self.config.denoising_steps > 1:
            if bound:
                one_pass = self.position_logits(bound, self._blocks(bound))
                self._draft_bound(bound, *one_pass, with_confidence=with_confidence)
                works = [work for work in works if not constraints(work.request.rules)]
            if not works:
                return walking
            logits = self._denoise(works, self._blocks(works))
        else:
            logits, hidden = self.position_logits(works, self._blocks(works))
            if bound:
                works, logits, hidden = self._draft_bound(works, logits, hidden, with_confidence=with_confidence)
            logits = _processed(works, logits)
            noisy = _with_noise(works, logits)
            if self.model.bound_head is None:
                _choose(works, noisy)
            elif works:
                walking = _walk(works, self.model.bound_head, hidden, noisy)
            if with_confidence and self.model.drafter.confidence_head is not None:
                self._read_with_rates(works, hidden)
        if with_confidence:
            _note_confidence(works, logits)
        if not (self.drafts_late and all(map(_can_be_late, works))):
            read_drafts(works)
        return walking

    def _read_with_rates(self, works: Works, hidden: Tensor) -> None:
        """Read on-device drafts, and the confidence head's rates for chains with ``hidden [Σ k, H]``, in one copy.

        A rate depends only on the tokens before its position, so cutting by it is lossless.
        """
        reading = Reading()
        reading.add_drafts(works)
        each = list(zip(works, torch.split(hidden, _sizes(works)), strict=True))
        chains = [work for work, _ in each if work.ask.shape is not Shape.TREE]
        if chains:
            sizes = np.array(_sizes(chains))
            anchors = np.array([work.request.anchor for work in chains])
            firsts, first_tokens = upload_together([sizes.cumsum() - sizes, anchors], hidden.device)
            before = draft_tokens(chains, hidden.device).roll(1).index_copy_(0, firsts, first_tokens)
            states = torch.cat([rows for work, rows in each if work.ask.shape is not Shape.TREE])
            rates = self.model.accept_rates(states, before).double()
            for work, own in zip(chains, torch.split(rates, sizes.tolist()), strict=True):
                reading.add_confidence(work.proposal, own)
        reading.read()

    def _blocks(self, works: Works) -> list[Tensor]:
        """Return the token ids of each block, anchor and masks: ``[1 + k]``, or ``[k]`` if the anchor's slot drafts a token."""
        mask, saved = self.model.drafter.config.mask_token_id, self.model.drafter.config.sample_from_anchor
        return [torch.tensor([work.request.anchor] + [mask] * (work.ask.positions - saved)) for work in works]

    def _draft_bound(
        self, works: Works, logits: Tensor, hidden: Tensor, *, with_confidence: bool
    ) -> tuple[list[Work[Any]], Tensor, Tensor]:
        """Draft for works under constraints, token by token, after one pass of the drafter.

        Without a head that must run after each token, a GPU's logits are read once and the host goes on alone.

        Return the remaining ``works``, ``logits [Σ k, V]`` and ``hidden [Σ k, H]``.
        """
        head = self.model.bound_head
        parts = list(zip(works, torch.split(logits, _sizes(works)), torch.split(hidden, _sizes(works)), strict=True))
        left = [part for part in parts if not constraints(part[0].request.rules)]
        bound = [part for part in parts if constraints(part[0].request.rules)]
        near = _read_rows([(work, rows) for work, rows, _ in bound]) if head is None else [rows for _, rows, _ in bound]
        for (work, _, states), rows in zip(bound, near, strict=True):
            following = _following(head, states, rows)
            if work.ask.shape is Shape.TREE:
                work.proposal = grow_constrained(following, work)
                continue
            work.proposal = walk_constrained(following, work, logits.device, with_confidence=with_confidence)
        if not left:
            return [], logits[:0], hidden[:0]
        return (
            [work for work, *_ in left],
            torch.cat([rows for _, rows, _ in left]),
            torch.cat([own for *_, own in left]),
        )

    def position_logits(self, works: Works, blocks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits ``[Σ k, V]`` of the draft positions of ``blocks`` (anchor and masks), and the final states ``[Σ k,
        H]``."""
        segments = [
            Segment(work.request.draft_table, work.request.length - 1, len(block), causal=False)
            for work, block in zip(works, blocks, strict=True)
        ]
        token_ids = torch.cat([*blocks])
        if replayed := self._replay(segments, token_ids):
            return replayed
        hidden = self.model.states(segments, token_ids)
        return self.model.logits(hidden), hidden

    def _replay(self, segments: list[Segment], token_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """Run :meth:`position_logits` in static buffers, valid until the next pass; return ``None`` if the pass does not fit.

        Denoising cannot use it, because it needs the logits of its first pass again.
        """
        if self.passes is None or self.config.denoising_steps > 1:
            return None
        rows = self.model.draft_rows(segments)
        found = self.passes(segments, token_ids.tolist(), rows)
        return None if found is None else (found[1][0][: len(rows)], found[1][1][: len(rows)])

    def propose_unread(
        self, works: Works, segments: Sequence[Segment], anchors: Tensor, moved: Tensor, *, with_confidence: bool
    ) -> bool:
        config = self.model.drafter.config
        if self.passes is None or self.config.denoising_steps > 1:
            return False
        length = segments[0].length - config.sample_from_anchor
        tables = [work.request.draft_table for work in works]
        blocks = [Segment(table, own.start, length, causal=False) for table, own in zip(tables, segments, strict=True)]
        masks = torch.full((len(blocks), length - 1), config.mask_token_id, device=anchors.device)
        token_ids = torch.cat([anchors[:, None], masks], dim=1).flatten()
        rows = self.model.draft_rows(blocks)
        found = self.passes(blocks, [0] * len(token_ids), rows, {0: token_ids}, moved)
        if found is None:
            return False
        logits, hidden = (output[: len(rows)] for output in found[1])
        head, rated = self.model.bound_head, self.model.drafter.confidence_head
        if head is None:
            _choose(works, logits, moved)
        else:
            _walk(works, head, hidden, logits, Start(anchors, moved))
        if with_confidence and rated is not None:
            tokens = draft_tokens(works, anchors.device).view(len(works), -1)
            before = torch.cat([anchors[:, None], tokens[:, :-1]], dim=1).flatten()
            rates = self.model.accept_rates(hidden, before).double()
            for work, own in zip(works, torch.split(rates, _sizes(works)), strict=True):
                assert work.proposal.late is not None
                work.proposal.late.confidence = own
        elif with_confidence:
            _note_confidence(works, logits)
        return True

    def _denoise(self, works: Works, blocks: list[Tensor]) -> Tensor:
        """Draft in several denoising steps; return the logits ``[Σ k, V]`` of the first step."""

        def look(works: Works, blocks: list[Tensor]) -> Tensor:
            return _processed(works, self.position_logits(works, blocks)[0])

        first = denoise(
            blocks,
            self.config.denoising_steps,
            self.config.denoising_schedule,
            lambda indices: look([works[index] for index in indices], [blocks[index] for index in indices]),
            lambda index, rows: _draw(works[index].request, rows),
            self.config.denoising_threshold,
        )
        for work, block in zip(works, blocks, strict=True):
            work.proposal = Proposal(block[1:].tolist())
        return first

    @trimmed()
    @torch.inference_mode()
    def seconds(self, tokens: int, requests: int) -> float:
        """Measure the seconds of a draft pass, and of the draft K/V of one token of each request."""
        model = self.model
        features = torch.zeros(requests, model.drafter.fc.in_features, dtype=model.dtype, device=model.device)
        positions = torch.arange(requests, device=model.device)
        making = fastest(lambda: model.drafter.context_kv(features, positions), model.device)
        sizes = spread(tokens, requests)
        context = context_of(sizes, model.drafter.rotary.length)
        replay = None if self.passes is None else self.passes.made_up(sizes, context, causal=False)
        if replay is not None and model.bound_head is None:
            return making + fastest(lambda: best_tokens(replay()), model.device)
        return making + sum(self.timed_parts(tokens, requests))

    @torch.inference_mode()
    def timed_parts(self, tokens: int, requests: int) -> tuple[float, float]:
        """Measure the seconds of the drafter's layers, and of logits and choice, for ``tokens`` spread over ``requests``."""
        model = self.model
        shapes, sizes = model.drafter.kv_shapes, spread(tokens, requests)
        context = context_of(sizes, model.drafter.rotary.length)
        batch, store = made_up(sizes, shapes, model.dtype, model.device, causal=False, context=context)
        states = model.block_states(batch, store)

        def choose() -> None:
            logits = model.logits(states)
            head = model.bound_head
            if isinstance(head, BoundHead):
                head.chains(states, logits, [0] * requests, sizes)
            elif head is not None:
                after = head.transitions(states, logits, sizes)
                for place in range(sizes[0]):
                    best_tokens(after(list(range(place, sum(sizes), sizes[0])), [0] * requests))
            else:
                best_tokens(logits)

        layers = fastest(lambda: model.block_states(batch, store), model.device)
        return layers, fastest(choose, model.device)


def _read_rows(each: Sequence[tuple[Work[Any], Tensor]]) -> list[Tensor]:
    """Return the rows ``[k, V]`` of each work, copied to the host together if no rule of the work runs on the device."""
    near = [all(isinstance(rule, Constraint) for rule in work.request.rules) for work, _ in each]
    moved = [rows for (_, rows), is_near in zip(each, near, strict=True) if is_near]
    if not moved or moved[0].device.type == "cpu":
        return [rows for _, rows in each]
    copies = iter(torch.split(torch.cat(moved).cpu(), [len(rows) for rows in moved]))
    return [next(copies) if is_near else rows for (_, rows), is_near in zip(each, near, strict=True)]


def _following(head: BoundHead | BoundRecurrent | None, hidden: Tensor, logits: Tensor) -> Following:
    """Return the logits of one block's positions given the token before each, from ``hidden [k, H]`` and ``logits [k, V]``."""
    size = logits.shape[-1]
    if head is None:
        return Following(lambda position, _, among: columns(logits[position : position + 1], among), size, False)
    after = head.transitions(hidden, logits, [len(hidden)])
    best = head.chooser(hidden, logits) if isinstance(head, BoundHead) else None
    return Following(lambda position, token, among: after([position], [token], among), size, not head.pairwise, best)


def _sizes(works: Works) -> list[int]:
    return [work.ask.positions for work in works]


def _processed(works: Works, logits: Tensor) -> Tensor:
    """Apply the requests' rules to ``logits [Σ k, V]``. They see only accepted tokens, because the draft is not known yet."""
    if not any(work.request.rules for work in works):
        return logits
    parts = zip(works, torch.split(logits, _sizes(works)), strict=True)
    return torch.cat([apply_rules(work.request.rules, rows, [()] * len(rows)) for work, rows in parts])


def _with_noise(works: Works, logits: Tensor) -> Tensor:
    """Return ``logits [Σ k, V]``; those of trees are coupled with the noise that the target will use."""
    if all(work.ask.shape is not Shape.TREE for work in works):
        return logits
    parts = zip(works, torch.split(logits, _sizes(works)), strict=True)
    return torch.cat(
        [
            coupled_logits(rows, work.request.params, work.request.noise, work.request.length)
            if work.ask.shape is Shape.TREE
            else rows
            for work, rows in parts
        ]
    )


def _draw(request: Drafted, logits: Tensor) -> Tensor:
    """Choose tokens ``[k]`` that will be verified by comparing choices."""
    if request.params.temperature == 0:
        return logits.argmax(dim=-1)
    return propose_coupled(logits, request.params, _places([(request.noise, request.length)], [len(logits)]))


def _places(cycles: Sequence[tuple[PositionNoise, int]], sizes: Sequence[int]) -> list[tuple[PositionNoise, int]]:
    """Return the noise and the position of each draft position of cycles, each given by its noise and first position."""
    return [(noise, first + i) for (noise, first), size in zip(cycles, sizes, strict=True) for i in range(size)]


def _can_be_late(work: Work[Any]) -> bool:
    """Return True if the host does not need the draft's tokens before it reads the target's choices."""
    return work.may_be_late and work.ask.shape is Shape.CHAIN and not work.request.rules


def _choose(works: Works, logits: Tensor, moved: Tensor | None = None) -> None:
    """Choose tokens of independent positions. The tokens of chains stay on the device.

    Chains of one size can also follow ``moved [n]`` tokens and an anchor that the host does not know yet.
    """

    def chosen_alike(work: Work[Any]) -> tuple[Any, ...]:
        if work.ask.shape is Shape.TREE:
            return (_choose_trees,)
        is_drawn = work.ask.rule is not Rule.GREEDY
        return _choose_chains, work.ask.rule, work.request.params.distribution if is_drawn else None

    groups, parts = group_by(works, chosen_alike), torch.split(logits, _sizes(works))
    for (choose, *_), members in groups.items():
        rows, ahead = logits, moved
        if len(groups) > 1:
            rows = torch.cat([parts[index] for index in members])
            ahead = None if moved is None else moved.index_select(0, upload_indices(members, moved.device))
        choose([works[index] for index in members], rows, ahead)


def _choose_trees(works: Works, logits: Tensor, _: Tensor | None) -> None:
    for work, lattice in zip(works, position_lattices(logits, _sizes(works)), strict=True):
        work.proposal = expand(lattice, work.ask.size, draft_temperature(work.request.params))


def _choose_chains(works: Works, logits: Tensor, moved: Tensor | None) -> None:
    """Choose chains with one rule, of requests with equal sampling parameters."""
    sizes, rule, params = _sizes(works), works[0].ask.rule, works[0].request.params
    cycles = [(work.request.noise, work.request.length + (moved is not None)) for work in works]
    probs = None
    if rule is Rule.GREEDY:
        tokens = likeliest(logits)
    elif rule is Rule.MATCH:
        each = None if moved is None else moved.repeat_interleave(sizes[0])
        tokens = propose_coupled(logits, params, _places(cycles, sizes), each)
    else:
        if moved is None:
            numbers = upload(uniforms_of(cycles, sizes, Purpose.DRAFT), logits.device)
        else:
            numbers = moved_uniforms(cycles, sizes[0], Purpose.DRAFT, moved)
        tokens, probs = propose_sampled(logits, params, numbers)
    for work, proposal in zip(works, late_proposals(works, tokens, probs), strict=True):
        work.proposal = proposal


def _walk(
    works: Works, head: BoundHead | BoundRecurrent, hidden: Tensor, logits: Tensor, start: Start | None = None
) -> float:
    """Draft with a sequential head; return the seconds it took. Chains of one size can follow a ``start`` that only the device
    knows."""
    started, sizes = time.perf_counter(), _sizes(works)

    def walked_alike(work: Work[Any]) -> tuple[Any, ...]:
        is_tree, is_greedy = work.ask.shape is Shape.TREE, work.ask.rule is Rule.GREEDY
        if isinstance(head, BoundHead) and (is_tree or is_greedy):
            return (_walk_trees if is_tree else _walk_chains,)
        return _walk_distributions, work.ask.rule, work.request.params.distribution

    groups, parts = group_by(works, walked_alike), [torch.split(rows, sizes) for rows in (hidden, logits)]
    for (walk, *_), members in groups.items():
        own = [hidden, logits] if len(groups) == 1 else [torch.cat([each[i] for i in members]) for each in parts]
        begin = start if start is None or len(groups) == 1 else start.only(members)
        walk([works[i] for i in members], head, *own, begin)
    return time.perf_counter() - started


def _walk_trees(works: Works, head: BoundHead, hidden: Tensor, logits: Tensor, _: Start | None) -> None:
    lattices = head.lattices(hidden, logits, [work.request.anchor for work in works], _sizes(works))
    for work, lattice in zip(works, lattices, strict=True):
        work.proposal = expand(lattice, work.ask.size, draft_temperature(work.request.params))


def _walk_chains(works: Works, head: BoundHead, hidden: Tensor, logits: Tensor, start: Start | None) -> None:
    """Draft greedy chains."""
    sizes, anchors = _sizes(works), [work.request.anchor for work in works]
    if start is not None:
        drafted, chances = head.chains_unread(hidden, logits, start.anchors, sizes[0])
        for work, proposal, own in zip(works, late_proposals(works, drafted), chances, strict=True):
            assert proposal.late is not None
            proposal.late.confidence, work.proposal = own, proposal
        return
    tokens, sure = head.chains(hidden, logits, anchors, sizes)
    for work, size, end in zip(works, sizes, accumulate(sizes), strict=True):
        work.proposal = Proposal(tokens[end - size : end], confidence=sure[end - size : end])


def _walk_distributions(
    works: list[Work[Any]], head: BoundHead | BoundRecurrent, hidden: Tensor, logits: Tensor, start: Start | None
) -> None:
    """Draft chains token by token, of requests with one rule and equal sampling parameters."""
    rule, drafted = works[0].ask.rule, None
    if rule is Rule.SPECULATIVE and isinstance(head, BoundHead):
        if len(works) == 1 and start is None and (proposal := _drawn(works[0], head, hidden, logits)) is not None:
            works[0].proposal = proposal
            return
        after, drafted = head.drafted_transitions(hidden, logits)
    else:
        after = head.transitions(hidden, logits, _sizes(works))
    walk = WALKS[rule] if drafted is None else partial(walk_sampled, drafted=drafted)
    proposals = walk(after, works, start=start)
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
    uniforms = request.noise.uniforms(Purpose.DRAFT, request.length, work.ask.positions)
    found = head.drawn(hidden, logits, request.anchor, uniforms, temperature)
    if found is None:
        return None
    tokens, probs, drafted = found
    return Proposal(tokens, probs, drafted=drafted)


def _note_confidence(works: Works, logits: Tensor) -> None:
    """Record the drafter's confidence at each position, before a token was drawn and without noise.

    It is the largest probability of the distribution that the token was drawn from, or of the first pass if that distribution
    is not known. Trees and greedy walks have recorded theirs already.
    """
    row = 0
    for is_wanted, members in groupby(works, lambda work: not _has_confidence(work.proposal)):
        run = list(members)
        end = row + sum(_sizes(run))
        if is_wanted:
            _note_rows(run, logits[row:end])
        row = end


def _has_confidence(proposal: Proposal) -> bool:
    return bool(proposal.confidence) or (proposal.late is not None and proposal.late.confidence is not None)


def _note_rows(works: Works, logits: Tensor) -> None:
    unknown = any(work.proposal.draft_probs is None for work in works)
    of_logits = torch.split(confidences(logits), _sizes(works)) if unknown else [logits] * len(works)
    for work, found in zip(works, of_logits, strict=True):
        proposal = work.proposal
        sure = found if proposal.draft_probs is None else proposal.draft_probs.amax(dim=-1).double()
        if proposal.late is not None:
            proposal.late.confidence = sure
        else:
            proposal.confidence = sure.tolist()
