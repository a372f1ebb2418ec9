"""Runs the two models for one step: draft, verify, judge, inject. Owns the KV stores; decides nothing."""

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from volley.decode.denoise import denoise, reveal_counts
from volley.decode.processors import process
from volley.decode.propose import draft_temperature, propose_coupled, propose_greedy, propose_sampled
from volley.decode.sampling import best_tokens, confidences
from volley.decode.tree import coupled_logits, expand, slot_lattice
from volley.decode.walk import Block, walk_coupled, walk_greedy, walk_sampled
from volley.engine.judging import judge, kept_rows
from volley.engine.request import Request
from volley.engine.scheduler import Scheduled
from volley.errors import ConfigError
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_store import KVDtype, make_store
from volley.models.accelerate import accelerate
from volley.models.adapter import Adapter, adapted, drafter_fingerprint
from volley.models.blocks import block_states, without_anchors
from volley.models.drafter import Drafter
from volley.models.heads import BoundHead
from volley.models.inject import Injection
from volley.models.taps import Taps
from volley.models.target import Target
from volley.types import Proposal, SamplingParams, Verdict

_NOTHING = Proposal([])


@dataclass(slots=True)
class Timings:
    """Wall seconds of the last step."""

    draft: float = 0.0
    walk: float = 0.0
    """The part of ``draft`` that a sequential head takes: its logits and the choice along them."""
    verify: float = 0.0


@dataclass(kw_only=True)
class DraftingOptions:
    """How proposals are made and judged. All choices are lossless; they differ in speed."""

    denoising_steps: int = 1
    denoising_schedule: str = "cosine"
    tree_nodes: int | None = None
    """Verify the best tree of so many tokens, anchor included, that ``block_size`` levels can hold; ``None``: what the
    policy likes, which for most is a chain."""
    verification: str = "auto"
    """For sampled requests: ``speculative``, ``match``, or ``auto``: speculative sampling where the draft's law is known (a
    chain from one denoising step) and no seed asks for the same answer again, sample-and-match otherwise."""

    def __post_init__(self) -> None:
        if self.verification not in ("auto", "speculative", "match"):
            raise ConfigError(f"verification {self.verification!r} is unknown; use auto, speculative or match")
        if self.verification == "speculative" and self.denoising_steps > 1:
            raise ConfigError(
                "speculative verification needs the law each draft token was drawn from, which multi-step denoising "
                "does not have; use verification='match' or denoising_steps=1"
            )
        reveal_counts(1, self.denoising_steps, self.denoising_schedule)
        if self.tree_nodes is not None:
            self._check_tree(self.tree_nodes)

    def _check_tree(self, tree_nodes: int) -> None:
        if tree_nodes < 2:
            raise ConfigError(f"tree_nodes is {tree_nodes}; a tree has 2 or more, anchor included. None drafts a chain")
        if self.denoising_steps > 1:
            raise ConfigError(
                "a tree grows from the slot probabilities of one draft pass, and denoising_steps is "
                f"{self.denoising_steps}; use denoising_steps=1, or tree_nodes=None"
            )
        if self.verification == "speculative":
            raise ConfigError(
                "speculative verification is biased on a tree, whose tokens are not drawn from the draft's law; use "
                "verification='match' or 'auto', or tree_nodes=None"
            )

    @property
    def may_grow_trees(self) -> bool:
        """Whether a policy may choose trees by itself."""
        return self.denoising_steps == 1 and self.verification != "speculative"

    def matches(self, params: SamplingParams) -> bool:
        """Whether a sampled request is verified by sample-and-match."""
        wants_repetition = self.verification == "auto" and params.seed is not None
        draws_no_law = self.denoising_steps > 1 or self.tree_nodes is not None
        return self.verification == "match" or draws_no_law or wants_repetition


