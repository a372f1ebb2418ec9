"""Engines that are wrong in one way each, made through the seams that anybody may use."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tests.tiny import Pair
from volley import Engine
from volley.decode.on_device import Reading
from volley.decode.sampling import token_probs
from volley.decode.work import DraftSpec, Proposal, Rule, Verdict, Work, Works
from volley.engine.kv_manager import TargetPages
from volley.procedures.request import Request
from volley.procedures.speculative import Speculative
from volley.proposers.base import Proposer

VOCAB = 50


class Guess(Proposer):
    """Draws tokens from one distribution, whatever the text, and says so; greedy drafts are its likeliest token."""

    block_size = 3

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(VOCAB, generator=self.generator)

    def propose(self, works: Works, *, with_confidence: bool) -> float:
        for work in works:
            size, params = work.spec.positions, work.request.params
            if work.spec.rule is not Rule.REJECTION:
                work.proposal = Proposal([int(self.logits.argmax())] * size, confidence=[0.5] * size)
                continue
            q = token_probs(self.logits.expand(size, -1).clone(), params)
            tokens = torch.multinomial(q, 1, generator=self.generator)[:, 0].tolist()
            work.proposal = Proposal(tokens, self.stated(q, params.temperature), confidence=[0.5] * size)
        return 0.0

    def stated(self, q: Tensor, temperature: float) -> Tensor:
        return q


class TemperatureIgnored(Guess):
    """Says the probabilities that its tokens would have had at temperature 1."""

    def stated(self, q: Tensor, temperature: float) -> Tensor:
        warm = q**temperature
        return warm / warm.sum(-1, keepdim=True)


class GreedyBonus(Speculative):
    """Behind a draft that was kept whole comes the likeliest token, at every temperature."""

    def verify(self, works: Sequence[Work[Request]], logits: Tensor) -> Reading:
        super().verify(works, logits).read()
        for work in works:
            draft, verdict = work.proposal.token_ids, work.verdict
            if draft and verdict.accepted == len(draft) and work.proposal.parents is None:
                verdict.token_ids[-1] = int(logits[work.rows][-1].argmax())
        return Reading()


class OffByOne(Speculative):
    """Keeps the first draft token that is wrong."""

    def verify(self, works: Sequence[Work[Request]], logits: Tensor) -> Reading:
        super().verify(works, logits).read()
        for work in works:
            draft, kept = work.proposal.token_ids, work.verdict.accepted
            if kept < len(draft) and work.proposal.parents is None and work.request.params.temperature == 0:
                best = int(logits[work.rows][kept + 1].argmax())
                work.verdict = Verdict(kept + 1, [*draft[: kept + 1], best])
        return Reading()


class RatioOnTrees(Speculative):
    """Judges the nodes of sampled trees by min(1, p / q), as if they had been drawn from q."""

    def verify(self, works: Sequence[Work[Request]], logits: Tensor) -> Reading:
        super().verify(works, logits).read()
        for work in works:
            proposal, params = work.proposal, work.request.params
            if proposal.parents is None or params.temperature == 0:
                continue
            probs = token_probs(logits[work.rows].float(), params)
            confidence, node, path = [1.0, *proposal.confidence], 0, list[int]()
            while True:
                kept = None
                for child, parent in enumerate(proposal.parents, 1):
                    q = confidence[child] / max(confidence[node], 1e-9)
                    p = float(probs[node, proposal.token_ids[child - 1]])
                    if parent == node and float(torch.rand(())) < p / max(q, 1e-9):
                        kept = child
                        break
                if kept is None:
                    break
                path.append(kept)
                node = kept
            tokens = [proposal.token_ids[child - 1] for child in path]
            work.verdict = Verdict(len(path), [*tokens, int(torch.multinomial(probs[node], 1))], tuple(path))
        return Reading()


class TopPIgnored(Speculative):
    def next_work(self, request: Request, spec: DraftSpec) -> Work[Request]:
        request.params = replace(request.params, top_p=1.0)
        return super().next_work(request, spec)


class PenaltiesIgnored(Speculative):
    def next_work(self, request: Request, spec: DraftSpec) -> Work[Request]:
        request.rules = ()
        return super().next_work(request, spec)


class Leak(Speculative):
    """The first two requests of a pass get each other's logits."""

    def verify(self, works: Sequence[Work[Request]], logits: Tensor) -> Reading:
        rows = [work.rows.start for work in works if work.rows.stop > work.rows.start][:2]
        if len(rows) == 2:
            logits = logits.clone()
            logits[rows] = logits[rows[::-1]]
        return super().verify(works, logits)


class StalePages(TargetPages):
    """A prefix that is found in the cache comes with the K/V of its first token everywhere."""

    def match_prefix(self, request: Request, most: int) -> int:
        found = super().match_prefix(request, most)
        if found:
            slots = torch.from_numpy(request.table.slot_array(0, found))
            self.store.move(slots[:1].expand(len(slots)), slots)
        return found


def answer_by(engine: Engine, procedure: Speculative) -> None:
    """All requests from now on."""
    engine.procedure = engine.procedures.speculative = procedure


def with_procedure(kind: Callable[..., Speculative]) -> Callable[[Pair], Engine]:
    def make(pair: Pair) -> Engine:
        engine = Engine(pair.target, proposer=Guess(), page_size=4)
        answer_by(engine, kind(engine.config))
        return engine

    return make


def temperature_ignored(pair: Pair) -> Engine:
    return Engine(pair.target, proposer=TemperatureIgnored(), page_size=4)


def ratio_on_trees(pair: Pair) -> Engine:
    unsure = copy.deepcopy(pair.drafter)
    unsure.norm.weight.mul_(0.2)  # where q is 1 the fault has no effect
    engine = Engine(pair.target, unsure, page_size=4)
    answer_by(engine, RatioOnTrees(engine.config))
    return engine


def stale_pages(pair: Pair) -> Engine:
    engine = Engine(pair.target, pair.drafter, page_size=4)
    pages = engine.core.kv_manager.pages
    stale = StalePages(pages.pool, pages.store, prefix_caching=True)
    engine.core.kv_manager.pages = stale
    engine.core.kv_manager.states = (stale, *engine.core.kv_manager.states[1:])
    return engine


FAULTS: dict[str, tuple[Callable[[Pair], Engine], str]] = {
    "temperature ignored in the draft": (temperature_ignored, "temperature"),
    "greedy bonus at T > 0": (with_procedure(GreedyBonus), "bonus tokens"),
    "off-by-one acceptance": (with_procedure(OffByOne), "acceptance"),
    "min(1, p/q) on trees": (ratio_on_trees, "trees"),
    "stale K/V after a prefix hit": (stale_pages, "prefix cache"),
    "top_p ignored": (with_procedure(TopPIgnored), "top_p"),
    "penalties ignored": (with_procedure(PenaltiesIgnored), "penalties"),
    "leak between requests": (with_procedure(Leak), "concurrency"),
}
"""How each is made, and the word that its finding begins with."""
