"""Draft with an EAGLE-3 drafter: one pass of its layer for each token of a chain or each level of a tree, for all requests
together.

A tree consists of the likeliest paths (EAGLE-2, Li et al. 2024). A level keeps the n likeliest of all paths so far. No path is
likelier than its beginning, so none of the n likeliest paths of the whole tree is lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from volley.config import DraftingConfig
from volley.decode.rules import apply_rules, constraints
from volley.decode.sampling import best_tokens, draft_temperature
from volley.decode.tree import CANDIDATES, coupled_logits, in_preorder
from volley.decode.work import Drafted, Proposal, Shape, Work, Works
from volley.errors import ConfigError
from volley.memory.batch import RaggedBatch, Segment
from volley.models.drafters.eagle_model import EagleModel
from volley.models.targets.rehearsal import context_of, fastest, made_up, spread
from volley.proposers.autoregressive import ChainProposer


@dataclass
class _Chain:
    """Position of the next token of a request's draft, and the state ``[H]`` that predicts it."""

    position: int
    state: Tensor


class _Node(NamedTuple):
    token: int
    parent: int
    cost: float
    """Cost ``−log q`` of its path."""
    state: Tensor
    """State ``[H]`` that it is read with: its parent's."""


class _Tree:
    """Growing tree of one work. Node 0 is the anchor. All nodes lie behind their parents."""

    def __init__(self, work: Work[Any], state: Tensor) -> None:
        self.work = work
        self.nodes = [_Node(work.request.anchor, 0, 0.0, state)]
        self.leaves = [0]
        """Nodes of the last level, whose children are not known yet."""
        self.level = 0

    def segment(self) -> Segment:
        request, parents = self.work.request, tuple(node.parent for node in self.nodes[1:])
        return Segment(request.draft_table, request.length - 2, len(self.nodes), parents=parents)

    def add(self, logits: Tensor, states: Tensor) -> None:
        """Add the children of all leaves, given logits ``[leaves, V]`` and states ``[leaves, H]``; keep the likeliest nodes."""
        request, spec = self.work.request, self.work.spec
        if request.rules:
            logits = apply_rules(request.rules, logits, [()] * len(logits))
        logits = coupled_logits(logits, request.params, request.noise, [request.length + self.level])
        best = logits.float().topk(min(CANDIDATES, logits.shape[-1]), dim=-1)
        costs = -(best.values / (draft_temperature(request.params) or 1.0)).log_softmax(dim=-1)
        known = len(self.nodes)
        for leaf, tokens, own, state in zip(self.leaves, best.indices.tolist(), costs.tolist(), states, strict=True):
            base = self.nodes[leaf].cost
            self.nodes += [_Node(token, leaf, base + cost, state) for token, cost in zip(tokens, own, strict=True)]
        possible = [node for node in range(1, len(self.nodes)) if self.nodes[node].cost < inf]
        order = sorted(possible, key=lambda node: self.nodes[node].cost)[: spec.size]
        places = {node: place for place, node in enumerate([0, *order])}
        self.leaves = [places[node] for node in order if node >= known]
        self.nodes = [self.nodes[node]._replace(parent=places[self.nodes[node].parent]) for node in places]
        self.level += 1

    def proposal(self) -> Proposal:
        children: list[list[int]] = [[] for _ in self.nodes]
        for place, node in enumerate(self.nodes[1:], start=1):
            children[node.parent].append(place)
        return in_preorder([(node.token, node.cost) for node in self.nodes[1:]], children)


