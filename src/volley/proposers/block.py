"""Draft with a block drafter: one pass over an anchor and masks, then chains or trees of the most likely tokens.

Without a sequential head every draft position is predicted independently. With one, each token is chosen given the token
before it (``decode/propose.py``). With several denoising steps the most confident positions are revealed first
(``decode/denoise.py``).
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from volley.config import DraftingConfig
from volley.decode.denoise import denoise
from volley.decode.on_device import read_drafts
from volley.decode.propose import Start, propose_coupled
from volley.decode.rules import apply_rules, constraints
from volley.decode.sampling import best_tokens
from volley.decode.tree import coupled_logits
from volley.decode.work import Drafted, Proposal, Shape, Work, Works
from volley.errors import ConfigError
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.graphs import static_passes
from volley.models.drafters.draft_model import DraftModel
from volley.models.drafters.heads import BoundHead
from volley.models.layers.host_memory import trimmed
from volley.models.targets.rehearsal import context_of, fastest, made_up, spread
from volley.proposers.base import Proposer
from volley.proposers.choose import choose_drafts, note_confidence, places_of, rate_chains, sizes_of
from volley.proposers.constrained import draft_constrained


class BlockProposer(Proposer):
    def __init__(self, model: DraftModel, config: DraftingConfig) -> None:
        self.model = model
        self.can_grow_trees = model.bound_head is None or model.bound_head.pairwise
        self.configure(config)
        drafter, self.block_size = model.drafter, model.block_size
        self.drafts_on_device = model.device.type != "cpu" and drafter.head is None and drafter.confidence_head is None

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
        head, walking, is_denoised = self.model.bound_head, 0.0, self.config.denoising_steps > 1
        self.model.see([work.request.anchor for work in works])
        bound = [work for work in works if constraints(work.request.rules)]
        free = [work for work in works if not constraints(work.request.rules)]
        if passed := bound if is_denoised else [*bound, *free]:
            logits, hidden = self.position_logits(passed, self._blocks(passed))
            end = sum(sizes_of(bound))
            draft_constrained(bound, head, hidden[:end], logits[:end], with_confidence=with_confidence)
            logits, hidden = logits[end:], hidden[end:]
        if not free:
            return walking
        if is_denoised:
            logits = self._denoise(free, self._blocks(free))
        else:
            logits, started = _processed(free, logits), time.perf_counter()
            choose_drafts(free, head, hidden, _with_noise(free, logits))
            walking = 0.0 if head is None else time.perf_counter() - started
            if with_confidence and self.model.drafter.confidence_head is not None:
                rate_chains(self.model, free, hidden)
        if with_confidence:
            note_confidence(free, logits)
        if not (self.drafts_on_device and all(map(_may_stay_on_device, free))):
            read_drafts(free)
        return walking

    def _blocks(self, works: Works) -> list[Tensor]:
        """Return the token ids of each block, anchor and masks: ``[1 + k]``, or ``[k]`` if the anchor's slot drafts a token."""
        mask, saved = self.model.drafter.config.mask_token_id, self.model.drafter.config.sample_from_anchor
        return [torch.tensor([work.request.anchor] + [mask] * (work.spec.positions - saved)) for work in works]

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
        choose_drafts(works, self.model.bound_head, hidden, logits, Start(anchors, moved))
        if with_confidence and self.model.drafter.confidence_head is not None:
            rate_chains(self.model, works, hidden, anchors)
        if with_confidence:
            note_confidence(works, logits)
        return True

    def _denoise(self, works: Works, blocks: list[Tensor]) -> Tensor:
        """Draft in several denoising steps; return the logits ``[Σ k, V]`` of the first step."""

        def logits_of(works: Works, blocks: list[Tensor]) -> Tensor:
            return _processed(works, self.position_logits(works, blocks)[0])

        first = denoise(
            blocks,
            self.config.denoising_steps,
            self.config.denoising_schedule,
            lambda indices: logits_of([works[index] for index in indices], [blocks[index] for index in indices]),
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


def _processed(works: Works, logits: Tensor) -> Tensor:
    """Apply the requests' rules to ``logits [Σ k, V]``. They see only accepted tokens, because the draft is not known yet."""
    if not any(work.request.rules for work in works):
        return logits
    parts = zip(works, torch.split(logits, sizes_of(works)), strict=True)
    return torch.cat([apply_rules(work.request.rules, rows, [()] * len(rows)) for work, rows in parts])


def _with_noise(works: Works, logits: Tensor) -> Tensor:
    """Return ``logits [Σ k, V]``; those of trees are coupled with the noise that the target will use."""
    if all(work.spec.shape is not Shape.TREE for work in works):
        return logits
    found = list[Tensor]()
    for work, rows in zip(works, torch.split(logits, sizes_of(works)), strict=True):
        own, places = work.request, range(work.request.length, work.request.length + len(rows))
        is_tree = work.spec.shape is Shape.TREE
        found.append(coupled_logits(rows, own.params, own.noise, places) if is_tree else rows)
    return torch.cat(found)


def _draw(request: Drafted, logits: Tensor) -> Tensor:
    """Choose tokens ``[k]`` that will be verified by comparing choices."""
    if request.params.temperature == 0:
        return logits.argmax(dim=-1)
    return propose_coupled(logits, request.params, places_of([(request.noise, request.length)], [len(logits)]))


def _may_stay_on_device(work: Work[Any]) -> bool:
    """Return True if the host does not need the draft's tokens before it reads the target's choices."""
    return work.may_stay_on_device and work.spec.shape is Shape.CHAIN and not work.request.rules
