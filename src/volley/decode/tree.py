"""Build draft trees: the most likely continuations by the drafter, under a budget of nodes (DDTree, arXiv 2604.12989).

Every position has its C best candidates, and the probability of a path is the product of theirs. A node is accepted only with
all its ancestors, so its value is the probability of its path. The best tree of n nodes consists of the n most likely paths.
These form a tree, because no path is more likely than its prefix. A heap finds them in order.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import accumulate
from math import exp, inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from volley.decode.sampling import PositionNoise, draft_probs, draft_temperature
from volley.decode.work import Proposal
from volley.models.drafters.heads import Lattice
from volley.params import SamplingParams

CANDIDATES = 16
"""Candidates per position; trees of a few dozen nodes hardly ever use a less likely token."""


def coupled_logits(logits: Tensor, params: SamplingParams, noise: PositionNoise, positions: Sequence[int]) -> Tensor:
    """Change ``logits [k, V]`` of ``positions`` (k, or one for all), so that they rank tokens as the target may choose them.

    A sampled target draws ``argmax p / e``, and the noise e of each position is known here. So q / e predicts its choice far
    better than q does.
    """
    if params.temperature == 0:
        return logits
    weights = draft_probs(logits, params)
    weights /= noise.exponentials(positions, logits.shape[-1], weights.device)
    return weights.log_() * (draft_temperature(params) or 1.0)


def position_lattices(logits: Tensor, sizes: Sequence[int]) -> list[Lattice]:
    """Make lattices of independent positions, one for each block of ``sizes``: the best tokens of each row of ``logits [Σ k,
    V]``.

    All of them are read from the device in one copy.
    """
    best = logits.float().topk(min(CANDIDATES, logits.shape[-1]), dim=-1)
    scores, tokens = torch.stack([best.values, best.indices.float()]).cpu().numpy()  # ids below 2²⁴ are exact
    ends = list(accumulate(sizes, initial=0))
    return [Lattice(tokens[own].astype(np.int64), scores[own, None]) for own in map(slice, ends, ends[1:])]


def expand(lattice: Lattice, num_nodes: int, temperature: float = 1.0) -> Proposal:
    """Return the tree of the ``num_nodes`` most likely nodes, not counting the anchor; it has fewer if no others are possible.

    Probabilities are the softmax of ``scores / temperature`` over a position's candidates; temperature 0 counts as 1. Nodes
    are in preorder, more likely siblings first. So the most likely path comes first, and if it is accepted its K/V need no
    move.
    """
    costs, order = _sorted_families(lattice.scores / (temperature or 1.0))
    chosen: list[tuple[int, float]] = []  # (token, cost of the path) of each node
    children: list[list[int]] = [[]]  # by node; the anchor is node 0
    # (cost of the path, serial number, parent, cost of the parent's path, position, family, rank in the family)
    heap = [(costs[0][0][0], 0, 0, 0.0, 0, 0, 0)] if num_nodes > 0 else []
    serial = 0
    while heap and len(chosen) < num_nodes and heap[0][0] < inf:
        cost, _, parent, base, position, family, rank = heappop(heap)
        candidate = order[position][family][rank]
        chosen.append((int(lattice.tokens[position, candidate]), cost))
        children.append([])
        children[parent].append(len(chosen))
        siblings = costs[position][family]
        serial += 2
        if rank + 1 < len(siblings):
            heappush(heap, (base + siblings[rank + 1], serial, parent, base, position, family, rank + 1))
        if (place := position + 1) < len(costs):
            following = candidate if len(costs[place]) > 1 else 0
            likeliest = cost + costs[place][following][0]
            heappush(heap, (likeliest, serial + 1, len(chosen), cost, place, following, 0))
    return in_preorder(chosen, children)


def _sorted_families(scores: NDArray[np.float32]) -> tuple[list[list[list[float]]], list[list[list[int]]]]:
    """Sort candidates by cost ``−log q``. Return costs and indices by position and family; a family has one candidate before
    it."""
    order = (-scores).argsort(axis=-1, kind="stable")
    below = np.take_along_axis(scores, order, axis=-1)
    best = below[..., :1]
    below = np.subtract(best, below, out=np.zeros_like(below), where=best != below)  # ∞ − ∞ counts as 0
    costs = np.where(best > -np.inf, below + np.log(np.exp(-below).sum(axis=-1, keepdims=True)), np.inf)
    return costs.tolist(), order.tolist()


Children = Callable[[list[int]], list[tuple[int, float]]]
"""Function from a path to its next candidates, each with its cost ``−log q``."""


def expand_freely(children_of: Children, num_nodes: int, levels: int) -> Proposal:
    """Like :func:`expand`, for candidates that depend on the whole path before them; at most ``levels`` deep."""
    chosen: list[tuple[int, float]] = []
    paths: list[list[int]] = [[]]  # by node
    children: list[list[int]] = [[]]
    heap: list[tuple[float, int, int]] = []  # (cost of the path, parent, token)

    def offer(node: int, base: float) -> None:
        for token, cost in children_of(paths[node]) if len(paths[node]) < levels else []:
            heappush(heap, (base + cost, node, token))

    if num_nodes > 0:
        offer(0, 0.0)
    while heap and len(chosen) < num_nodes:
        cost, parent, token = heappop(heap)
        chosen.append((token, cost))
        children.append([])
        children[parent].append(len(chosen))
        paths.append([*paths[parent], token])
        offer(len(chosen), cost)
    return in_preorder(chosen, children)


def in_preorder(chosen: list[tuple[int, float]], children: list[list[int]]) -> Proposal:
    """Return the tree of ``chosen`` nodes, each a token and the cost of its path, given the ``children`` of the anchor and of
    each node, likeliest first. Nodes are numbered from 1."""
    tokens, parents, probabilities = list[int](), list[int](), list[float]()
    stack = [(node, 0) for node in reversed(children[0])]
    while stack:
        node, parent = stack.pop()
        token, cost = chosen[node - 1]
        tokens.append(token)
        parents.append(parent)
        probabilities.append(exp(-cost))
        place = len(tokens)
        stack += [(child, place) for child in reversed(children[node])]
    return Proposal(tokens, parents=tuple(parents), confidence=probabilities)


def likeliest_first(tree: Proposal) -> list[int]:
    """Return the node indices, most likely first; any number of the first ones form a tree."""
    return sorted(range(len(tree.token_ids)), key=lambda node: -tree.confidence[node])  # stable: parents come first


def prune(tree: Proposal, size: int) -> Proposal:
    """Keep the ``size`` most likely nodes of a tree."""
    kept = sorted(likeliest_first(tree)[:size])
    places = {0: 0} | {node + 1: place for place, node in enumerate(kept, start=1)}
    assert tree.parents is not None
    return replace(
        tree,
        token_ids=[tree.token_ids[node] for node in kept],
        parents=tuple(places[tree.parents[node]] for node in kept),
        confidence=[tree.confidence[node] for node in kept],
    )