class EagleProposer(ChainProposer):
    def __init__(self, model: EagleModel, config: DraftingConfig) -> None:
        self.model, self.vocab_size, self.device = model, model.drafter.config.vocab_size, model.device
        self.block_size, self.can_grow_trees = model.block_size, model.window is None  # a ring has no room for a tree
        self.configure(config)
        self._chains: dict[int, _Chain] = {}
        self._seconds: dict[int, tuple[float, float]] = {}

    def configure(self, config: DraftingConfig) -> None:
        if config.denoising_steps > 1:
            raise ConfigError(
                f"denoising_steps is {config.denoising_steps}, and an EAGLE-3 drafter writes token by token; use 1"
            )

    def propose(self, works: Works, *, with_confidence: bool) -> float:
        for work in works:
            if work.spec.shape is Shape.TREE and constraints(work.request.rules):  # they allow one token after another
                work.spec = replace(work.spec, shape=Shape.CHAIN).cut(work.spec.positions)
        self._grow([work for work in works if work.spec.shape is Shape.TREE])
        chains = [work for work in works if work.spec.shape is not Shape.TREE]
        return super().propose(chains, with_confidence=with_confidence) if chains else 0.0

    def _grow(self, works: Works) -> None:
        """Fill in trees, level by level. Each pass reads the whole trees so far, because their nodes are numbered anew."""
        trees = [_Tree(*pair) for pair in zip(works, self._first_states(works), strict=True)] if works else []
        while growing := [tree for tree in trees if tree.leaves and tree.level < tree.work.spec.positions]:
            nodes, rows = list[_Node](), list[int]()
            for tree in growing:
                rows += [len(nodes) + leaf for leaf in tree.leaves]
                nodes += tree.nodes
            batch, chosen = RaggedBatch.on_device(
                [tree.segment() for tree in growing], [node.token for node in nodes], rows, self.device
            )
            before = torch.stack([node.state for node in nodes])
            found = self.model.advance(batch, self.model.store, before, chosen)
            sizes = [len(tree.leaves) for tree in growing]
            for tree, logits, own in zip(growing, *(torch.split(part, sizes) for part in found), strict=True):
                tree.add(logits, own)
        for tree in trees:
            tree.work.proposal = tree.proposal()

    def _first_states(self, works: Works) -> Tensor:
        """Return the states ``[n, H]`` with which the anchors of ``works`` are read."""
        return self.model.eagle.fused_states(torch.stack([work.request.tapped for work in works]))

    def open(self, works: Works) -> list[Work[Any]]:
        states = self._first_states(works)
        self._chains = {
            work.request.request_id: _Chain(work.request.length - 2, state)
            for work, state in zip(works, states, strict=True)
        }
        return list(works)

    def read(self, requests: Sequence[Drafted], token_ids: list[int]) -> Tensor:
        chains = [self._chains[request.request_id] for request in requests]
        segments = [
            Segment(request.draft_table, chain.position, 1) for request, chain in zip(requests, chains, strict=True)
        ]
        batch, _ = RaggedBatch.on_device(segments, token_ids, [0], self.model.device)
        logits, states = self.model.advance(batch, self.model.store, torch.stack([chain.state for chain in chains]))
        for chain, state in zip(chains, states, strict=True):
            chain.position, chain.state = chain.position + 1, state
        return logits

    @torch.inference_mode()
    def seconds(self, tokens: int, requests: int) -> float:
        """Measure the seconds of all steps of the chains, and of the draft K/V of one token of each request."""
        if requests not in self._seconds:
            model, eagle = self.model, self.model.eagle
            lengths = spread(requests, requests)
            context = context_of(lengths, eagle.rotary.length)
            batch, store = made_up(lengths, eagle.kv_shapes, model.dtype, model.device, causal=True, context=context)
            tapped = torch.zeros(requests, eagle.fc.in_features, dtype=model.dtype, device=model.device)
            states = eagle.fused_states(tapped)
            embeddings = eagle.embed(batch.token_ids, model.embed)
            self._seconds[requests] = (
                fastest(lambda: best_tokens(model.advance(batch, store, states)[0]), model.device),
                fastest(
                    lambda: eagle.keys_values(embeddings, eagle.fused_states(tapped), batch.positions), model.device
                ),
            )
        step, making = self._seconds[requests]
        return (-(-tokens // requests) - 1) * step + making
