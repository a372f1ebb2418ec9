"""Requests, works and steps made up without an engine."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from volley.config import DecodingConfig
from volley.decode.detokenize import Detokenizer
from volley.decode.sampling import PositionNoise
from volley.decode.stops import StopFinder
from volley.decode.tree import position_lattices
from volley.decode.work import Proposal, Work
from volley.engine.step import Step
from volley.memory.batch import RaggedBatch
from volley.memory.kv_cache import BlockTable
from volley.models.drafters.heads import Lattice
from volley.params import SamplingParams
from volley.policies.cost import Costs
from volley.procedures.request import Request
from volley.procedures.speculative import Speculative
from volley.procedures.text import TextWriter

SPECULATIVE = Speculative(DecodingConfig())


def request(
    token_ids: Sequence[int],
    params: SamplingParams | None = None,
    *,
    page_size: int = 4,
    answered: int = 0,
    detokenizer: Detokenizer | None = None,
    **fields: Any,
) -> Request:
    """A request of which nothing is computed; the last ``answered`` of its tokens are output."""
    params = params or SamplingParams(max_tokens=20)
    table = BlockTable(page_size)
    values: dict[str, Any] = {
        "request_id": 0,
        "params": params,
        "noise": PositionNoise(params.seed or 0),
        "max_length": len(token_ids) - answered + params.max_tokens,
        "stop_token_ids": frozenset(params.stop_token_ids),
        "writer": TextWriter(
            detokenizer or Detokenizer(None),
            frozenset(params.stop_token_ids),
            StopFinder(params.stop, {}) if params.stop else None,
        ),
        "table": table,
        "draft_table": table,
        "procedure": SPECULATIVE,
        "pool_slots": 2**20,
    }
    made = Request(token_ids=list(token_ids), **{**values, **fields})
    made.num_prompt -= answered
    return made


def decoding(token_ids: Sequence[int], params: SamplingParams | None = None, **fields: Any) -> Request:
    """A request whose prompt was read and whose last token is its only output."""
    made = request(token_ids, params, answered=1, **fields)
    made.computed = len(token_ids) - 1
    return made


def keep_first_drafted(works: Sequence[Work[Request]]) -> None:
    """A planted fault: the first token of every draft is kept unseen."""
    for work in works:
        if work.proposal.token_ids and work.verdict.token_ids:
            work.verdict.token_ids[0] = work.proposal.token_ids[0]


def costs(draft: float = 0.1, token: float = 0.1) -> Costs:
    return Costs(lambda tokens, requests: draft, lambda tokens, requests: 1 + token * tokens)


def with_batch(step: Step) -> Step:
    """The step with the batch that the runner would make of its works."""
    made = [work.request.procedure.segment(work) for work in step.works]
    step.batch = RaggedBatch([segment for _, segment in made], torch.tensor([t for own, _ in made for t in own]))
    return step


def random_tree(size: int, vocab: int, chance: random.Random) -> Proposal:
    """A tree of at most ``size`` tokens; no two children of one node are the same token."""
    families: list[tuple[int, int]] = []
    for _ in range(size):
        family = chance.randint(0, len(families)), chance.randrange(vocab)
        if family not in families:
            families.append(family)
    return Proposal([token for _, token in families], parents=tuple(parent for parent, _ in families))


def random_path(proposal: Proposal, chance: random.Random) -> tuple[int, ...]:
    """Nodes of a tree from a child of the anchor on, each following the one before."""
    assert proposal.parents is not None
    path: list[int] = []
    while children := [
        node for node, parent in enumerate(proposal.parents, start=1) if parent == (path[-1] if path else 0)
    ]:
        if chance.random() < 0.25:
            break
        path.append(chance.choice(children))
    return tuple(path)


def lattice_of(logits: Tensor) -> Lattice:
    """The lattice of one block of independent positions, of ``logits [k, V]``."""
    (lattice,) = position_lattices(logits, [len(logits)])
    return lattice
