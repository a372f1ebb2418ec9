"""A request, from arrival to result, and its procedure: how it turns passes of the target into tokens."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from volley.decode.canvas import Canvas
from volley.decode.detokenize import Detokenizer
from volley.decode.lookup import CERTAIN, Lookup, found_confidence
from volley.decode.rules import TokenRule, constraints, forced_tokens
from volley.decode.sampling import PositionNoise
from volley.decode.stops import StopFinder
from volley.decode.work import NO_DRAFT, Ask, Kind, Work
from volley.errors import NonFiniteError
from volley.memory.batch import Segment
from volley.memory.kv_cache import BlockTable
from volley.models.drafters.adapter import Adapter
from volley.policies.base import View
from volley.types import (
    MASKED,
    CanvasDraft,
    FinishReason,
    GenerationResult,
    GenerationStats,
    SamplingParams,
    TextChunk,
)


class Procedure(ABC):
    """One object serves all requests that decode by it. Whatever belongs to one request is kept in the request."""

    reads_late = False
    """Whether :meth:`absorb` accepts drafts that the host has not read (``decode/late.py``)."""

    def check(self, request: "Request") -> None:
        """Raise an error for a new request whose parameters it cannot honour."""

    def prefill_end(self, request: "Request") -> int:
        """Positions to compute before decoding: the prompt, or after a preemption everything but the anchor."""
        return request.num_prompt if request.num_output == 0 else request.length - 1

    def matchable(self, request: "Request") -> int:
        """How many of the first tokens the prefix cache may give: all but the last, whose logits are needed."""
        return request.length - 1

    def most_tokens(self, num_prompt: int, context_length: int, params: SamplingParams) -> int:
        """How long a request may become, prompt included, where ``context_length`` tokens have room."""
        return context_length

    def reach(self, num_prompt: int, max_length: int, params: SamplingParams) -> int:
        """The positions that a request of ``max_length`` tokens needs."""
        return max_length

    def is_followed(self, params: SamplingParams) -> bool:
        """Whether a drafter keeps up with the text, for this request or for others that share its pages."""
        return True

    def prefix_root(self, params: SamplingParams, page_size: int) -> bytes | None:
        """The root of the request's page hashes: pages are shared among requests with one root, and never if it is ``None``."""
        return b""

    def view(self, request: "Request", largest: int) -> View | None:
        """What the policy sees, with blocks of at most ``largest``; ``None`` if nothing is drafted for this request."""
        return None

    def read(self, request: "Request", num_tokens: int) -> Work["Request"]:
        """The work that computes the next ``num_tokens`` of a prompt, or of tokens whose K/V a preemption dropped."""
        view = self.view(request, 1)
        ask = NO_DRAFT if view is None else view.draft(0)
        return Work(request, ask, Kind.PREFILL, num_tokens)

    @abstractmethod
    def next_work(self, request: "Request", ask: Ask) -> Work["Request"]:
        """The work of a request that has been read; ``ask`` is the policy's decision about its view."""

    @abstractmethod
    def segment(self, work: Work["Request"]) -> tuple[list[int], Segment]:
        """The tokens that the target computes for a work, and their places."""

    @abstractmethod
    def num_rows(self, work: Work["Request"]) -> int:
        """How many of the segment's last tokens need logits."""

    @abstractmethod
    def absorb(self, works: Sequence[Work["Request"]], logits: Tensor) -> None:
        """Fill in the verdict of every work from its rows of ``logits [R, V]``: which tokens come out, which K/V stay."""