class Runner:
    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        options: DraftingOptions,
        num_slots: int,
        num_ring_slots: int = 0,
        draft_window: int | None = None,
        kv_dtype: KVDtype = "auto",
        draft_kv_dtype: KVDtype = "auto",
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.options = options
        self.store = make_store(kv_dtype, target.kv_shapes, num_slots, target.dtype, target.device)
        self.timings = Timings()
        self.measures_confidence = False
        self.head: BoundHead | None = None
        if drafter is not None:
            check_pair(drafter, target)
            config = drafter.config
            drafter.rotary.cover(min(target.context_length, num_slots) + config.block_size)
            slots = num_ring_slots or num_slots
            self.draft_store = make_store(draft_kv_dtype, drafter.kv_shapes, slots, target.dtype, target.device)
            self.injection = Injection(drafter, self.draft_store)
            self.taps = Taps(target.model, config.target_layer_ids)
            weakref.finalize(self, self.taps.close)  # a target outlives the engines made on it
            if drafter.head is not None and config.head is not None:
                embedding = target.embed(torch.arange(target.vocab_size, device=target.device)).detach()
                self.head = BoundHead(drafter.head, config.head.candidates, embedding, target.head_weight)
            self._windows = drafter.windows(draft_window)

    def load_adapter(self, path: Path | str) -> Adapter:
        """The drafter with the adapter in folder ``path``; both keep their K/V in the same store."""
        assert self.drafter is not None
        drafter = adapted(self.drafter, path)
        digest = bytes.fromhex(drafter_fingerprint(drafter))
        accelerate(drafter)
        return Adapter(drafter, Injection(drafter, self.draft_store), digest)

    # -- draft ---------------------------------------------------------------------------------------------------------
    def draft(self, plan: Sequence[Scheduled]) -> list[Proposal]:
        """A proposal for every scheduled request, empty for those that only prefill."""
        started = time.perf_counter()
        self.timings = Timings()
        proposals = [
            Proposal(s.request.found[: s.max_nodes]) if s.max_nodes and not s.max_draft else _NOTHING for s in plan
        ]
        drafting = [index for index, scheduled in enumerate(plan) if scheduled.max_draft > 0]
        if drafting:
            for index, proposal in zip(drafting, self._draft_blocks([plan[i] for i in drafting]), strict=True):
                proposals[index] = proposal
        self.timings.draft = time.perf_counter() - started
        return proposals

    def _draft_blocks(self, plan: list[Scheduled]) -> list[Proposal]:
        assert self.drafter is not None
        mask = self.drafter.config.mask_token_id
        sizes = [scheduled.max_draft for scheduled in plan]
        tokens = [[s.request.token_ids[-1]] + [mask] * s.max_draft for s in plan]
        if self.options.denoising_steps == 1:
            logits, hidden = self._slot_logits(plan, torch.tensor([t for block in tokens for t in block]))
            logits = _processed(plan, logits)
            noisy = logits
            if any(scheduled.max_nodes for scheduled in plan):
                noisy = self._with_noise(plan, torch.split(logits, sizes))
            head = self.head
            proposals = self._walk(plan, head, hidden, noisy) if head else self._propose(plan, noisy)
            self._note_confidence(proposals, sizes, logits)
            return proposals
        blocks = [torch.tensor(block) for block in tokens]
        first = denoise(
            blocks,
            self.options.denoising_steps,
            self.options.denoising_schedule,
            lambda blocks: _processed(plan, self._slot_logits(plan, torch.cat(blocks))[0]),
            lambda index, rows: self._draw(plan[index].request, rows),
        )
        proposals = [Proposal(block[1:].tolist()) for block in blocks]
        self._note_confidence(proposals, sizes, first)
        return proposals

    def _note_confidence(self, proposals: list[Proposal], sizes: list[int], logits: Tensor) -> None:
        """Note in ``proposals`` how sure the drafter was of each slot, before its token was drawn or any noise mixed in: of the
        law it was drawn from if that is known, else of the first pass. A greedy walk already has.
        """
        if not self.measures_confidence:
            return
        for proposal in proposals:
            if proposal.draft_probs is not None:
                proposal.confidence = proposal.draft_probs.amax(dim=-1).tolist()
        if all(proposal.confidence for proposal in proposals):
            return
        row = 0
        for known, members in groupby(zip(proposals, sizes, strict=True), lambda member: bool(member[0].confidence)):
            run = list(members)
            end = row + sum(size for _, size in run)
            if not known:
                found = iter(confidences(logits[row:end]))
                for proposal, size in run:
                    proposal.confidence = list(islice(found, size))
            row = end

    def _slot_logits(self, plan: list[Scheduled], token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Target-head logits ``[Σ k, V]`` of every slot after the anchors, and the hidden states ``[Σ k, H]`` they are of.

        One draft pass for each adapter among the requests.
        """
        groups = _by_adapter(plan)
        if len(groups) == 1:
            slots = self._slot_states(plan, token_ids, plan[0].request.adapter)
        else:
            blocks = torch.split(token_ids, [1 + scheduled.max_draft for scheduled in plan])
            states = [token_ids] * len(plan)
            for adapter, places in groups.items():
                members = [plan[place] for place in places]
                found = self._slot_states(members, torch.cat([blocks[place] for place in places]), adapter)
                for place, rows in zip(places, torch.split(found, [s.max_draft for s in members]), strict=True):
                    states[place] = rows
            slots = torch.cat(states)
        assert self.drafter is not None
        return self.drafter.logits(slots, self.target.head), slots

    def _slot_states(self, plan: list[Scheduled], token_ids: Tensor, adapter: Adapter | None) -> Tensor:
        """The drafter's final states ``[Σ k, H]`` of every slot. Block K/V are scratch in the draft pages."""
        drafter = self.drafter if adapter is None else adapter.drafter
        assert drafter is not None
        segments = [Segment(s.request.draft_table, s.request.computed, 1 + s.max_draft, causal=False) for s in plan]
        batch = RaggedBatch(segments, token_ids.to(self.target.device))
        target = self.target
        states = block_states(drafter, batch, self.draft_store, target.attention, target.embed, self._windows)
        return without_anchors(batch, states)

    def _propose(self, plan: list[Scheduled], logits: Tensor) -> list[Proposal]:
        proposals, best = [], best_tokens(logits)
        row = 0
        for scheduled in plan:
            request, size = scheduled.request, scheduled.max_draft
            rows = logits[row : row + size]
            if scheduled.max_nodes:
                proposals.append(expand(slot_lattice(rows), scheduled.max_nodes, draft_temperature(request.params)))
            elif request.params.temperature == 0:
                proposals.append(propose_greedy(best[row : row + size]))
            elif request.is_coupled:
                proposals.append(Proposal(self._draw(request, rows).tolist()))
            else:
                proposals.append(propose_sampled(rows, request.params, request.noise, len(request.token_ids)))
            row += size
        return proposals

    @staticmethod
    def _with_noise(plan: list[Scheduled], logits: Sequence[Tensor]) -> Tensor:
        """Slot logits ``[Σ k, V]``, those of trees with the noise the target will use."""
        rows = [
            coupled_logits(own, s.request.params, s.request.noise, len(s.request.token_ids)) if s.max_nodes else own
            for s, own in zip(plan, logits, strict=True)
        ]
        return torch.cat(rows)

    def _walk(self, plan: list[Scheduled], head: BoundHead, hidden: Tensor, logits: Tensor) -> list[Proposal]:
        """A drafter with a sequential head chooses each token knowing the one before."""
        started = time.perf_counter()
        sizes = [scheduled.max_draft for scheduled in plan]
        alike: dict[tuple[object, ...] | None, list[int]] = {}  # requests that are walked side by side
        for index, scheduled in enumerate(plan):
            request, on_lattice = scheduled.request, scheduled.max_nodes or scheduled.request.params.temperature == 0
            alike.setdefault(None if on_lattice else (request.is_coupled, request.params.law), []).append(index)
        proposals = [_NOTHING] * len(plan)
        for law, members in alike.items():
            own = [hidden, logits]
            if len(alike) > 1:
                split = [torch.split(rows, sizes) for rows in own]
                own = [torch.cat([rows[i] for i in members]) for rows in split]
            walk = _walk_lattices if law is None else _walk_laws
            for index, proposal in zip(members, walk([plan[i] for i in members], head, *own), strict=True):
                proposals[index] = proposal
        self.timings.walk = time.perf_counter() - started
        return proposals

    def _draw(self, request: Request, logits: Tensor) -> Tensor:
        """Slot tokens for verification by comparing choices."""
        if request.params.temperature == 0:
            return logits.argmax(dim=-1)
        return propose_coupled(logits, request.params, request.noise, len(request.token_ids))

    # -- verify --------------------------------------------------------------------------------------------------------
    def verify(self, plan: Sequence[Scheduled], proposals: Sequence[Proposal]) -> Tensor:
        """One target pass over known and drafted tokens; logits ``[R, V]`` of the rows that choose tokens.

        A request that emits has ``1 + k`` rows, in the order of ``plan``; one that only prefills has none.
        """
        started = time.perf_counter()
        segments: list[Segment] = []
        tokens: list[int] = []
        rows: list[int] = []
        for scheduled, proposal in zip(plan, proposals, strict=True):
            request, known = scheduled.request, scheduled.num_known
            size = known + len(proposal.token_ids)
            segments.append(Segment(request.table, request.computed, size, parents=proposal.parents))
            tokens += request.token_ids[request.computed : request.computed + known]
            if scheduled.emits:
                rows += range(len(tokens) - 1, len(tokens) + len(proposal.token_ids))
            tokens += proposal.token_ids
        self.batch = RaggedBatch(segments, torch.tensor(tokens, device=self.target.device))
        logits = self.target.forward(self.batch, self.store, torch.tensor(rows or [0], device=self.target.device))
        self.timings.verify = time.perf_counter() - started
        return logits[: len(rows)]

    def last_hidden(self, place: int) -> Tensor:
        """The tapped states ``[taps · H]`` of the last token that the request at ``place`` of the plan had in this pass."""
        return self.taps.row(self.batch.offsets[place + 1] - 1)

    def judge(self, plan: Sequence[Scheduled], proposals: Sequence[Proposal], logits: Tensor) -> list[Verdict]:
        """A verdict for every scheduled request (see ``engine/judging.py``)."""
        started = time.perf_counter()
        verdicts = judge(plan, proposals, logits)
        self.timings.verify += time.perf_counter() - started
        return verdicts

    # -- keep ----------------------------------------------------------------------------------------------------------
    def compact(self, plan: Sequence[Scheduled], verdicts: Sequence[Verdict]) -> None:
        """Move the target's K/V of accepted tree nodes to the positions their tokens now have."""
        started = time.perf_counter()
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for scheduled, verdict in zip(plan, verdicts, strict=True):
            if not verdict.path:
                continue
            nodes = np.asarray(verdict.path, dtype=np.int64)
            places = np.arange(1, len(nodes) + 1)
            away = nodes != places
            if away.any():
                start, table = scheduled.request.computed, scheduled.request.table
                slots = table.slot_array(start, start + int(nodes[-1]) + 1)
                sources.append(torch.from_numpy(slots[nodes[away]]))
                targets.append(torch.from_numpy(slots[places[away]]))
        if sources:
            self.store.move(*(torch.cat(slots).to(self.target.device) for slots in (sources, targets)))
        self.timings.verify += time.perf_counter() - started

    # -- inject --------------------------------------------------------------------------------------------------------
    def inject(self, plan: Sequence[Scheduled], verdicts: Sequence[Verdict]) -> None:
        """Project the features of known and accepted positions into the drafter's K/V."""
        if self.drafter is None:
            return
        started = time.perf_counter()
        features = self.taps.take()[0]
        for adapter, places in _by_adapter(plan).items():
            injection = self.injection if adapter is None else adapter.injection
            self._inject(features, plan, verdicts, places, injection)
        self.timings.draft += time.perf_counter() - started

    def _inject(
        self,
        features: Tensor,
        plan: Sequence[Scheduled],
        verdicts: Sequence[Verdict],
        places: list[int],
        injection: Injection,
    ) -> None:
        """Inject for the requests at ``places`` of the plan, out of the ``features [T, taps · H]`` of the whole pass."""
        kept, slots = [], []
        for place in places:
            scheduled, verdict, start = plan[place], verdicts[place], self.batch.offsets[place]
            request, size = scheduled.request, scheduled.num_known + verdict.accepted
            skip = max(0, size - request.draft_table.capacity) if request.draft_table.is_ring else 0
            kept.append(kept_rows(scheduled.num_known, verdict, start, skip))
            slots.append(request.draft_table.slots(request.computed + skip, request.computed + size))
        rows, where = kept[0], slots[0]
        if len(kept) > 1:
            rows, where = (torch.cat([_as_indices(s) for s in parts]).to(features.device) for parts in (kept, slots))
        injection(features[rows], self.batch.positions[rows], where)


def _walk_lattices(plan: list[Scheduled], head: BoundHead, hidden: Tensor, logits: Tensor) -> list[Proposal]:
    """Trees and greedy chains."""
    anchors = [scheduled.request.token_ids[-1] for scheduled in plan]
    lattices = head.lattices(hidden, logits, anchors, [scheduled.max_draft for scheduled in plan])
    return [
        expand(lattice, s.max_nodes, draft_temperature(s.request.params)) if s.max_nodes else walk_greedy(lattice)
        for lattice, s in zip(lattices, plan, strict=True)
    ]


def _walk_laws(plan: list[Scheduled], head: BoundHead, hidden: Tensor, logits: Tensor) -> list[Proposal]:
    """Chains of requests that sample alike, all matched or none."""
    requests = [scheduled.request for scheduled in plan]
    blocks = [
        Block(scheduled.max_draft, request.token_ids[-1], request.noise, len(request.token_ids))
        for scheduled, request in zip(plan, requests, strict=True)
    ]
    walk = walk_coupled if requests[0].is_coupled else walk_sampled
    return walk(head.transitions(hidden, logits), blocks, requests[0].params)


def _by_adapter(plan: Sequence[Scheduled]) -> dict[Adapter | None, list[int]]:
    """Places in the plan of the requests that each adapter drafts for."""
    groups: dict[Adapter | None, list[int]] = {}
    for place, scheduled in enumerate(plan):
        groups.setdefault(scheduled.request.adapter, []).append(place)
    return groups


def check_pair(drafter: Drafter, target: Target) -> None:
    """Refuse a drafter that was trained for another target."""
    drafter.config.check_target(
        hidden_size=target.hidden_size, vocab_size=target.vocab_size, num_layers=target.num_layers
    )


def _processed(plan: Sequence[Scheduled], logits: Tensor) -> Tensor:
    """Slot logits ``[Σ k, V]`` under the penalties of what is accepted so far: the draft's own tokens are not known yet."""
    if all(scheduled.request.counts is None for scheduled in plan):
        return logits
    parts = []
    for scheduled, rows in zip(plan, torch.split(logits, [s.max_draft for s in plan]), strict=True):
        request = scheduled.request
        parts.append(rows if request.counts is None else process(rows, request.params, request.counts))
    return torch.cat(parts)


def _as_indices(slots: slice | Tensor) -> Tensor:
    return torch.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots
