"""Draft token by token, and draft with a plain draft model: another causal LM with the target's tokenizer.

The draft model is a baseline for block drafters. It keeps K/V of the texts that it drafted for last, and compares tokens to
find how much of them is still valid. So it needs no notice of accepted tokens or of requests that ended.
"""

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from volley.decode.constrained import Following, columns, walk_constrained
from volley.decode.on_device import read_drafts
from volley.decode.propose import WALKS, Transitions
from volley.decode.rules import apply_rules, constraints
from volley.decode.sampling import best_tokens, confidences
from volley.decode.work import Drafted, Work, Works, group_by
from volley.errors import MismatchError
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_cache import BlockTable, PagePool
from volley.memory.kv_store import make_store
from volley.models.targets.rehearsal import context_of, fastest, made_up, spread
from volley.models.targets.target import Target
from volley.proposers.base import Proposer

_PAGE = 16


class ChainProposer(Proposer):
    """A drafter that makes one pass for each token of a chain."""

    vocab_size: int
    device: torch.device
    """Device on which drafts are verified."""

    @abstractmethod
    def open(self, works: Works) -> list[Work[Any]]:
        """Prepare to :meth:`read` the anchors of ``works``; return the works that fit."""

    @abstractmethod
    def read(self, requests: Sequence[Drafted], token_ids: list[int]) -> Tensor:
        """Read one more token of each of n requests; return the logits ``[n, V]`` after them."""

    def propose(self, works: Works, *, with_confidence: bool) -> float:
        drafted = self.open(works)
        opened = set(map(id, drafted))
        for work in works:
            if id(work) not in opened:
                work.spec = work.spec.cut(0)  # a draft that was not made must not count
        for work in (work for work in drafted if constraints(work.request.rules)):
            following = self._following(work)
            work.proposal = walk_constrained(following, work, self.device, with_confidence=with_confidence)
        free = [work for work in drafted if not constraints(work.request.rules)]
        alike = group_by(free, lambda work: (work.spec.rule, work.request.params.distribution))
        for (rule, _), indices in alike.items():
            members = [free[index] for index in indices]
            sure = [0.0] * sum(work.spec.positions for work in members) if with_confidence else None
            proposals = WALKS[rule](self._transitions(members, sure), members)
            starts = _starts(members)
            for work, proposal, start in zip(members, proposals, starts, strict=True):
                work.proposal = proposal
                if sure is not None:
                    proposal.confidence = sure[start : start + work.spec.positions]
            read_drafts(members)
        return 0.0

    def _transitions(self, works: Works, sure: list[float] | None) -> Transitions:
        """Return a function for logits after tokens, one position of each block at a time, in order. Confidences go into
        ``sure``, if given."""
        owner = [work for work in works for _ in range(work.spec.positions)]

        def after(rows: list[int], token_ids: list[int] | Tensor) -> Tensor:
            requests = [owner[row].request for row in rows]
            logits = self.read(requests, token_ids.tolist() if isinstance(token_ids, Tensor) else token_ids)
            if sure is not None:
                for row, probability in zip(rows, confidences(logits).tolist(), strict=True):
                    sure[row] = probability
            parts = zip(requests, torch.split(logits, 1), strict=True)
            return torch.cat([apply_rules(own.rules, row, [()]) if own.rules else row for own, row in parts])

        return after

    def _following(self, work: Work[Any]) -> Following:
        """Return such a function for the block of one work, without the rules of its request."""
        return Following(
            lambda _, token, among: columns(self.read([work.request], [token]), among), self.vocab_size, True
        )


@dataclass
class _Text:
    """Text of one request that the draft model has read."""

    table: BlockTable
    tokens: list[int] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    """Tokens between the read ones and the anchor."""


class AutoregressiveProposer(ChainProposer):
    """Drafts with another causal LM."""

    def __init__(self, model: Target, vocab_size: int, block_size: int = 8, num_tokens: int = 2**16) -> None:
        """Draft with ``model``. ``vocab_size`` is the target's; the pool holds K/V of ``num_tokens``."""
        if model.recurrent:
            raise MismatchError("the draft model has recurrent layers; give one whose layers are all attention")
        if model.vocab_size != vocab_size:
            raise MismatchError(
                f"the draft model has a vocabulary of {model.vocab_size} and the target one of {vocab_size}; give a draft model "
                "with the target's tokenizer"
            )
        self.model, self.vocab_size, self.block_size, self.device = model, vocab_size, block_size, model.device
        self.pool = PagePool(-(-num_tokens // _PAGE), _PAGE)
        self.store = make_store("auto", model.kv_shapes, self.pool.num_pages * _PAGE, model.dtype, model.device)
        self._texts: OrderedDict[int, _Text] = OrderedDict()  # by request id, least recently drafted for first
        self._seconds: dict[int, float] = {}

    def open(self, works: Works) -> list[Work[Any]]:
        return [work for work in works if self._open(work, works)]

    def _open(self, work: Work[Any], works: Works) -> bool:
        """Prepare the text of a work's request up to its anchor; return False if it does not fit with its draft."""
        request = work.request
        needed = request.length + work.spec.positions
        if needed > self.model.context_length:
            self._forget(request.request_id)
            return False
        text = self._texts.setdefault(request.request_id, _Text(BlockTable(_PAGE)))
        self._texts.move_to_end(request.request_id)
        before = request.token_ids[: request.length - 1]
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text.tokens, before, strict=False)))
        text.tokens, text.unread = before[:same], before[same:]
        self.pool.rollback(text.table, same)
        drafting = {other.request.request_id for other in works}
        while not self.pool.grow(text.table, needed):
            idle = next((key for key in self._texts if key not in drafting), None)
            if idle is None:
                return False
            self._forget(idle)
        return True

    def _forget(self, request_id: int) -> None:
        if (text := self._texts.pop(request_id, None)) is not None:
            self.pool.release(text.table)

    @torch.inference_mode()
    def read(self, requests: Sequence[Drafted], token_ids: list[int]) -> Tensor:
        """Read one more token of each request, after the unread tokens of its text."""
        texts = [self._texts[request.request_id] for request in requests]
        segments, tokens, last = list[Segment](), list[int](), list[int]()
        for text, token in zip(texts, token_ids, strict=True):
            new = [*text.unread, token]
            segments.append(Segment(text.table, len(text.tokens), len(new)))
            tokens += new
            last.append(len(tokens) - 1)
            text.tokens, text.unread = text.tokens + new, []
        batch, rows = RaggedBatch.on_device(segments, tokens, last, self.model.device)
        return self.model.forward(batch, self.store, rows)

    def seconds(self, tokens: int, requests: int) -> float:
        passes = -(-tokens // requests) - 1
        if requests not in self._seconds:
            model, lengths = self.model, spread(requests, requests)
            context = context_of(lengths, model.context_length)
            batch, store = made_up(lengths, model.kv_shapes, model.dtype, model.device, causal=True, context=context)
            rows = torch.arange(requests, device=model.device)
            self._seconds[requests] = fastest(lambda: best_tokens(model.forward(batch, store, rows)), model.device)
        return passes * self._seconds[requests]


def _starts(works: Works) -> Iterator[int]:
    """Yield the first row of each work."""
    row = 0
    for work in works:
        yield row
        row += work.spec.positions