@dataclass(eq=False, slots=True)
class Request:
    """One prompt being answered.

    ``token_ids`` is prompt and output; K/V exist for positions ``[0, computed)``, of both models. Outside a step,
    a request that is decoding has ``computed == len(token_ids) - 1``: its last token is the anchor of the next cycle.
    """

    request_id: int
    token_ids: list[int]
    params: SamplingParams
    noise: PositionNoise
    max_length: int
    """Tokens, prompt included, at which the request ends for length."""
    stop_token_ids: frozenset[int]
    detokenizer: Detokenizer
    table: BlockTable
    draft_table: BlockTable
    """The drafter's pages: the same table, or a ring of its own under a draft window."""
    procedure: Procedure
    room: int
    """Slots of the pool, all of which it may have for a while."""
    stops: StopFinder = field(default_factory=lambda: StopFinder((), {}))
    """Looks for its stop strings."""
    rules: tuple[TokenRule, ...] = ()
    """What changes its logits: penalties, biases, a grammar, rules of the caller."""
    tapped: Tensor | None = None
    """The target's features ``[taps · H]`` of the last token that has K/V; only for drafters that write token by token."""
    rests: bool = False
    """Whether the drafter does not keep up with the text: nothing will be drafted, or nothing that shares its pages."""
    drafts_from: int = 0
    """The length at which drafts begin again after a rest."""
    plain_at: int = -1
    """The length at which the next token is computed without a draft, which may have spoilt the pass before."""
    adapter: Adapter | None = None
    """The adapter that drafts for this request; ``None``: the drafter itself."""
    prefix_root: bytes | None = b""
    """The parent of the first page's hash (:meth:`Procedure.prefix_root`); ``None``: its pages are not shared."""
    after: "Request | None" = None
    """A request with the same prompt: this one waits until it has been read, and then shares its pages."""
    num_prompt: int = 0
    computed: int = 0
    canvas: Canvas | None = None
    """The canvas that a diffusion language model is denoising; a preemption does not drop it."""
    shown: tuple[int, int] = (0, 0)
    """Start and number of passes of the canvas when it was last looked at for a draft."""
    drafted: tuple[str, list[int | None]] = ("", [])
    """Text and tokens of the draft that stands in the stream."""
    denoised_at: int = 0
    """The scheduler's step in which its canvas was last denoised or committed."""
    lookup: Lookup = field(default_factory=Lookup)
    foreseen: int = 0
    """The noise of positions before this one may have been used by a draft."""
    page_hashes: list[bytes] = field(default_factory=list)
    text: str = ""
    """Of the tokens that :meth:`write` has been over."""
    emitted_text: int = 0
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_ranks: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    """What was raised while its tokens or its text were taken."""
    failure: NonFiniteError | None = None
    """Why it ended with ``finish_reason`` "error"."""
    stats: GenerationStats = field(default_factory=GenerationStats)
    chunks: list[TextChunk] = field(default_factory=list)
    unwritten: list[tuple[int, bool]] = field(default_factory=list)
    """Tokens of the output without text so far, and whether each comes from a draft."""
    is_streamed: bool = True
    """Whether somebody may take its chunks. Otherwise there are none, and the tokens of a step become text together."""
    arrived: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.num_prompt = self.stats.prompt_tokens = len(self.token_ids)

    @property
    def anchor(self) -> int:
        return self.token_ids[-1]

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def prefill_end(self) -> int:
        """Positions to compute before decoding."""
        return self.procedure.prefill_end(self)

    @property
    def first_unscored(self) -> int | None:
        """The first position whose logits are still needed for the prompt's log-probabilities; ``None`` if there is none."""
        scored = len(self.prompt_logprobs)
        return scored if self.params.prompt_logprobs is not None and scored < self.num_prompt - 1 else None

    @property
    def is_decoding(self) -> bool:
        return self.computed == self.prefill_end

    @property
    def remaining(self) -> int:
        """Tokens the request may still emit."""
        return self.max_length - len(self.token_ids)

    def find(self, most: int) -> tuple[list[int], list[float]]:
        """At most ``most`` tokens that may come next, found without a model, and the confidence of each.

        First come the tokens that a grammar forces, then what followed such tokens in the text.
        """
        if not self.rules:
            copied, agreed = self.lookup.find(self.token_ids, most)
            return copied, found_confidence(agreed, len(copied))
        forced = forced_tokens(self.rules, [], most)
        copied, agreed = self.lookup.find(self.token_ids + forced, most - len(forced))
        for rule in constraints(self.rules):
            copied = copied[: max(0, rule.num_allowed(forced + copied) - len(forced))]
        return forced + copied, [CERTAIN] * len(forced) + found_confidence(agreed, len(copied))

    @property
    def is_torn(self) -> bool:
        """Whether an error came while its tokens were taken."""
        return self.stats.output_tokens != self.num_output

    def append(self, token_ids: list[int], num_from_draft: int) -> int:
        """Take the tokens of one cycle until the request ends; returns how many were taken.

        Their text is made by :meth:`write`, and here only where a stop string may end the request.
        """
        room, rules, has_stop = self.remaining, self.rules, bool(self.params.stop)
        for taken, token in enumerate(token_ids, start=1):
            self.token_ids.append(token)
            for rule in rules:
                rule.take(token)
            if token in self.stop_token_ids or (rules and any(rule.is_complete for rule in rules)):
                self.finish_reason = "stop"
            elif taken == room:
                self.finish_reason = "length"
            self.unwritten.append((token, taken <= num_from_draft))
            if has_stop:
                self.write()
            if self.finish_reason is not None:
                break
        return taken

    def fail(self) -> None:
        """End it, because the target computes no finite numbers for the next token."""
        self.finish_reason = "error"
        self.failure = NonFiniteError(
            f"the target's logits behind {self.length} tokens are not finite (NaN or infinite), so the request ended; look "
            "for NaN in the weights of the tokens that it uses, or load the target in another dtype, such as float32"
        )

    def write(self) -> None:
        """Make the text of the tokens that have none yet, with a chunk for each. A token whose text fails stays."""
        has_stop = bool(self.params.stop)
        if not (self.is_streamed or has_stop):
            self._write_together()
        while self.unwritten:
            token, from_draft = self.unwritten[0]
            known = len(self.text)
            is_last = len(self.unwritten) == 1 and self.finish_reason in ("stop", "length")
            if token in self.stop_token_ids:
                self.text += self.detokenizer.flush()
            else:
                self.text += self.detokenizer.push(token, last=is_last)
            if has_stop and (end := self.stops.find(self.text, known, token)) is not None:
                self.text, self.finish_reason = self.text[:end], "stop"
            self._emit(token, from_draft=from_draft)
            del self.unwritten[0]

    def _write_together(self) -> None:
        """The same without chunks, where no stop string is looked for."""
        tokens = [token for token, _ in self.unwritten]
        is_last = self.finish_reason in ("stop", "length")
        if tokens and tokens[-1] in self.stop_token_ids:
            self.text += self.detokenizer.push_all(tokens[:-1]) + self.detokenizer.flush()
        elif tokens:
            self.text += self.detokenizer.push_all(tokens, last=is_last)
        self.unwritten.clear()

    def _emit(self, token: int, *, from_draft: bool) -> None:
        """Release text, but hold back an end that may be the beginning of a stop string."""
        ready = self.stops.ready(self.text) if self.finish_reason is None else len(self.text)
        piece = self.text[self.emitted_text : ready]
        self.emitted_text = max(self.emitted_text, ready)
        self.chunks.append(TextChunk(piece, [token], from_draft))

    def take_chunks(self) -> list[TextChunk]:
        """What there is to stream since they were last taken."""
        self.write()
        chunks, self.chunks = self.chunks, []
        draft = self.take_draft()
        return chunks if draft is None else [*chunks, TextChunk("", [], from_draft=False, draft=draft)]

    def take_draft(self) -> CanvasDraft | None:
        """What of the canvas belongs to the answer, if the request streams drafts. ``None`` if no pass has changed it."""
        canvas, own = self.canvas, self.params.diffusion
        if own is None or not own.stream_drafts or canvas is None or self.finish_reason is not None:
            return None
        now = (canvas.start, canvas.step)
        if canvas.step == 0 or now == self.shown:
            return None
        if canvas.start != self.shown[0]:  # text has taken the place of the one before
            self.drafted = ("", [])
        self.shown = now
        self.write()
        tokens = canvas.draft()[max(0, self.length - canvas.start) :][: self.remaining]
        ends = [place for place, token in enumerate(tokens) if token in self.stop_token_ids]
        tokens = tokens[: ends[0]] if ends else tokens
        text = self.text[self.emitted_text :] + self.detokenizer.peek(tokens, MASKED)
        if (text, tokens) == self.drafted:  # the pass changed what is behind the end of the answer, or nothing
            return None
        self.drafted = (text, tokens)
        return CanvasDraft(canvas.step, text, tokens)

    def result(self) -> GenerationResult:
        """Raises the error that ended the request, if one did."""
        if self.error is not None:
            raise self.error
        assert self.finish_reason is not None
        self.write()
        return GenerationResult(
            text=self.text,
            token_ids=self.token_ids[self.num_prompt :],
            finish_reason=self.finish_reason,
            stats=self.stats,
            logprobs=self.logprobs if self.params.logprobs else None,
            top_logprobs=self.top_logprobs if self.params.logprobs and self.params.top_logprobs else None,
            prompt_logprobs=None if self.params.prompt_logprobs is None else self.prompt_logprobs,
            prompt_top_logprobs=self.prompt_top_logprobs if self.params.prompt_logprobs else None,
            error=None if self.failure is None else str(self.failure),
        )
